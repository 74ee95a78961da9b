"""Where every leaf of an optimizer's state lies: each follows its parameter, for any optax chain.

A state leaf belongs to the parameter whose path ends its own: ``0/mu/blocks/up`` follows
``blocks/up``, through masks, partitions, `MultiSteps` and injected hyperparameters alike; holes
(`MaskedNode`, `EmptyState`, None) have no leaves. Its shape says how:

* the parameter's shape: split like it;
* the parameter's shape less one dimension (Adafactor's factored moments, arXiv:1804.04235): split
  like the dimensions that are left;
* any other shape, or no parameter: whole. A large leaf is then an error, since a copy of it on
  every device is what sharding is meant to avoid.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxpar.rules import Leaf, paths_of, raise_all

LARGE = 1 << 16
"""Elements from which a state leaf that follows no parameter is an error."""


def place_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    dtype: str,
    split: Callable[[Leaf], Leaf],
) -> Any:
    """A pytree of `Leaf` like ``optimizer.init(params)``.

    Args:
        params: pytree of `Leaf` without ZeRO.
        dtype: element type of the floating point leaves that the optimizer updates.
        split: ZeRO's transform of one moment.

    Raises:
        LayoutError: a large leaf follows no parameter.
    """
    by_path = {leaf.path: leaf for leaf in jax.tree.leaves(params, is_leaf=_is_row)}

    raise_all(
        [
            f"{leaf.path} is a random key, which no optimizer updates; keep parameters and the "
            f"rest of a model apart (flax.nnx.split(model, nnx.Param, ...))"
            for leaf in by_path.values()
            if leaf.dtype.startswith("key<")
        ]
    )

    def array(leaf: Leaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, dtype if leaf.floating else leaf.dtype)

    state = jax.eval_shape(optimizer.init, jax.tree.map(array, params, is_leaf=_is_row))
    flat, treedef = jax.tree.flatten(state)
    paths = paths_of(state)
    errors: dict[str, str] = {}
    out = []
    for path, x, owners in zip(paths, flat, _owners(paths, by_path), strict=True):
        plain = Leaf(
            path=path,
            kind="other",
            shape=tuple(x.shape),
            stored=tuple(x.shape),
            dtype=str(x.dtype),
            dims=("",) * len(x.shape),
            spec=((),) * len(x.shape),
            reason="whole: not the shape of a parameter",
        )
        follows = next((f for o in owners if (f := _follow(plain, o)) is not None), None)
        # One reason a parameter: its factored moments all fail together.
        for about, reason in _wrong(plain, follows, owners):
            errors.setdefault(about, reason)
        out.append(plain if follows is None else split(follows))
    raise_all(list(errors.values()))
    return jax.tree.unflatten(treedef, out)


def _owners(paths: Sequence[str], by_path: Mapping[str, Leaf]) -> list[list[Leaf]]:
    """For every state path the parameters whose path ends it, the likeliest first.

    With parameters ``w`` and ``mu/w``, ``0/mu/w`` could be the moment of ``w`` below ``0/mu`` or
    something of ``mu/w`` below ``0``. The place below which more parameters stand is right; among
    equals the longer parameter path.
    """
    found = []
    for path in paths:
        names = path.split("/")
        splits = [("/".join(names[:i]), "/".join(names[i:])) for i in range(len(names))]
        splits.append((path, ""))
        found.append([(place, by_path[end]) for place, end in splits if end in by_path])
    count = collections.Counter(place for owners in found for place, _ in owners)
    # Sorting is stable and `splits` runs from the longest end to the shortest.
    return [[leaf for _, leaf in sorted(owners, key=lambda o: -count[o[0]])] for owners in found]


def _follow(state: Leaf, parameter: Leaf) -> Leaf | None:
    """The state leaf split as far as its dimensions are the parameter's; None if they are not."""
    kept = list(range(len(parameter.shape)))
    if state.shape != parameter.shape:
        whole = parameter.shape
        fits = [i for i in kept if whole[:i] + whole[i + 1 :] == state.shape]
        if not fits or math.prod(state.shape) == 1:
            return None
        kept.remove(_dropped(state.path, fits))

    def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[i] for i in kept)

    return dataclasses.replace(
        state,
        kind="moment",
        stored=pick(parameter.stored),
        dims=pick(parameter.dims),
        spec=pick(parameter.spec),
        rule=parameter.rule,
        role=parameter.role,
        reason=f"follows {parameter.path}",
    )


def _dropped(path: str, fits: Sequence[int]) -> int:
    """Which of the dimensions that could be missing is. More than one could where sizes are equal:
    optax takes the mean over the last of the largest for ``v_row``, over the one before it for
    ``v_col`` (`optax.scale_by_factored_rms`).
    """
    if len(fits) > 1 and "v_row" in path.split("/"):
        return fits[-1]
    return fits[-2] if len(fits) > 1 else fits[0]


def _wrong(state: Leaf, follows: Leaf | None, owners: Sequence[Leaf]) -> list[tuple[str, str]]:
    """Pairs of what is at fault and the reason; none if the leaf can lie where it is put."""
    owner = owners[0] if owners else None
    if follows is None and math.prod(state.stored) > LARGE:
        cause = (
            "follows no parameter"
            if owner is None
            else f"belongs to {owner.path} and has not its shape {owner.shape}, nor that less one "
            f"dimension"
        )
        reason = (
            f"optimizer state {state.path} {state.stored} {cause}: it would be whole on every "
            f"device. State is split where its path ends in a parameter's and its shape follows"
        )
        return [(state.path, reason)]
    return []


def _is_row(x: Any) -> bool:
    return isinstance(x, Leaf)
