"""The second door for a model: embedding, one block run over stacked parameters, head.

A `Staged` model lets jaxpar place work around each layer: ZeRO 3 gathers one layer at a time inside the scan, ZeRO 2
scatters one layer's gradient at a time, remat wraps the body of the scan.

```
params = {"blocks": every leaf (L, ...), ...anything else}

batch ─► embed(params, batch, rng) ─► x ─► block(layer, x, batch, rng) ... L times ─► head(params, x, batch) ─► sums
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import remat as remat_policies

BLOCKS = "blocks"
"""Key of the stacked block parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """Functions of one model over a dict of parameters whose ``"blocks"`` are stacked along dimension 0.

    Attributes:
        embed: ``(params, batch, rng) -> x``; `params` without the blocks.
        block: ``(layer_params, x, batch, rng) -> x``, one layer; `x` may be any pytree.
        head: ``(params, x, batch) -> (summed_loss, weight, metrics)``: sums over this shard's rows; a metric is a
            (sum, weight) pair.
        model_axis: "auto": functions are written for whole arrays and the compiler splits them over `model` as the
            rules and `jaxpar.constrain` say. "manual": they see their own shards and place the collectives
            over `model` themselves (`jaxpar.ops.tensor`); the loss must then be equal along `model`.
    """

    embed: Callable[..., Any]
    block: Callable[..., Any]
    head: Callable[..., Any]
    model_axis: Literal["auto", "manual"] = "auto"


def staged_loss(
    staged: Staged,
    outer: Callable[[], Any],
    layer: Callable[[Any], Any],
    stack: Any,
    batch: Any,
    rng: jax.Array | None,
    *,
    remat: str,
    gathers: bool,
) -> tuple[Any, Any, Any]:
    """(summed loss, weight, metrics) of one microbatch of one shard.

    Args:
        outer: gives the parameters outside the blocks, whole, each time it is called: what a stage does not use is
            never gathered for it.
        layer: turns one slice of `stack` into the parameters of one layer.
        stack: pytree with leaves (L, ...).
        rng: key of this step, or None in evaluation, which is then what the functions get.
        gathers: whether `layer` communicates, so that its result is not kept for the backward pass.
    """

    # The gather lies inside the wrapped function: an argument of it would be kept for the backward pass.
    def embed(batch, rng):
        return staged.embed(outer(), batch, rng)

    if gathers:
        embed = remat_policies.wrap(embed, "none", gathers=True, scanned=False)
    first = keys = None
    if rng is not None:
        count = jax.tree.leaves(stack)[0].shape[0]
        first = jax.random.fold_in(rng, 0)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(1, count + 1))
    x = embed(batch, first)

    def body(carry, parts):
        params, key = parts
        return staged.block(layer(params), carry, batch, key), None

    x, _ = lax.scan(
        remat_policies.wrap(body, remat, gathers=gathers, scanned=True), x, (stack, keys)
    )
    return staged.head(outer(), x, batch)
