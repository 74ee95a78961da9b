"""Causal attention as matrix products, with grouped key and value heads and a softmax in float32 or wider."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rotary(
    x: Float[Array, "batch seq heads dim"], positions: Int[Array, "#batch seq"], theta: float
) -> Float[Array, "batch seq heads dim"]:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), first half of `dim` paired with the second.

    Angle of pair i at position p: ``p * theta ** (-2 i / dim)``, in float32 or wider.
    """
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = positions[..., None].astype(wide) * frequency
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def causal_attention(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv dim"],
    value: Float[Array, "batch seq kv dim"],
    *,
    chunks: int = 1,
    segments: Int[Array, "batch seq"] | None = None,
    keep: Bool[Array, "batch heads seq seq"] | None = None,
    keep_rate: float = 1.0,
) -> Float[Array, "batch seq heads dim"]:
    """Softmax attention over earlier positions, scale 1/sqrt(dim); heads are grouped over the kv heads in order.

    Args:
        chunks: parts that the queries are taken in. Each reads only the keys up to its last query, so that n chunks
            compute (n + 1) / 2n of the scores, and keeps no scores for the backward pass: B·H·S²/n of them are alive
            at a time. Must divide seq.
        segments: document of every position; a query reads the keys of its own document alone. Compared where the
            scores are made, and nothing of it is kept for the backward pass: a weight of 0 gives a gradient of 0.
        keep: dropout mask of the attention weights; kept weights are divided by `keep_rate`.
    """
    seq = query.shape[1]
    if seq % chunks:
        raise ValueError(f"attention_chunks {chunks} does not divide the sequence {seq}")
    if chunks == 1:
        documents = None if segments is None else (segments, segments)
        return _attend(query, key, value, keep, documents, 0, keep_rate)
    # One computation after the other: the barrier keeps the compiler from merging the backward pass's recomputation
    # with the forward pass, which would keep every score alive after all.
    attend = jax.checkpoint(_attend, static_argnums=(5, 6))
    outs = []
    for first in range(0, seq, seq // chunks):
        last = first + seq // chunks
        mask = None if keep is None else keep[:, :, first:last, :last]
        documents = None if segments is None else (segments[:, first:last], segments[:, :last])
        parts = (query[:, first:last], key[:, :last], value[:, :last], mask, documents)
        outs.append(attend(*parts, first, keep_rate))
    return jnp.concatenate(outs, 1)


def _attend(
    query: Float[Array, "batch queries heads dim"],
    key: Float[Array, "batch seq kv dim"],
    value: Float[Array, "batch seq kv dim"],
    keep: Bool[Array, "batch heads queries seq"] | None,
    documents: tuple[Int[Array, "batch queries"], Int[Array, "batch seq"]] | None,
    first: int,
    keep_rate: float,
) -> Float[Array, "batch queries heads dim"]:
    """Queries from position `first` on over all of `key`, as far as each may look."""
    batch, queries, heads, dim = query.shape
    kv = key.shape[2]
    grouped = query.reshape(batch, queries, kv, heads // kv, dim)
    if keep is not None:
        keep = keep.reshape(batch, kv, heads // kv, queries, key.shape[1])
    out = _core(grouped, key, value, keep, documents, first, keep_rate)
    return out.reshape(query.shape)  # pyright: ignore[reportAttributeAccessIssue]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _core(query, key, value, keep, documents, first, keep_rate):
    """Attention of queries (B, Q, K, G, D), grouped over their kv heads, over keys and values (B, S, K, D)."""
    return _core_forward(query, key, value, keep, documents, first, keep_rate)[0]


def _core_forward(query, key, value, keep, documents, first, keep_rate):
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key, preferred_element_type=wide)
    place = first + jnp.arange(query.shape[1])[:, None]
    seen = place >= jnp.arange(key.shape[1])
    if documents is not None:
        own, other = documents
        seen = seen & (own[:, None, None, :, None] == other[:, None, None, None, :])
    scores = jnp.where(seen, scores * query.shape[-1] ** -0.5, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    out = jnp.einsum("bkgqs,bskd->bqkgd", _dropped(weights, keep, keep_rate), value)
    return out, (query, key, value, keep, weights)


def _core_backward(first, keep_rate, residual, cotangent):
    """Gradients with every product in the compute dtype: differentiation would multiply float32 scores.

    On CPU dP stays in float32, as its kernel makes it; elsewhere it comes out in the compute dtype, as differentiation
    would have it, for a wide B·H·Q·S more would be alive at the peak (0.8 GiB of Llama 3.1 8B on 16 x 4 chips).

    dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(dP P));  dQ = dS K / sqrt(D);  dK = dS^T Q / sqrt(D)
    """
    query, key, value, keep, weights = residual
    wide = jnp.promote_types(query.dtype, jnp.float32)
    used = _dropped(weights, keep, keep_rate)
    d_value = jnp.einsum("bkgqs,bqkgd->bskd", used, cotangent)
    product = functools.partial(jnp.einsum, "bqkgd,bskd->bkgqs")
    d_weights = jax.lax.platform_dependent(
        cotangent,
        value,
        cpu=functools.partial(product, preferred_element_type=wide),
        default=lambda ct, v: product(ct, v).astype(wide),
    )
    d_weights = _dropped(d_weights, keep, keep_rate)
    p = weights.astype(wide)
    d_scores = p * (d_weights - jnp.sum(d_weights * p, -1, keepdims=True))
    # Read by two products, one of them transposed: made once.
    d_scores = jax.lax.optimization_barrier(
        (d_scores * query.shape[-1] ** -0.5).astype(query.dtype)
    )
    d_query = jnp.einsum("bkgqs,bskd->bqkgd", d_scores, key)
    d_key = jnp.einsum("bkgqs,bqkgd->bskd", d_scores, query)
    return d_query, d_key, d_value, None, None


_core.defvjp(_core_forward, _core_backward)


def cached_attention(
    query: Float[Array, "batch heads dim"],
    key: Float[Array, "batch kv dim"],
    value: Float[Array, "batch kv dim"],
    past_key: Float[Array, "batch length kv dim"],
    past_value: Float[Array, "batch length kv dim"],
    count: Int[Array, " batch"],
) -> Float[Array, "batch heads dim"]:
    """Attention of one new position a row over the first `count` cached ones and itself; no gradient is needed.

    The new key and value come apart from the cache, which is only read: it can be written once for all layers.
    """
    batch, heads, dim = query.shape
    kv, length = key.shape[1], past_key.shape[1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, kv, heads // kv, dim)
    past = jnp.einsum("bkgd,btkd->bkgt", grouped, past_key, preferred_element_type=wide)
    seen = jnp.arange(length) < count[:, None, None, None]
    past = jnp.where(seen, past * dim**-0.5, jnp.finfo(wide).min)
    own = jnp.einsum("bkgd,bkd->bkg", grouped, key, preferred_element_type=wide) * dim**-0.5
    scores = jnp.concatenate([past, own[..., None]], -1)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    out = jnp.einsum("bkgt,btkd->bkgd", weights[..., :-1], past_value, preferred_element_type=wide)
    out = out + weights[..., -1:].astype(wide) * value[:, :, None].astype(wide)
    return out.reshape(query.shape).astype(query.dtype)


def _dropped(x: Array, keep: Bool[Array, "..."] | None, keep_rate: float) -> Array:
    return x if keep is None else jnp.where(keep, x / keep_rate, 0)
