"""Chips that are not here: abstract devices of a TPU slice or a GPU cluster, to compile for.

``v5p:4x4x4`` needs the `tpu` extra (libtpu compiles on a CPU host), ``2*v5p:4x4x4`` is two such slices joined by the
data-center network, ``h100:1x8x8`` (slices x hosts x GPUs a host) needs the `cuda` extra. The devices cannot run
anything; `jit(...).lower(...).compile()` on a mesh of them runs the real compiler.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
from typing import Any

from jaxpar.axes import MeshError

# Generations whose slice wraps around along a dimension of these sizes (Cloud TPU documentation, pages v4, v5e, v5p,
# v6e, tpu7x): full cubes of 4 on the 3D tori, only a side of 16 on the 2D ones.
_WRAP = {
    "v4": lambda n: n % 4 == 0,
    "v5p": lambda n: n % 4 == 0,
    "tpu7x": lambda n: n % 4 == 0,
    "v5e": lambda n: n == 16,
    "v6e": lambda n: n == 16,
}

_FLAT = ("v5e", "v6e")
"""Generations with two dimensions."""

_SPLIT = ("v4", "tpu7x")
"""Generations with two cores a chip, each of which may be a device."""

# What XLA's GPU compiler asks of a device that is not there (message GpuTargetConfigProto).
_H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 28 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
_GPU = {"h100": _H100}


def parse_topology(text: str) -> tuple[str, tuple[int, ...], int]:
    """``v5p:4x4x4`` -> ("v5p", (4, 4, 4), 1), ``2*v5p:4x4x4`` two slices; raises `MeshError` with what would work."""
    count, star, rest = text.partition("*")
    name, _, dims = (rest if star else text).partition(":")
    known = [*_WRAP, *_GPU]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise MeshError(f"topology {text!r}: {name!r} is not one of {', '.join(known)}{hint}")
    example = "h100:1x8x8" if name in _GPU else f"{name}:4x4" if name in _FLAT else f"{name}:4x4x4"
    sizes = dims.split("x")
    if not all(re.fullmatch(r"[1-9][0-9]*", size) for size in sizes):
        which = "" if not dims else " that are whole numbers from 1"
        raise MeshError(f"topology {text!r} has no sizes{which}; write it as {example}")
    if star and not re.fullmatch(r"[1-9][0-9]*", count):
        raise MeshError(
            f"topology {text!r}: {count!r} is no number of slices; write it as 2*{example}"
        )
    if star and name in _GPU:
        raise MeshError(
            f"topology {text!r}: the first size of {name} counts slices; write it as {name}:{count}x8x8"
        )
    return name, tuple(map(int, sizes)), int(count) if star else 1


def device_count(text: str) -> int | None:
    """Devices of a topology; None where a chip may be one device or two, which the compiler decides.

    Raises:
        MeshError: no topology.

    >>> device_count("2*v5p:4x4x4"), device_count("tpu7x:4x4x4")
    (128, None)
    """
    name, shape, slices = parse_topology(text)
    return None if name in _SPLIT else slices * math.prod(shape)


def abstract_devices(text: str) -> list[Any]:
    """Abstract devices of a topology.

    Loading libtpu reads environment variables that only matter without a TPU; they are set here if unset.

    Raises:
        MeshError: unknown chip, a shape that the chip does not come in, or the compiler plugin is not installed.
    """
    name, shape, slices = parse_topology(text)
    from jax.experimental import topologies

    try:
        if name in _GPU:
            described = topologies.get_topology_desc(
                platform="cuda", topology="x".join(map(str, shape)), target_config=_GPU[name]
            )
        else:
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
            os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
            dims = (*shape, 1, 1)[:3]
            described = topologies.get_topology_desc(
                platform="tpu",
                topology_name=f"{name}:{'x'.join(map(str, shape))}",
                num_slices=slices,
                wrap=tuple(bool(_WRAP[name](n)) for n in dims),
            )
    except (
        Exception
    ) as error:  # the plugins raise many types: say which install and shape were asked for
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MeshError(
            f"topology {text!r} cannot be described: {reason}; {_remedy(name)}"
        ) from error
    return list(described.devices)


def _remedy(name: str) -> str:
    """What to do where the compiler plugin gives no description."""
    extra, modules = (
        ("cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin"))
        if name in _GPU
        else ("tpu", ("libtpu",))
    )
    if not any(importlib.util.find_spec(module) for module in modules):
        return f"its compiler is not installed: pip install 'jaxpar[{extra}]'"
    return f"{name} may not come in that shape, or another process may be using the compiler (libtpu allows one)"
