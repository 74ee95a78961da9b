"""Where each parameter is gathered and its gradient reduced: the moving part of ZeRO, as `Layout` is the resting part.

| stage | stored                    | gathered                          | gradient scattered                          |
|-------|---------------------------|-----------------------------------|---------------------------------------------|
| 0     | everything whole          | never                             | never: one all-reduce a step                |
| 1     | moments, masters as shards| after the update                  | once a step                                 |
| 2     | + gradients               | after the update                  | at its use (a layer), else once a microbatch|
| 3     | + parameters              | at its use, or once a step        | at its use, else once a microbatch          |

"At its use" is for stacked block parameters, embedding and head of a `Staged` model; an opaque loss and leaves too small to
be worth a collective a layer are gathered once a step. A gradient is summed over every axis on which its parameter is
a copy: over `replica` and `model` once a step, after the shards are made.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.collectives import (
    all_gather,
    around_model,
    gather_parameter,
    reduce_scatter,
    scatter_gradient,
)
from jaxpar.mesh import Mesh, Spec
from jaxpar.precision import Precision
from jaxpar.rules import Leaf

SMALL = 1 << 22
"""Bytes of a whole leaf (all its layers) up to which it is gathered once a step rather than at each use."""

When = Literal["never", "use", "microbatch", "step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One leaf's way through a step.

    Attributes:
        path: name, for errors.
        base: split without ZeRO, per dimension the logical axes.
        shard: split of its moments (equal to `base` under ZeRO 0 or where no dimension divides).
        stored: split of the parameter between steps: `shard` under ZeRO 3, else `base`.
        axes: logical axes that ZeRO adds, all on dimension `dim`.
        stacked: whether dimension 0 is the layers that a scan takes apart.
        gather: when the parameter is made whole.
        scatter: when its gradient becomes a shard.
        true: shape without padding.
        padded: dimensions that are stored larger than they are.
    """

    path: str
    base: Spec
    shard: Spec
    stored: Spec
    axes: tuple[str, ...]
    dim: int
    stacked: bool
    gather: When
    scatter: When
    true: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()


def place(
    leaf: Leaf,
    shard: Spec,
    *,
    zero: int,
    staged: bool,
    stacked: bool,
    nbytes: int,
    small: int = SMALL,
) -> Placement:
    """Placement of one leaf of `nbytes` bytes; `shard` is what ZeRO makes of its split."""
    base = leaf.spec
    added = [
        (dim, tuple(a for a in after if a not in before))
        for dim, (before, after) in enumerate(zip(base, shard, strict=True))
    ]
    added = [(dim, axes) for dim, axes in added if axes]
    dim, axes = added[0] if added else (0, ())
    at_use = staged and nbytes > small
    gather: When = "never"
    scatter: When = "never"
    if axes:
        scatter = "step" if zero == 1 else "use" if at_use else "microbatch"
        if zero == 3:
            gather = "use" if at_use else "step"
    return Placement(
        path=leaf.path,
        base=base,
        shard=shard,
        stored=shard if zero == 3 else base,
        axes=axes,
        dim=dim,
        stacked=stacked,
        gather=gather,
        scatter=scatter,
        true=leaf.shape,
        padded=tuple(i for i, n in enumerate(leaf.shape) if n != leaf.stored[i]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mover:
    """Carries out placements inside the manual region of a step.

    Attributes:
        manual: logical axes that are manual there; `model` may be automatic.
    """

    mesh: Mesh
    manual: tuple[str, ...]
    precision: Precision

    @property
    def compute(self) -> jnp.dtype:
        return jnp.dtype(self.precision.compute)

    @property
    def reduce(self) -> jnp.dtype:
        return jnp.dtype(self.precision.reduce)

    def specs(self, spec: Spec) -> PartitionSpec:
        """PartitionSpec over the manual axes alone, as `shard_map` wants it."""
        return self.mesh.spec(tuple(tuple(a for a in names if a in self.manual) for names in spec))

    def _automatic(self, spec: Spec, drop: int) -> PartitionSpec:
        kept = tuple(tuple(a for a in names if a not in self.manual) for names in spec[drop:])
        return self.mesh.spec(kept)

    def cast(self, x: jax.Array) -> jax.Array:
        """`x` in the compute dtype, if it is a float."""
        return x.astype(self.compute) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def gather(self, p: Placement, x: jax.Array, *, layer: bool) -> jax.Array:
        """The whole parameter in the compute dtype; differentiates to a reduce-scatter. `layer`: one slice of a stack."""
        axes, dim = self.mesh.physical(*p.axes), p.dim - layer
        spec = self._automatic(p.base, int(layer))

        def move(a: jax.Array) -> jax.Array:
            return gather_parameter(a, axes, dim, self.compute, self.reduce)

        return around_model(move, (spec,), spec)(x)

    def scatter_at_use(
        self, p: Placement, whole: jax.Array, shard: jax.Array, *, layer: bool
    ) -> jax.Array:
        """`whole` in the compute dtype; its gradient goes to `shard`."""
        axes, dim = self.mesh.physical(*p.axes), p.dim - layer
        spec = self._automatic(p.base, int(layer))

        def move(a: jax.Array, b: jax.Array) -> jax.Array:
            return scatter_gradient(a, b, axes, dim, self.reduce)

        whole = lax.stop_gradient(self.cast(whole))
        return around_model(move, (spec, spec), spec)(whole, shard)

    def gather_whole(self, p: Placement, x: jax.Array) -> jax.Array:
        """`x` from its shards, as it is stored: after the update, or before the first microbatch."""
        axes = self.mesh.physical(*p.axes)
        spec = self._automatic(p.base, 0)
        return around_model(lambda a: all_gather(a, axes, p.dim), (spec,), spec)(x)

    def scatter(self, p: Placement, g: jax.Array) -> jax.Array:
        """This device's shard of a gradient summed over the axes of ZeRO, sent in the reduce dtype."""
        axes, dtype = self.mesh.physical(*p.axes), g.dtype
        spec = self._automatic(p.base, 0)

        def move(a: jax.Array) -> jax.Array:
            return reduce_scatter(a.astype(self.reduce), axes, p.dim).astype(dtype)

        return around_model(move, (spec,), spec)(g)

    def finish(self, p: Placement, g: jax.Array) -> jax.Array:
        """The gradient after all reductions that are left: scattered if not yet, summed over every other copy."""
        if p.scatter == "step":
            g = self.scatter(p, g)
        split = {a for names in p.shard for a in names}
        if p.scatter == "never":
            split = {a for names in p.base for a in names}
        rest = self.mesh.physical(*(a for a in self.manual if a not in split))
        if not rest:
            return g
        spec = self._automatic(p.base, 0)

        def move(a: jax.Array) -> jax.Array:
            return lax.psum(a.astype(self.reduce), rest).astype(a.dtype)

        return around_model(move, (spec,), spec)(g)

    def without_padding(self, p: Placement, g: jax.Array) -> jax.Array:
        """A finished gradient with zeros in the padding, where a model leaves others: its activation of 0 may not be 0."""
        for dim in p.padded:
            # The compiler sees the whole of an automatic axis; along manual ones this is part `index`, slowest first.
            index: Any = 0
            for axis in self.mesh.physical(*(a for a in p.shard[dim] if a in self.manual)):
                index = index * self.mesh.jax_mesh.shape[axis] + lax.axis_index(axis)
            places = index * g.shape[dim] + jnp.arange(g.shape[dim])
            inside = lax.broadcast_in_dim(places < p.true[dim], g.shape, (dim,))
            g = jnp.where(inside, g, 0)
        return g

    def share(self, p: Placement) -> float:
        """1 / number of devices along manual axes that hold the same part of the finished gradient."""
        split = {a for names in p.shard for a in names}
        return 1.0 / math.prod(self.mesh.size(a) for a in self.manual if a not in split)
