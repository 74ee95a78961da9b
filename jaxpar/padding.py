"""Between stored shapes, padded with zeros, and the true shapes of a model; nothing else counts the padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.rules import Leaf


def padded(tree: Any, leaves: Any) -> Any:
    """Arrays of true shapes with zeros at the end of every dimension that `leaves` (a pytree of `Leaf`) pads."""

    def one(x: Any, leaf: Leaf) -> Any:
        if leaf.shape == leaf.stored:
            return x
        return jnp.pad(x, [(0, s - n) for s, n in zip(leaf.stored, leaf.shape, strict=True)])

    return jax.tree.map(one, tree, leaves)


def true(tree: Any, leaves: Any) -> Any:
    """Arrays of stored shapes without their padding; the inverse of `padded`."""

    def one(x: Any, leaf: Leaf) -> Any:
        return x if leaf.shape == leaf.stored else x[tuple(slice(0, n) for n in leaf.shape)]

    return jax.tree.map(one, tree, leaves)


def on_true_shapes(
    optimizer: optax.GradientTransformationExtraArgs, leaves: Any, state_leaves: Any
) -> optax.GradientTransformationExtraArgs:
    """`optimizer` on arrays without padding, for arrays with it.

    A mean over a leaf, a factored moment or a rate by shape would count the padding. Slicing it off
    and putting it back costs no communication: the padding is less than one row a device, so a part
    of the true array is as large as a part of the stored one.

    Args:
        leaves: pytree of `Leaf` of the parameters.
        state_leaves: pytree of `Leaf` of ``optimizer.init(params)``.
    """

    def init(params: Any) -> Any:
        return padded(optimizer.init(true(params, leaves)), state_leaves)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if "grad" in extra_args:
            extra_args["grad"] = true(extra_args["grad"], leaves)
        whole = None if params is None else true(params, leaves)
        inner = true(state, state_leaves)
        updates, state = optimizer.update(true(updates, leaves), inner, whole, **extra_args)
        return padded(updates, leaves), padded(state, state_leaves)

    return optax.GradientTransformationExtraArgs(init, update)
