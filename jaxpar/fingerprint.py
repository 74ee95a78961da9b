"""A 64-bit checksum of an array that is the same on every mesh, computed where the array lies.

In: an array, split in any way, or its copy in numpy. Out: 16 hex digits. Each element adds to two sums modulo 2**32:

```
word   its 32 bits (64-bit elements are two words, low word first; narrower ones are widened)
place  mix(low index ^ KEY), then mix(place ^ high index) in arrays of more than 2**32 words
first  += mix(word ^ place)
second += mix(mix(word ^ place) ^ KEY)
```

`mix` is the finaliser of MurmurHash3 (A. Appleby), a bijection: a change of any one word changes the first sum, always;
any other change goes unseen with odds of 2**-64. Sums do not care which device adds what, so every device reads its own
shard where it is, and the host adds up two words a device; a copy counts once. The index is that of the whole array of
true shape, row-major, so a moved row or two elements that changed places are seen as well.

No program here waits for another device. Programs that do, and do not depend on each other, can lock up when many are under
way at once on simulated devices, which share a few threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

_KEY = np.uint32(0x9E3779B9)
_WORDS = 1 << 32
"""Words that a 32-bit index tells apart."""

_CHUNK = 1 << 18
"""Words that numpy takes at a time: its temporaries then stay in the cache."""


def of(arrays: Sequence[Array]) -> list[UInt32[Array, "devices 2"]]:
    """The two sums of each array on each device; returns before they are known. `text` shows one.

    A program for each array, not one for all: a parameter and its moments are alike and share theirs, and so do saving
    and restoring.

    Raises:
        TypeError: an element type that is not whole bytes, or a typed random key.
    """
    return [sums(x) for x in arrays]


def sums(x: Array) -> UInt32[Array, "devices 2"]:
    """The two sums of an array of true shape, one row a device (one in all over several processes)."""
    _check(x.dtype)
    if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
        return _of_shards(x, x.sharding.mesh, x.sharding.spec)
    return _of_whole(x)


@jax.jit
def _of_whole(x: Array) -> UInt32[Array, "1 2"]:
    words = _device_words(x)
    return _added(words, words.shape, [np.uint32(0)] * words.ndim)[None]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _of_shards(x: Array, mesh: Mesh, spec: PartitionSpec) -> UInt32[Array, "devices 2"]:
    entries = [e if isinstance(e, tuple) else () if e is None else (e,) for e in spec]
    entries += [()] * (x.ndim - len(entries))
    copies = [a for a in mesh.axis_names if not any(a in axes for axes in entries)]
    several = jax.process_count() > 1

    def shard(part: Array) -> Array:
        words = _device_words(part)
        ways = [math.prod(mesh.shape[a] for a in axes) for axes in entries]
        starts = [
            _place(axes, mesh) * np.uint32(n) for axes, n in zip(entries, part.shape, strict=True)
        ]
        whole = [n * w for n, w in zip(part.shape, ways, strict=True)]
        extra = words.shape[part.ndim :]
        added = _added(words, (*whole, *extra), [*starts, *[np.uint32(0)] * len(extra)])
        mine = _place(copies, mesh) == 0
        added = jnp.where(mine, added, np.uint32(0))
        # Each process sees its own devices alone; those of several processes are real, and take programs in order.
        return (jax.lax.psum(added, mesh.axis_names) if several else added)[None]

    rows = PartitionSpec() if several else PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=spec,
        out_specs=rows,
        axis_names=set(mesh.axis_names),
        check_vma=False,
    )(x)


def _place(axes: Sequence[str], mesh: Mesh) -> Any:
    """Index of this device among those along some axes, the first axis slowest."""
    index = jnp.uint32(0)
    for axis in axes:
        index = index * np.uint32(mesh.shape[axis]) + jax.lax.axis_index(axis).astype(np.uint32)
    return index


def _added(words: Array, shape: Sequence[int], starts: Sequence[Any]) -> UInt32[Array, "2"]:
    """The sums over a part of an array of `shape`, which starts at `starts`."""
    if not shape:
        words, shape, starts = words[None], (1,), (np.uint32(0),)

    def coordinate(d: int) -> Array:
        return jax.lax.broadcasted_iota(np.uint32, words.shape, d) + starts[d]

    low, high = _index(shape, coordinate)
    return jnp.stack([jnp.sum(m, dtype=np.uint32) for m in _mixed(words, low, high)])


def named(arrays: Mapping[str, Any]) -> dict[str, str]:
    """name -> fingerprint of each array, of JAX or of numpy; waits for the devices."""
    device = {name: x for name, x in arrays.items() if isinstance(x, jax.Array)}
    rows = dict(zip(device, jax.device_get(of(list(device.values()))), strict=True))
    return {n: text(rows[n]) if n in rows else on_host(x) for n, x in arrays.items()}


def text(sums: Any) -> str:
    """16 hex digits of the rows of one array, in numpy.

    >>> text(np.array([[1, 200], [0, 55]], np.uint32))
    '00000001000000ff'
    """
    rows = np.asarray(sums, np.uint64).reshape(-1, 2)
    return "".join(f"{int(s) % _WORDS:08x}" for s in rows.sum(axis=0))


def on_host(x: Any) -> str:
    """The fingerprint of an array in numpy, without a device.

    Raises:
        TypeError: an element type that is not whole bytes.

    >>> on_host(np.float32(0)) == on_host(np.int32(0))
    True
    """
    x = np.asarray(x)
    _check(x.dtype)
    flat = np.ascontiguousarray(x).reshape(-1)
    words = flat.view(f"u{min(x.dtype.itemsize, 4)}")
    sums = [0, 0]
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.uint32)
        index = np.arange(start, start + part.size, dtype=np.uint64)
        high = (index >> np.uint64(32)).astype(np.uint32) if words.size > _WORDS else None
        mixed = _mixed(part, index.astype(np.uint32), high)
        sums = [
            (s + int(m.sum(dtype=np.uint64))) % _WORDS for s, m in zip(sums, mixed, strict=True)
        ]
    return text(sums)


def _check(dtype: Any) -> None:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"a fingerprint of {dtype}: take jax.random.key_data of it")
    if dtype.hasobject or (jnp.issubdtype(dtype, jnp.number) and _bits(dtype) % 8):
        raise TypeError(f"a fingerprint of {dtype}: its elements are not whole bytes")


def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 8 * dtype.itemsize
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return kind(dtype).bits


def _device_words(x: Array) -> UInt32[Array, "..."]:
    _check(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == np.bool_:
        return x.astype(np.uint32)
    narrow = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize)
    if narrow is None:
        return jax.lax.bitcast_convert_type(x, np.uint32)
    return jax.lax.bitcast_convert_type(x, narrow).astype(np.uint32)


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _mixed(words: Any, low: Any, high: Any) -> tuple[Any, Any]:
    place = _mix(low ^ _KEY)
    if high is not None:
        place = _mix(place ^ high)
    first = _mix(words ^ place)
    return first, _mix(first ^ _KEY)


def _index(shape: Sequence[int], coordinate: Callable[[int], Any]) -> tuple[Any, Any]:
    """Low and high word of the row-major index; no high word where 32 bits hold every index.

    JAX has no 64-bit integers unless they are switched on for the whole program.

    Args:
        coordinate: dimension -> the coordinate along it of every element, uint32.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if math.prod(shape) <= _WORDS:
        parts = [coordinate(d) * np.uint32(s % _WORDS) for d, s in enumerate(strides)]
        return functools.reduce(lambda a, b: a + b, parts), None
    pairs = [_product(coordinate(d), s) for d, s in enumerate(strides)]
    return functools.reduce(_sum, pairs)


def _product(a: Any, b: int) -> tuple[Any, Any]:
    """Low and high word of a uint32 times a number below 2**64, modulo 2**64, from 16-bit halves."""
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    b0, b1 = np.uint32(b & 0xFFFF), np.uint32(b >> 16 & 0xFFFF)
    a0, a1 = a & mask, a >> half
    p00, p01, p10 = a0 * b0, a0 * b1, a1 * b0
    middle = (p00 >> half) + (p01 & mask) + (p10 & mask)
    low = (p00 & mask) | (middle << half)
    high = a1 * b1 + (p01 >> half) + (p10 >> half) + (middle >> half)
    return low, high + a * np.uint32(b >> 32 & 0xFFFFFFFF)


def _sum(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < a[0]).astype(np.uint32)
