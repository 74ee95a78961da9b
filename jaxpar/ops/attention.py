"""Causal attention as matrix products, with grouped key and value heads and a softmax in float32 or wider."""

from __future__ import annotations

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
    keep: Bool[Array, "batch heads seq seq"] | None = None,
    keep_rate: float = 1.0,
) -> Float[Array, "batch seq heads dim"]:
    """Softmax attention over earlier positions, scale 1/sqrt(dim); heads are grouped over the kv heads in order.

    Args:
        chunks: parts that the queries are taken in. Each reads only the keys up to its last query, so that n chunks
            compute (n + 1) / 2n of the scores, and keeps no scores for the backward pass: B·H·S²/n of them are alive
            at a time. Must divide seq.
        keep: dropout mask of the attention weights; kept weights are divided by `keep_rate`.
    """
    seq = query.shape[1]
    if seq % chunks:
        raise ValueError(f"attention_chunks {chunks} does not divide the sequence {seq}")
    if chunks == 1:
        return _attend(query, key, value, keep, 0, keep_rate)
    # One computation after the other: the barrier keeps the compiler from merging the backward pass's recomputation
    # with the forward pass, which would keep every score alive after all.
    attend = jax.checkpoint(_attend, static_argnums=(4, 5))
    outs = []
    for first in range(0, seq, seq // chunks):
        last = first + seq // chunks
        mask = None if keep is None else keep[:, :, first:last, :last]
        outs.append(
            attend(query[:, first:last], key[:, :last], value[:, :last], mask, first, keep_rate)
        )
    return jnp.concatenate(outs, 1)


def _attend(
    query: Float[Array, "batch queries heads dim"],
    key: Float[Array, "batch seq kv dim"],
    value: Float[Array, "batch seq kv dim"],
    keep: Bool[Array, "batch heads queries seq"] | None,
    first: int,
    keep_rate: float,
) -> Float[Array, "batch queries heads dim"]:
    """Queries from position `first` on over all of `key`, as far as each may look."""
    batch, queries, heads, dim = query.shape
    kv = key.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, queries, kv, heads // kv, dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=wide)
    place = first + jnp.arange(queries)[:, None]
    causal = place >= jnp.arange(key.shape[1])
    scores = jnp.where(causal, scores * dim**-0.5, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    if keep is not None:
        weights = jnp.where(keep.reshape(weights.shape), weights / keep_rate, 0)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights, value)
    return out.reshape(batch, queries, heads, dim)
