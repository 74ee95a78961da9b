"""ZeRO stages 0-3 as transforms of the rows of a Layout (arXiv:1910.02054, section 5).

| stage | parameters | gradients | masters, moments | bytes, N parameters on K devices, 2 + 2 + 12 |
|-------|------------|-----------|------------------|----------------------------------------------|
| 0     | whole      | whole     | whole            | 16 N                                         |
| 1     | whole      | whole     | 1/K              | 4 N + 12 N / K                               |
| 2     | whole      | 1/K       | 1/K              | 2 N + 14 N / K                               |
| 3     | 1/K        | 1/K       | 1/K              | 16 N / K                                     |

A leaf is split over every one of `SHARDED_OVER` along which it is a copy. `replica` is left out:
there every device keeps its copy (hybrid sharding, ZeRO inside and copies outside).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxpar.rules import LAYERS, Leaf

SHARDED_OVER = ("data", "context", "expert")
"""Axes that ZeRO splits over."""

# The last two dimensions of an array lie on a TPU in tiles of 8 x 128: a thinner part is padded,
# and the compiler turns its reduce-scatter into an all-reduce.
_TILE = {1: 128, 2: 8}


def shard(leaf: Leaf, sizes: Mapping[str, int], *, combine: bool = True) -> Leaf:
    """`leaf` split over every axis of ZeRO along which it is a copy, on one dimension; else whole.

    The dimension is chosen so that a part fills whole TPU tiles, then among those not split yet,
    then the largest. Where none divides the leaf stays whole, and its reason says so. Only shape,
    names and split decide, so a parameter's gradient, master and moments are all split alike.

    Args:
        combine: whether a dimension may be split by the model's rules and by ZeRO at once.
    """
    axes = tuple(a for a in SHARDED_OVER if a in leaf.copies(sizes))
    if not axes:
        return leaf
    if 0 in leaf.stored:  # 0 divides by everything, and there is nothing to split
        return dataclasses.replace(leaf, reason=_also(leaf, "kept whole: it has no elements"))
    count = math.prod(sizes[a] for a in axes)
    local = leaf.local(sizes)
    choices = []
    for i, (dim, names, n) in enumerate(zip(leaf.dims, leaf.spec, local, strict=True)):
        if dim == LAYERS or n % count or (names and not combine):
            continue
        thin = (n // count) % _TILE.get(len(local) - i, 1) != 0
        choices.append((thin, bool(names), -n, i))
    on = " x ".join(f"{a}={sizes[a]}" for a in axes)
    if not choices:
        return dataclasses.replace(
            leaf, reason=_also(leaf, f"kept whole: no dimension divides by {on}")
        )
    i = min(choices)[-1]
    spec = list(leaf.spec)
    spec[i] = (*spec[i], *axes)
    return dataclasses.replace(
        leaf, spec=tuple(spec), reason=_also(leaf, f"zero: {leaf.dims[i]} over {on}")
    )


def _also(leaf: Leaf, reason: str) -> str:
    return reason if leaf.reason == "rule" else f"{leaf.reason}; {reason}"


def split_from(kind: str) -> int:
    """Lowest stage that splits a kind: 3 for parameters, 2 for gradients, 1 for the rest."""
    return {"parameter": 3, "gradient": 2}.get(kind, 1)
