"""What a caller hands to `jaxpar.parallelize`, checked where it comes in: each refusal says what was meant to come."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import policies
from jaxpar.layout import Layout
from jaxpar.mesh import Mesh
from jaxpar.precision import Precision, named
from jaxpar.rules import LAYERS, LayoutError, Leaf, Rules, paths_of
from jaxpar.staged import BLOCKS

CONTRACT = "a loss returns (summed_loss, weight, metrics), each metric a (sum, weight) pair"


def check_mesh(mesh: Any, rules: Any) -> None:
    """Refuse what is no `Mesh` or no `Rules`, and axes that this version does not run.

    Raises:
        TypeError: another kind of object; says how to make the right one.
        ValueError: an axis that is not run.
    """
    if not isinstance(mesh, Mesh):
        given = f" {mesh!r}" if isinstance(mesh, str) else ""
        raise TypeError(
            f"mesh is a {_kind(mesh)}{given}; make one with jaxpar.make_mesh({given.strip() or repr('4x2')})"
        )
    if not isinstance(rules, Rules):
        raise TypeError(
            f"rules is a {_kind(rules)}; make them with jaxpar.Rules([(pattern, dims), ...], "
            f"axes={{dimension: mesh axis or None}})"
        )
    for axis in ("stage", "expert", "context"):
        if mesh.size(axis) > 1:
            raise ValueError(
                f"mesh axis {axis}={mesh.size(axis)} is not run by this version; use size 1"
            )


def check_options(
    *, zero: Any, microbatches: Any, clip_norm: Any, small: Any, remat: Any, schedule: Any
) -> None:
    """Refuse an option out of range.

    Raises:
        ValueError: names the option, what came and what would work.
    """
    if not _whole(zero) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero {zero!r}; the stages are 0, 1, 2 and 3")
    if not _whole(microbatches) or microbatches < 1:
        raise ValueError(f"microbatches {microbatches!r}; a whole number, at least 1")
    if not _whole(small) or small < 0:
        raise ValueError(f"small {small!r}; a whole number of bytes, at least 0")
    if clip_norm is not None and not (
        isinstance(clip_norm, numbers.Real)
        and not isinstance(clip_norm, bool)
        and 0 < float(clip_norm) < math.inf
    ):
        raise ValueError(
            f"clip_norm {clip_norm!r}; a finite number above 0, or None to leave gradients as they are"
        )
    if schedule is not None:
        raise ValueError("a pipeline schedule needs a stage axis, which is not run by this version")
    if not isinstance(remat, str):
        raise ValueError(f"remat {remat!r}; a name: {', '.join(map(repr, policies.NAMES))}")
    policies.parse(remat)


def precision_of(precision: Any, reduce_dtype: Any) -> Precision:
    """The `Precision` that was asked for.

    Raises:
        ValueError: no such name, or float64 where JAX has it switched off.
    """
    if not isinstance(precision, str | Precision):
        raise ValueError(f"precision {precision!r}; a name such as 'float32' or 'bf16'")
    if not isinstance(reduce_dtype, str | None):
        raise ValueError(f"reduce_dtype {reduce_dtype!r}; a name, 'bfloat16' or 'float32'")
    kind = named(precision, reduce_dtype)
    if "float64" in (kind.update, kind.reduce) and not jax.config.read("jax_enable_x64"):
        option = "precision" if kind.update == "float64" else "reduce_dtype"
        raise ValueError(f"{option} float64 needs jax.config.update('jax_enable_x64', True)")
    return kind


def initialiser(given: Any) -> Callable[[Any], Any] | None:
    """`given` if it is ``init(rng)``, None if it is a tree of parameters or of their shapes."""
    # A module of parameters may be callable too, and has arrays; a wrapped function may be a tree, and has none.
    arrays = any(hasattr(x, "shape") for x in jax.tree.leaves(given))
    wrapped = isinstance(given, functools.partial)
    return given if callable(given) and (wrapped or not arrays) else None


def shapes_of(given: Any) -> Any:
    """Pytree of ShapeDtypeStructs of what ``init`` makes, or of a tree of parameters.

    Raises:
        TypeError: neither.
        LayoutError: a leaf that is no array.
    """
    init = initialiser(given)
    if init is not None:
        return jax.eval_shape(lambda rng: _arrays(init(rng)), jax.random.key(0))
    if given is None or isinstance(given, str):
        raise TypeError(
            f"init_or_shapes is {given!r}; init(rng) -> params, or a tree of arrays or ShapeDtypeStructs"
        )
    return jax.eval_shape(lambda: _arrays(given))


def _arrays(params: Any) -> Any:
    for path, x in zip(paths_of(params), jax.tree.leaves(params), strict=True):
        if not (hasattr(x, "shape") and hasattr(x, "dtype")) and not isinstance(x, numbers.Number):
            raise LayoutError(
                f"{path} is a {_kind(x)}, not an array; keep parameters and the rest of a model apart: "
                f"params, rest = equinox.partition(model, equinox.is_array), and equinox.combine(params, rest) "
                f"in the loss (flax.nnx.split and merge)"
            )
    return params


def transformation(
    given: Any, layout: Callable[[], Layout]
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which takes what some ask for beside gradients (the loss as `value`) and others ignore.

    Args:
        given: an optax optimizer, or a function of the `Layout` that makes one.
        layout: makes that.

    Raises:
        TypeError: neither; or the function fails, as an optimizer does that was not called.
    """
    wanted = (
        "an optax optimizer such as optax.adamw(3e-4), or a function of the Layout that makes one"
    )
    made: Any = given
    # By its methods: `MultiSteps` is an optimizer too, and no GradientTransformation.
    if not hasattr(given, "update"):
        if not callable(given):
            raise TypeError(f"optimizer is {given!r}; pass {wanted}")
        name = getattr(given, "__name__", _kind(given))
        try:
            made = given(layout())
        except TypeError as error:
            raise TypeError(
                f"optimizer {name}, a function, failed when it was given the Layout ({error}); pass {wanted}"
            ) from error
        if not hasattr(made, "update"):
            raise TypeError(f"optimizer {name} returned a {_kind(made)}; pass {wanted}")
    accumulating = getattr(made, "gradient_transformation", None)
    if accumulating is not None:
        made = accumulating()
    return optax.with_extra_args_support(made)


def check_leaves(leaves: list[Leaf], staged: bool) -> None:
    """Refuse what cannot be differentiated, and stacks that a scan cannot take apart.

    Raises:
        LayoutError: names the leaf.
    """
    for leaf in leaves:
        if not jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating):
            raise LayoutError(
                f"{leaf.path} is {leaf.dtype}: parameters are floats; keep it in the batch, or close over it"
            )
        if (
            staged
            and leaf.path.split("/")[0] == BLOCKS
            and (not leaf.dims or leaf.dims[0] != LAYERS or leaf.spec[0])
        ):
            raise LayoutError(
                f"{leaf.path}: dimension 0 of a block's parameters is the stack of layers: name it {LAYERS!r} in rule "
                f"{leaf.rule!r}, on no mesh axis"
            )


def check_loaded(params: Any, leaves: Any) -> None:
    """Refuse parameters that are not those of the layout.

    Args:
        params: pytree of arrays of true shapes.
        leaves: pytree of `Leaf`.

    Raises:
        ValueError: leaves that are missing or not known, or of another shape: up to ten of them.
    """
    wanted = {leaf.path: leaf for leaf in jax.tree.leaves(leaves, is_leaf=_is_leaf)}
    given = dict(zip(paths_of(params), jax.tree.leaves(params), strict=True))
    wrong = [
        f"{path} {leaf.shape} is missing" for path, leaf in wanted.items() if path not in given
    ]
    wrong += [
        f"{path} {np.shape(x)} is not known" for path, x in given.items() if path not in wanted
    ]
    wrong += [
        f"{path} has shape {np.shape(given[path])} and the layout {leaf.shape}"
        for path, leaf in wanted.items()
        if path in given and np.shape(given[path]) != leaf.shape
    ]
    if not wrong and jax.tree.structure(params) != jax.tree.structure(leaves, is_leaf=_is_leaf):
        wrong = [
            "the paths are the same, and the types of its nodes are others: build both trees alike"
        ]
    if wrong:
        more = f"\n  ... and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        listed = "\n  ".join(wrong[:10])
        raise ValueError(f"these parameters are not those of the layout:\n  {listed}{more}")


def key_of(rng: Any) -> Any:
    """A random key from a key or a seed.

    Raises:
        ValueError: a seed out of range, or a key of another implementation.
        TypeError: neither a seed nor a key.
    """
    if _whole(rng):
        if not 0 <= rng < 2**32:  # JAX keeps the lower 32 bits: two seeds would be one
            raise ValueError(f"seed {rng}; from 0 to {2**32 - 1}")
        return jax.random.key(rng)
    shape, dtype = getattr(rng, "shape", None), getattr(rng, "dtype", None)
    here = jax.eval_shape(lambda: jax.random.key(0))
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if dtype != here.dtype:
            raise ValueError(
                f"rng is a {dtype} and this JAX makes {here.dtype}, which the state holds: pass a seed, or choose the "
                f"implementation with jax.config.update('jax_default_prng_impl', ...)"
            )
        if shape == ():
            return rng
    raw = jax.eval_shape(jax.random.key_data, here)
    if (shape, dtype) == (raw.shape, raw.dtype):
        return rng
    kind = f"{dtype} of shape {shape}" if dtype is not None else _kind(rng)
    raise TypeError(f"rng is a {kind}; a seed such as 0, or a key such as jax.random.key(0)")


def contract(returned: Any) -> tuple[jax.Array, Any, Mapping[str, Any]]:
    """(summed loss, weight, metrics) as a loss returned them.

    Raises:
        TypeError: another number of things, or things of another kind.
        ValueError: a loss that is not one real number.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        many = f"{len(returned)} things" if isinstance(returned, tuple | list) else _kind(returned)
        raise TypeError(f"{CONTRACT}; this one returned {many}")
    loss, weight, metrics = returned
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{CONTRACT}; here metrics is {_kind(metrics)}, and {{}} if there are none")
    for name, pair in metrics.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{CONTRACT}; here metric {name!r} is {_kind(pair)}: write ({name}, 1)")
    if weight is None:
        raise TypeError(f"{CONTRACT}; here weight is None: the number of rows or tokens")
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(f"the loss has shape {loss.shape}; return the sum over rows, a scalar")
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"the loss is {loss.dtype}, which has no gradient here; return a real float"
        )
    return loss, weight, metrics


def _whole(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _kind(x: Any) -> str:
    if isinstance(x, jax.Array):
        return "one array"
    if isinstance(x, jax.sharding.Mesh):
        return "jax.sharding.Mesh"
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)
