"""Transformer blocks in Flax NNX: Llama style (RMSNorm, RoPE, grouped heads, SwiGLU) and GPT-2 style (LayerNorm, GELU,
biases).

Modules declare the parameters of one layer; `jaxpar.models.decoder` stacks them and runs the stack under one scan. A
module reads its sizes from its arrays, so the same code runs on whole weights and on one device's columns or rows.

Letters: B batch, S sequence, E embed, H heads, K kv heads, D head size, F mlp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from jaxpar.config import ModelConfig
from jaxpar.ops.activations import swiglu
from jaxpar.ops.attention import causal_attention, rotary
from jaxpar.ops.dropout import attention_mask, dropout
from jaxpar.ops.linear import product
from jaxpar.ops.tensor import TensorAxis, group_of_heads


class Context(NamedTuple):
    """What a block needs besides its input.

    Attributes:
        axis: the `model` axis.
        rows: global row ids, (B,).
        positions: global positions, (1 or B, S).
        local: positions of this device's part of the sequence, (S or S/m,).
        rng: key of this step and layer, or None: no dropout.
        attention_chunks: parts that the queries are taken in.
        segments: document of every position of packed rows (B, S), or None: a row is one document.
    """

    axis: TensorAxis
    rows: Int[Array, " batch"]
    positions: Int[Array, "#batch seq"]
    local: Int[Array, " part"]
    rng: Key[Array, ""] | None
    attention_chunks: int = 1
    segments: Int[Array, "batch seq"] | None = None


def _normal(key: Key[Array, ""], shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32))


class Norm(nnx.Module):
    """RMSNorm (arXiv:1910.07467) or, with a bias, LayerNorm (arXiv:1607.06450); statistics in float32 or wider."""

    def __init__(self, width: int, *, eps: float, bias: bool):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        if bias:
            self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = hasattr(self, "bias")
        if centred:
            wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        y = wide.astype(x.dtype) * self.scale[...].astype(x.dtype)
        return y + self.bias[...].astype(x.dtype) if centred else y


class Attention(nnx.Module):
    """Causal self-attention: query, key and value split by heads over `model`, output by rows."""

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        std, e = c.embed**-0.5, c.embed
        self.query = _normal(rngs.params(), (e, c.heads, c.head_dim), std)
        self.key = _normal(rngs.params(), (e, c.kv_heads, c.head_dim), std)
        self.value = _normal(rngs.params(), (e, c.kv_heads, c.head_dim), std)
        # The residual stream adds 2L outputs: scaled so that its variance stays near 1 (GPT-2, section 2.3).
        std = (c.heads * c.head_dim * 2 * c.layers) ** -0.5
        self.out = _normal(rngs.params(), (c.heads, c.head_dim, e), std)
        if c.style == "gpt2":
            self.query_bias = nnx.Param(jnp.zeros((c.heads, c.head_dim)))
            self.key_bias = nnx.Param(jnp.zeros((c.kv_heads, c.head_dim)))
            self.value_bias = nnx.Param(jnp.zeros((c.kv_heads, c.head_dim)))
            self.out_bias = nnx.Param(jnp.zeros((e,)))
        self.config = c

    def project(
        self, x: Float[Array, "batch seq embed"], at: Context
    ) -> tuple[Float[Array, "batch seq heads dim"], ...]:
        """Query, key and value of the heads of this device, turned by their positions."""
        c = self.config
        kv = [
            group_of_heads(w[...], at.axis, dim=1, kv_heads=c.kv_heads)
            for w in (self.key, self.value)
        ]
        q, k, v = (product(x, w) for w in (self.query[...], *kv))
        if c.style == "gpt2":
            q = q + self.query_bias[...]
            biases = (self.key_bias[...], self.value_bias[...])
            k, v = (
                y + group_of_heads(b, at.axis, dim=0, kv_heads=c.kv_heads)
                for y, b in zip((k, v), biases, strict=True)
            )
        else:
            q, k = (rotary(y, at.positions, c.rope_theta) for y in (q, k))
        named = zip((q, k, v), ("query", "key", "value"), strict=True)
        return tuple(checkpoint_name(y, name) for y, name in named)

    def output(
        self, y: Float[Array, "batch seq heads dim"], at: Context
    ) -> Float[Array, "batch seq embed"]:
        """What the heads of this device add to the residual stream, to be summed over `model`."""
        y = product(y, self.out[...], 2)
        return y + at.axis.once(self.out_bias[...]) if self.config.style == "gpt2" else y

    def __call__(
        self, x: Float[Array, "batch seq embed"], at: Context
    ) -> Float[Array, "batch seq embed"]:
        c = self.config
        q, k, v = self.project(x, at)
        keep = None
        if c.dropout and at.rng is not None:
            heads = at.axis.index() * q.shape[2] + jnp.arange(q.shape[2])
            keep = attention_mask(c.dropout, at.rng, at.rows, heads, q.shape[1])
        y = causal_attention(
            q, k, v, chunks=at.attention_chunks, segments=at.segments,
            keep=keep, keep_rate=1 - c.dropout,
        )  # fmt: skip
        return self.output(checkpoint_name(y, "attention"), at)


class Mlp(nnx.Module):
    """SwiGLU (arXiv:2002.05202) or GELU with biases: in by columns, out by rows."""

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        if c.style == "llama":
            self.gate = _normal(rngs.params(), (c.embed, c.mlp), c.embed**-0.5)
        self.up = _normal(rngs.params(), (c.embed, c.mlp), c.embed**-0.5)
        self.down = _normal(rngs.params(), (c.mlp, c.embed), (c.mlp * 2 * c.layers) ** -0.5)
        if c.style == "gpt2":
            self.up_bias = nnx.Param(jnp.zeros((c.mlp,)))
            self.down_bias = nnx.Param(jnp.zeros((c.embed,)))
        self.config = c

    def __call__(
        self, x: Float[Array, "batch seq embed"], at: Context
    ) -> Float[Array, "batch seq embed"]:
        up = checkpoint_name(product(x, self.up[...]), "up")
        if self.config.style == "llama":
            gate = checkpoint_name(product(x, self.gate[...]), "gate")
            return product(swiglu(gate, up), self.down[...])
        hidden = jax.nn.gelu(up + self.up_bias[...], approximate=True)
        return product(hidden, self.down[...]) + at.axis.once(self.down_bias[...])


class Block(nnx.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: ModelConfig, *, rngs: nnx.Rngs):
        bias = c.style == "gpt2"
        self.attention_norm = Norm(c.embed, eps=c.norm_eps, bias=bias)
        self.attention = Attention(c, rngs=rngs)
        self.mlp_norm = Norm(c.embed, eps=c.norm_eps, bias=bias)
        self.mlp = Mlp(c, rngs=rngs)
        self.rate, self.heads = c.dropout, c.heads

    def __call__(
        self, x: Float[Array, "batch part embed"], at: Context
    ) -> Float[Array, "batch part embed"]:
        x = checkpoint_name(x, "block_input")
        for i, (norm, inner) in enumerate(
            ((self.attention_norm, self.attention), (self.mlp_norm, self.mlp))
        ):
            here = at if at.rng is None else at._replace(rng=jax.random.fold_in(at.rng, i))
            y = at.axis.leave(inner(at.axis.enter(norm(x)), here))
            # Attention draws from its key by head and row; the output draws from another.
            drop = None if here.rng is None else jax.random.fold_in(here.rng, self.heads)
            x = x + dropout(y, self.rate, drop, at.rows, at.local)
            if i == 0:
                x = checkpoint_name(x, "mlp_input")
        return x


def pure(module: nnx.Module) -> dict[str, Any]:
    """The parameters of a module as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
