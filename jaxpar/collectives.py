"""The collectives that jaxpar places by hand, and the only place that knows which axes are manual.

Inside `jax.shard_map` the context mesh says which axes are manual; nothing here keeps state. A logical axis is found
there by its name: `data` is ``data`` or the sub-axes ``data_0, data_1, ...`` (see `jaxpar.mesh`).

Ring costs, for V bytes over K devices (each device sends): all-gather and reduce-scatter V(K-1)/K, all-reduce
2V(K-1)/K. Sub-axes are taken one ring after the other, which sends the same bytes in total.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from jaxpar.axes import AXES, BATCH_AXES


def _context() -> Any:
    return jax.sharding.get_abstract_mesh()


def _of(names: Sequence[str], logical: Sequence[str]) -> tuple[str, ...]:
    return tuple(n for axis in logical for n in names if n.rsplit("_", 1)[0] == axis or n == axis)


def manual_axes(*logical: str) -> tuple[str, ...]:
    """Physical axes of the logical axes `logical` that are manual at this point (`()` outside `shard_map`)."""
    return _of(tuple(_context().manual_axes), logical)


def constrain(x: Any, *dims: str | tuple[str, ...] | None) -> Any:
    """Ask the partitioner to split dimension i of `x` over the logical axes `dims[i]`.

    Axes that are manual here, or absent from the mesh, are dropped for their dimension alone; with no mesh in context
    this is the identity, so one model runs on one device and on any mesh.
    """
    for dim in dims:
        for name in (dim,) if isinstance(dim, str) else dim or ():
            if name not in AXES:
                raise ValueError(
                    f"constrain: {name!r} is no mesh axis; the axes are {', '.join(AXES)}"
                )
    mesh = _context()
    automatic = [
        n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Auto
    ]
    entries = [_of(automatic, (d,) if isinstance(d, str) else d or ()) or None for d in dims]
    if not any(entries):
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*entries))


def global_sum(x: Any) -> Any:
    """Sum over every shard of one microbatch, for a loss that couples rows (router balance, contrastive losses)."""
    axes = manual_axes(*BATCH_AXES)
    return jax.tree.map(lambda a: _wide_sum(a, axes), x) if axes else x


def _wide_sum(x: Any, axes: tuple[str, ...]) -> jax.Array:
    """`lax.psum`, in float32 for narrower floats, and so in the backward pass: XLA on CPU aborts on a bfloat16 sum
    over a manual axis while another is automatic, and a sum of many rows wants the bits."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return lax.psum(x, axes)
    wide = lax.psum(varying(x, axes).astype(jnp.float32), axes)
    return varying(wide, axes).astype(x.dtype)


def varies(x: Any) -> frozenset[str]:
    """Physical manual axes along which the type of `x` (an array or its shape) says that it differs."""
    kind = (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)).manual_axis_type
    return frozenset() if kind is None else kind.varying


def varying(x: Any, axes: Sequence[str]) -> Any:
    """Mark every leaf as different on each device of `axes`, so that differentiation does not sum over them."""

    def cast(a: Any) -> Any:
        missing = tuple(n for n in axes if n not in varies(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, x)


def all_gather(x: Array, axes: Sequence[str], dim: int) -> Array:
    """Gather dimension `dim` over `axes` (slowest first), the fastest ring first."""
    for axis in reversed(axes):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def reduce_scatter(x: Array, axes: Sequence[str], dim: int) -> Array:
    """Sum over `axes` (slowest first) and keep this device's part of dimension `dim`.

    Dimensions after `dim` are taken as one: the TPU compiler lays a gradient (layers, embed, heads, dim) out with
    `embed` innermost, and then makes an all-reduce and a slice of its scatter.
    """
    after = x.shape[dim + 1 :]
    if len(after) > 1:
        x = x.reshape(*x.shape[: dim + 1], math.prod(after))
    for axis in axes:
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x.reshape(*x.shape[: dim + 1], *after)


def around_model(function: Any, specs: tuple[PartitionSpec, ...], out: PartitionSpec) -> Any:
    """Run `function` with the automatic axes in `specs` made manual.

    A collective over a manual axis of a leaf that the partitioner shards over `model` would first be gathered over
    `model`; inside this nested region the leaf is its own shard and nothing is gathered. A leaf that no spec splits is
    copied along `model`: the region is then over every automatic axis, since XLA on CPU aborts (JAX 0.10) on a
    bfloat16 sum over a manual axis while another is automatic.
    """
    mesh = _context()
    automatic = {
        n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Auto
    }
    names: set[str] = set()
    for spec in specs:
        for entry in spec:
            names |= set(entry if isinstance(entry, tuple) else (entry,)) - {None}
    names -= set(mesh.manual_axes)
    if not names and mesh.manual_axes:
        names = automatic
    if not names:
        return function
    return jax.shard_map(function, in_specs=specs, out_specs=out, axis_names=names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_parameter(
    shard: Float[Array, "..."],
    axes: tuple[str, ...],
    dim: int,
    compute_dtype: Any,
    reduce_dtype: Any,
) -> Float[Array, "..."]:
    """The whole parameter in `compute_dtype` from its shard; its gradient is reduce-scattered in `reduce_dtype`.

    ZeRO 3 (Rajbhandari et al. 2020, arXiv:1910.02054 section 5.3): all-gather in the forward pass, reduce-scatter in
    the backward pass. The gradient comes back in the shard's own dtype.
    """
    return all_gather(shard.astype(compute_dtype), axes, dim)


# Forward rules repeat the operation itself: a call of the function would hide the gather from remat policies.
def _gather_forward(shard, axes, dim, compute_dtype, reduce_dtype):
    return all_gather(shard.astype(compute_dtype), axes, dim), jnp.zeros((0,), shard.dtype)


def _gather_backward(axes, dim, compute_dtype, reduce_dtype, like, cotangent):
    return (reduce_scatter(cotangent.astype(reduce_dtype), axes, dim).astype(like.dtype),)


gather_parameter.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def scatter_gradient(
    whole: Float[Array, "..."],
    shard: Float[Array, "..."],
    axes: tuple[str, ...],
    dim: int,
    reduce_dtype: Any,
) -> Float[Array, "..."]:
    """`whole` unchanged; its gradient is reduce-scattered and goes to `shard`, whose values are not read.

    ZeRO 2 (arXiv:1910.02054 section 5.2): parameters are whole, gradients are kept only as shards, and each layer's
    gradient is scattered as soon as it is made. Nothing is differentiated through `whole` itself.
    """
    return whole


def _scatter_forward(whole, shard, axes, dim, reduce_dtype):
    return whole, (jnp.zeros((0,), whole.dtype), jnp.zeros((0,), shard.dtype))


def _scatter_backward(axes, dim, reduce_dtype, residual, cotangent):
    whole, shard = residual
    part = reduce_scatter(cotangent.astype(reduce_dtype), axes, dim).astype(shard.dtype)
    return jnp.zeros_like(cotangent, dtype=whole.dtype), part


scatter_gradient.defvjp(_scatter_forward, _scatter_backward)
