"""Where every leaf of an optimizer's state lies: each follows its parameter, for any optax chain.

A state leaf belongs to the parameter whose path is the longest suffix of its own: ``0/mu/blocks/up`` follows
``blocks/up``, through masks, partitions, `MultiSteps` and injected hyperparameters alike; holes (`MaskedNode`,
`EmptyState`, None) have no leaves. Its shape says how:

* the parameter's shape: split like it;
* the parameter's shape less one dimension (Adafactor's factored moments): split like the dimensions that are left;
* one element, or no parameter: whole. A large leaf that follows no parameter is an error, since a copy of it on every
  device is what sharding is meant to avoid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jaxpar.rules import Leaf, LayoutError, paths_of

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
        dtype: element type of what the optimizer updates.
        split: ZeRO's transform of one moment.

    Raises:
        LayoutError: a large leaf follows no parameter, or a factored moment of a padded parameter, whose means would
            count the padding.
    """
    is_leaf = lambda x: isinstance(x, Leaf)  # noqa: E731
    by_path = {leaf.path: leaf for leaf in jax.tree.leaves(params, is_leaf=is_leaf)}
    arrays = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.stored, dtype), params, is_leaf=is_leaf)
    state = jax.eval_shape(optimizer.init, arrays)

    def one(path: str, x: Any) -> Leaf:
        parameter = _owner(path, by_path)
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
        if parameter is not None:
            follows = _follow(plain, parameter)
            if follows is not None:
                return split(follows)
        if math.prod(x.shape) > LARGE:
            raise LayoutError(
                f"optimizer state {path} {tuple(x.shape)} follows no parameter: it would be whole on every device; "
                f"its path should end in a parameter's path"
            )
        return plain

    flat, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, map(one, paths_of(state), flat))


def _owner(path: str, by_path: Mapping[str, Leaf]) -> Leaf | None:
    names = path.split("/")
    for start in range(len(names)):
        leaf = by_path.get("/".join(names[start:]))
        if leaf is not None:
            return leaf
    return by_path.get("")


def _follow(state: Leaf, parameter: Leaf) -> Leaf | None:
    """The state leaf with the dimensions that it shares with its parameter, or None where it has another shape."""
    kept = list(range(len(parameter.stored)))
    if state.stored != parameter.stored:
        dropped = next(
            (i for i in kept if parameter.stored[:i] + parameter.stored[i + 1 :] == state.stored), None
        )
        if dropped is None or not state.stored or math.prod(state.stored) == 1:
            return None
        if parameter.stored != parameter.shape:
            raise LayoutError(
                f"{parameter.path}: {parameter.reason}, and the optimizer keeps factored moments of it ({state.path}); "
                f"means over the padding would be wrong. Use a size that divides, or an optimizer that is not factored"
            )
        kept.remove(dropped)

    def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[i] for i in kept)

    return dataclasses.replace(
        state,
        kind="moment",
        shape=pick(parameter.shape),
        dims=pick(parameter.dims),
        spec=pick(parameter.spec),
        rule=parameter.rule,
        role=parameter.role,
        reason=f"follows {parameter.path}",
    )
