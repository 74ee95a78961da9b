"""The built-in decoder: embedding, a scanned stack of blocks, head and loss, as a `Staged` model.

`make` gives the three things that `jaxpar.parallelize` asks for: the staged functions, an initialiser and the rules.
The tree of parameters is named in `rules_for`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxpar.config import ModelConfig
from jaxpar.models.blocks import Block, Context, Norm, pure
from jaxpar.ops.cross_entropy import Head, cross_entropy
from jaxpar.ops.dropout import dropout
from jaxpar.ops.tensor import TensorAxis, vocab_embedding
from jaxpar.rules import Rules
from jaxpar.staged import Staged


def make(
    config: ModelConfig,
    *,
    loss_chunks: int = 1,
    z_loss: float = 0.0,
    sequence_parallel: bool = True,
    attention_chunks: int | None = None,
) -> tuple[Staged, Any, Rules]:
    """The decoder of `config`.

    A batch holds tokens and targets (rows, seq), and for packed rows segments (1.. for each document, 0 for padding) and
    positions (from 0 in each document): attention then stays within a document.

    Args:
        loss_chunks: parts that the tokens of a shard are taken in when the loss is computed.
        z_loss: weight of the squared log normaliser.
        attention_chunks: parts that the queries are taken in; by default one for every 1024 of them.
        sequence_parallel: split activations between blocks along the sequence over `model`.

    Returns:
        (staged, init_fn, rules); ``init_fn(rng)`` gives float32 parameters.

    Raises:
        ValueError: heads that the key and value heads do not divide, or an odd head_dim under rotary positions. A mesh
            or a sequence that does not fit is one too, when a step is traced.
    """
    if config.heads % config.kv_heads:
        fits = [k for k in range(1, config.heads + 1) if config.heads % k == 0]
        raise ValueError(
            f"heads {config.heads} does not divide by kv_heads {config.kv_heads}; kv_heads of {fits} would"
        )
    if config.style == "llama" and config.head_dim % 2:
        raise ValueError(
            f"head_dim {config.head_dim} is odd; rotary positions pair its halves, so it must be even"
        )
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    run = functools.partial(_block, config, graph, sequence_parallel, attention_chunks)
    staged = Staged(
        embed=functools.partial(embed, config, sequence_parallel),
        block=run,
        head=functools.partial(_head, config, loss_chunks, z_loss, sequence_parallel),
        model_axis="manual",
    )
    return staged, functools.partial(init, config), rules_for(config)


def init(config: ModelConfig, rng: Key[Array, ""]) -> dict[str, Any]:
    """Random float32 parameters; the layers are stacked along dimension 0 of every leaf of ``blocks``."""
    table, position, blocks, head = jax.random.split(rng, 4)
    std = 0.02 if config.tied or config.style == "gpt2" else 1.0
    shape = (config.vocab, config.embed)
    params: dict[str, Any] = {
        "embed": {"tokens": std * jax.random.normal(table, shape, jnp.float32)},
        "blocks": jax.vmap(lambda key: pure(Block(config, rngs=nnx.Rngs(key))))(
            jax.random.split(blocks, config.layers)
        ),
        "final_norm": pure(_final_norm(config)),
    }
    if config.style == "gpt2":
        shape = (config.positions, config.embed)
        params["embed"]["positions"] = 0.01 * jax.random.normal(position, shape, jnp.float32)
    if not config.tied:
        shape = (config.embed, config.vocab)
        # Small, so that the first loss is that of a uniform guess, log(vocab).
        params["head"] = {"kernel": 0.02 * jax.random.normal(head, shape, jnp.float32)}
    return params


def rules_for(config: ModelConfig) -> Rules:
    """Names of every dimension, and which of them `model` splits (Megatron-LM, arXiv:1909.08053 section 3)."""
    a = "blocks/attention"
    entries: list[tuple[Any, ...]] = [
        ("embed/tokens", ("vocab", "embed"), "embedding"),
        (r"blocks/(attention|mlp)_norm/scale", ("layers", "embed"), "norm"),
        ("final_norm/scale", ("embed",), "norm"),
        (f"{a}/query", ("layers", "embed", "heads", "head_dim")),
        (f"{a}/(key|value)", ("layers", "embed", "kv_heads", "head_dim")),
        (f"{a}/out", ("layers", "heads", "head_dim", "embed")),
        ("blocks/mlp/(gate|up)", ("layers", "embed", "mlp")),
        ("blocks/mlp/down", ("layers", "mlp", "embed")),
    ]
    if config.style == "gpt2":
        entries += [
            ("embed/positions", ("positions", "embed"), "embedding"),
            (r"blocks/(attention|mlp)_norm/bias", ("layers", "embed"), "bias"),
            ("final_norm/bias", ("embed",), "bias"),
            (f"{a}/query_bias", ("layers", "heads", "head_dim"), "bias"),
            (f"{a}/(key|value)_bias", ("layers", "kv_heads", "head_dim"), "bias"),
            (f"{a}/out_bias", ("layers", "embed"), "bias"),
            ("blocks/mlp/up_bias", ("layers", "mlp"), "bias"),
            ("blocks/mlp/down_bias", ("layers", "embed"), "bias"),
        ]
    if not config.tied:
        entries.append(("head/kernel", ("embed", "vocab")))
    names = ("vocab", "heads", "kv_heads", "mlp")
    whole = ("layers", "embed", "head_dim") + (("positions",) if config.style == "gpt2" else ())
    axes = {**dict.fromkeys(names, "model"), **dict.fromkeys(whole, None)}
    return Rules(entries, axes=axes, pad=("vocab",), replicate=("kv_heads",))


def _final_norm(config: ModelConfig) -> Norm:
    return Norm(config.embed, eps=config.norm_eps, bias=config.style == "gpt2")


def _positions(batch: dict[str, Array]) -> Int[Array, "#batch seq"]:
    given = batch.get("positions")
    return jnp.arange(batch["tokens"].shape[1])[None] if given is None else given


def embed(
    config: ModelConfig,
    sequence: bool,
    params: Any,
    batch: dict[str, Array],
    rng: Key[Array, ""] | None,
) -> Float[Array, "batch part embed"]:
    """The first activations: rows of the table, and of the learned positions (gpt2), this part of the sequence."""
    axis = TensorAxis.here(sequence=sequence)
    _check_fit(config, axis, batch)
    x = vocab_embedding(params["embed"]["tokens"], batch["tokens"], axis)
    places = axis.sequence_part(_positions(batch), 1)
    if config.style == "gpt2":
        x = x + params["embed"]["positions"][places]
    local = axis.sequence_part(jnp.arange(batch["tokens"].shape[1]), 0)
    return dropout(x, config.dropout, rng, batch["row_id"], local)


def _check_fit(config: ModelConfig, axis: TensorAxis, batch: dict[str, Array]) -> None:
    """Refuse a mesh or a sequence for which a device's part would have another shape than its code expects."""
    kv, parts, seq = config.kv_heads, axis.size, batch["tokens"].shape[1]
    if kv % parts and parts % kv:
        fits = [
            k
            for k in range(1, config.heads + 1)
            if config.heads % k == 0 and (k % parts == 0 or parts % k == 0)
        ]
        raise ValueError(
            f"kv_heads {kv} and model={parts}: one must divide the other; kv_heads of {fits} would"
        )
    if axis.sequence and seq % parts:
        raise ValueError(
            f"sequence {seq} does not divide by model={parts}; {seq // parts * parts or parts} would, or "
            f"sequence_parallel=False"
        )
    if config.style == "gpt2" and "positions" not in batch and seq > config.positions:
        raise ValueError(f"sequence {seq} is longer than the {config.positions} learned positions")


def _block(
    config: ModelConfig,
    graph: Any,
    sequence: bool,
    chunks: int | None,
    params: Any,
    x: Float[Array, "batch part embed"],
    batch: dict[str, Array],
    rng: Key[Array, ""] | None,
) -> Float[Array, "batch part embed"]:
    axis = TensorAxis.here(sequence=sequence)
    seq = batch["tokens"].shape[1]
    at = Context(
        axis=axis,
        rows=batch["row_id"],
        positions=_positions(batch),
        local=axis.sequence_part(jnp.arange(seq), 0),
        rng=rng,
        attention_chunks=chunks or default_chunks(seq),
        segments=batch.get("segments"),
    )
    return nnx.merge(graph, as_state(params))(x, at)


def default_chunks(seq: int) -> int:
    """Parts that attention takes its queries in: the most equal ones with at least 1024 queries each."""
    return next(n for n in range(max(1, seq // 1024), 0, -1) if seq % n == 0)


def _head(
    config: ModelConfig,
    chunks: int,
    z_loss: float,
    sequence: bool,
    params: Any,
    x: Float[Array, "batch part embed"],
    batch: dict[str, Array],
) -> tuple[Float[Array, ""], Int[Array, ""], dict[str, Any]]:
    axis = TensorAxis.here(sequence=sequence)
    x = axis.enter(normed(config, params, x))
    kernel = params["embed"]["tokens"] if config.tied else params["head"]["kernel"]
    head = Head(vocab=config.vocab, chunks=chunks, z_loss=z_loss, axis=axis, transposed=config.tied)
    loss, weight = cross_entropy(x, kernel, batch["targets"], head)
    return loss, weight, {}


def normed(
    config: ModelConfig, params: Any, x: Float[Array, "*rows embed"]
) -> Float[Array, "*rows embed"]:
    """The final norm."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: _final_norm(config)))
    return nnx.merge(graph, as_state(params["final_norm"]))(x)


def as_state(params: Any) -> nnx.State:
    """Nested dicts of arrays as the state of a module: the inverse of `pure`."""
    return nnx.State(jax.tree.map(nnx.Param, params))


def next_token_logits(
    config: ModelConfig, params: Any, tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch vocab"]:
    """Logits of the token after each row of `tokens`, on one device with whole parameters (true shapes)."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    batch = {"tokens": tokens, "row_id": jnp.arange(tokens.shape[0])}
    x = embed(config, False, params, batch, None)
    x, _ = jax.lax.scan(
        lambda y, p: (_block(config, graph, False, None, p, y, batch, None), None),
        x,
        params["blocks"],
    )
    x = normed(config, params, x[:, -1])
    kernel = params["embed"]["tokens"].T if config.tied else params["head"]["kernel"]
    return (x @ kernel).astype(jnp.promote_types(x.dtype, jnp.float32))
