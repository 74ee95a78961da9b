"""A mesh spec such as ``4x2`` or ``data=4,model=2`` becomes devices with named axes.

In: the spec and the devices (visible, simulated on CPU, or an abstract topology of chips that are not
here). Out: a `Mesh`, which the caller passes on explicitly; no global mesh is ever set.

A logical axis (`data`) may be a tuple of physical sub-axes (``data_0, data_1, data_2``: the x, y and z of
a TPU torus). The TPU compiler makes real reduce-scatters of three nested rings and an all-reduce of one
flat ring of 64, so code says `data` and the `Mesh` knows the tuple.

```
placement, slowest network first:   replica > stage > data > expert > context > model
4x2 on 8 devices                    data 0: [d0 d1]   <- the model axis: nearest neighbours
                                    data 1: [d2 d3]
                                    ...
```
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.axes import AXES, BATCH_AXES, MeshError, parse_mesh

Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices with named axes.

    Attributes:
        jax_mesh: the `jax.sharding.Mesh` over physical axes, every one of type Auto.
        axes: logical name -> physical axis names, slowest first; `()` where the size is 1.
        sizes: logical name -> number of devices along it; every name of `AXES` is present.
    """

    jax_mesh: jax.sharding.Mesh
    axes: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Logical axes over which the rows of a batch are split."""
        return BATCH_AXES

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.sizes.values())

    def size(self, *names: str) -> int:
        """Number of devices along the named logical axes together."""
        return math.prod(self.sizes[name] for name in _known(names))

    def physical(self, *names: str) -> tuple[str, ...]:
        """Physical axis names of the logical axes `names`, in their order."""
        return tuple(itertools.chain.from_iterable(self.axes[name] for name in _known(names)))

    def spec(self, dims: Spec) -> PartitionSpec:
        """PartitionSpec of an array whose dimension i is split over the logical axes `dims[i]`."""
        entries = [self.physical(*names) for names in dims]
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))

    def sharding(self, dims: Spec = ()) -> NamedSharding:
        """NamedSharding of an array whose dimension i is split over the logical axes `dims[i]`."""
        return NamedSharding(self.jax_mesh, self.spec(dims))

    def batch_spec(self, leading: int = 0) -> PartitionSpec:
        """PartitionSpec of a batch array: rows, after `leading` whole dimensions, over the batch axes."""
        rows = self.physical(*self.batch_axes)
        return PartitionSpec(*([None] * leading), rows or None)

    def __str__(self) -> str:
        shape = " x ".join(f"{n}={s}" for n, s in self.sizes.items() if s > 1) or "one device"
        kind = self.jax_mesh.devices.flat[0]
        lines = [f"mesh {shape} on {self.devices} x {kind.device_kind} ({kind.platform})"]
        split = {n: p for n, p in self.axes.items() if len(p) > 1}
        for name, parts in split.items():
            sizes = "x".join(str(self.jax_mesh.shape[p]) for p in parts)
            lines.append(f"  {name} = {sizes} torus sub-axes, reduced one ring at a time")
        processes = {d.process_index for d in self.jax_mesh.devices.flat}
        if len(processes) > 1:
            rows = self.jax_mesh.devices.reshape(-1, max(1, self.sizes["model"]))
            shown = [sorted({d.process_index for d in row}) for row in rows]
            lines += [f"  row {i}: processes {where}" for i, where in enumerate(shown[:8])]
            if len(shown) > 8:
                lines.append(f"  ... {len(shown) - 8} more rows")
        return "\n".join(lines)


def _known(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1, 0.4)
            hint = f"did you mean {near[0]}?" if near else f"the axes are {', '.join(AXES)}"
            raise MeshError(f"unknown mesh axis {name!r}; {hint}")
    return names


def make_mesh(
    spec: str | Mapping[str, int] = "-1",
    *,
    devices: Sequence[Any] | None = None,
    topology: str | None = None,
) -> Mesh:
    """Build a mesh.

    Args:
        spec: ``4x2`` (data x model), ``4x2x2`` (data x model x stage), ``data=4,model=2,replica=2``; one size
            may be -1. Or a mapping of axis names to sizes.
        devices: devices to use; all visible ones by default.
        topology: chips that are not here, such as ``v5p:4x4x4`` or ``h100:1x8x8`` (`jaxpar.topology`).

    Raises:
        MeshError: the product is not the number of devices (names the meshes that fit), or a bad spec.
    """
    if not isinstance(spec, str | Mapping):
        raise MeshError(
            f"mesh {spec!r}; write '4x2', 'data=4,model=2' or {{'data': 4, 'model': 2}}"
        )
    if topology is not None:
        if devices is not None:
            raise MeshError("give devices or a topology, not both")
        from jaxpar.topology import abstract_devices

        devices = abstract_devices(topology)
    if devices is not None and not isinstance(devices, Iterable):
        raise MeshError(f"devices is {devices!r}; a list such as jax.devices()[:4]")
    devices = list(jax.devices() if devices is None else devices)
    other = [d for d in devices if not hasattr(d, "platform")]
    if other:
        raise MeshError(f"device {other[0]!r} is no device; a list such as jax.devices()[:4]")
    if len(set(devices)) != len(devices):
        twice = next(d for d in devices if devices.count(d) > 1)
        raise MeshError(f"device {twice} is given twice; a mesh holds each device once")
    text = spec if isinstance(spec, str) else ",".join(f"{k}={v}" for k, v in spec.items())
    sizes = parse_mesh(text or "data=1", len(devices))
    present = [name for name in AXES if sizes[name] > 1]
    grid = _torus(devices)
    slices = len({getattr(d, "slice_index", 0) or 0 for d in devices})
    cut = slices > 1 and grid.ndim > 1  # the first dimension leaves the slice
    parts = _assign(grid.shape, {name: sizes[name] for name in present}, cut)
    names, shape, order, factors = [], [], [], [[] for _ in grid.shape]
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(AXES, ())
    for name in present:
        own = []
        for i, (dim, size) in enumerate(parts[name]):
            own.append(name if len(parts[name]) == 1 else f"{name}_{i}")
            order.append((dim, len(factors[dim])))
            factors[dim].append(size)
            shape.append(size)
        names += own
        axes[name] = tuple(own)
    # Split every torus dimension into its factors, then bring the factors into placement order.
    flat = [(d, k) for d in range(grid.ndim) for k in range(len(factors[d]))]
    array = grid.reshape([factors[d][k] for d, k in flat] or [1])
    array = array.transpose([flat.index(o) for o in order]) if order else array
    if not names:
        names = ["data"]
        axes["data"] = ()
    jax_mesh = jax.sharding.Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))
    return Mesh(jax_mesh=jax_mesh, axes=axes, sizes=sizes)


def _torus(devices: list[Any]) -> np.ndarray:
    """Devices as an array along the dimensions of their network, slowest first.

    TPU: (slices,) x, y, z, cores of a chip, each kept where it is more than 1. Others: one dimension, sorted by
    process and id, so that neighbours in the last mesh axis share a process.
    """
    if devices[0].platform != "tpu" or not hasattr(devices[0], "coords"):
        ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
        return _as_array(ordered, (len(ordered),))
    keys = [
        (getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0) or 0)
        for d in devices
    ]
    shape = [len({k[i] for k in keys}) for i in range(len(keys[0]))]
    ordered = [d for _, d in sorted(zip(keys, devices, strict=True), key=lambda kd: kd[0])]
    if math.prod(shape) != len(devices):  # not a box: no torus to follow
        return _as_array(ordered, (len(ordered),))
    return _as_array(ordered, tuple(s for s in shape if s > 1) or (1,))


def _as_array(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array.reshape(shape)


def _assign(
    torus: tuple[int, ...], sizes: Mapping[str, int], cut: bool
) -> dict[str, list[tuple[int, int]]]:
    """Which factors of which network dimensions make up each logical axis.

    Slow axes take slow dimensions; an axis takes whole dimensions where their product is its size, else it splits
    one. With `cut` the first dimension joins slices: an axis takes of it only what does not fit inside a slice.
    Returns name -> [(dimension, factor), ...], slowest first.
    """
    left = list(torus)
    out: dict[str, list[tuple[int, int]]] = {}
    for name in reversed(list(sizes)):  # fastest axis first: it takes the innermost dimension
        inside = math.prod(left[1:]) % sizes[name] == 0
        out[name] = _take(left, sizes[name], int(cut and inside))
        for dim, factor in out[name]:
            left[dim] //= factor
    # Factors of one dimension were taken innermost first; `make_mesh` lists them outermost first because it walks
    # the axes in placement order.
    return {name: out[name] for name in sizes}


def _take(left: list[int], size: int, first: int) -> list[tuple[int, int]]:
    dims = [d for d in range(first, len(left)) if left[d] > 1]
    for count in range(1, len(dims) + 1):
        for combo in sorted(itertools.combinations(dims, count), reverse=True):
            if math.prod(left[d] for d in combo) == size:
                return [(d, left[d]) for d in combo]
    taken: list[tuple[int, int]] = []
    for d in reversed(dims):
        factor = math.gcd(left[d], size)
        if factor > 1:
            taken.insert(0, (d, factor))
            size //= factor
    if size != 1:
        raise MeshError(f"no way to lay an axis of {size} over a network of {left}")
    return taken
