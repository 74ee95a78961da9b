"""Dropout whose mask depends on where an element is in the whole batch, not on which device holds it.

mask = f(seed, step, layer, row id, position), so that masks differ between rows, positions, layers and steps, and are
the same on every mesh, accumulation and number of processes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def keys_at(
    rng: Key[Array, ""], rows: Int[Array, " batch"], positions: Int[Array, " seq"]
) -> Key[Array, "batch seq"]:
    """One key for every (row id, position)."""
    per_row = jax.vmap(lambda r: jax.random.fold_in(rng, r))(rows)
    return jax.vmap(lambda k: jax.vmap(lambda p: jax.random.fold_in(k, p))(positions))(per_row)


def dropout(
    x: Float[Array, "batch seq embed"],
    rate: float,
    rng: Key[Array, ""] | None,
    rows: Int[Array, " batch"],
    positions: Int[Array, " seq"],
) -> Float[Array, "batch seq embed"]:
    """Zero a share `rate` of the elements and divide the rest by ``1 - rate``; the identity at rate 0 or with no key.

    Args:
        rows: global row ids of this shard's rows.
        positions: global positions of this shard's part of the sequence.
    """
    if rate == 0.0 or rng is None:
        return x
    keys = keys_at(rng, rows, positions)
    keep = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[2:])))(keys)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def attention_mask(
    rate: float,
    rng: Key[Array, ""],
    rows: Int[Array, " batch"],
    heads: Int[Array, " heads"],
    seq: int,
) -> Bool[Array, "batch heads seq seq"]:
    """Dropout mask of attention weights; `heads` are the global numbers of this device's heads."""

    def one(head: Int[Array, ""]) -> Bool[Array, "batch seq seq"]:
        keys = keys_at(jax.random.fold_in(rng, head), rows, jnp.arange(seq))
        return jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, (seq,))))(keys)

    return jnp.moveaxis(jax.vmap(one)(heads), 0, 1)
