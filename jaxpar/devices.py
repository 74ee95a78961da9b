"""How many devices a run sees: simulated ones on a CPU, the real ones elsewhere.

XLA reads its flags once, when JAX is first used: `simulate` comes before, and imports none of it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re

from jaxpar.axes import MeshError, parse_mesh
from jaxpar.config.hints import nearest

_FLAG = "--xla_force_host_platform_device_count"


class DeviceError(ValueError):
    """No devices to run on: says what was asked for and what would work."""


def simulate(mesh: str, devices: int | None) -> None:
    """Make the CPU backend show as many devices as `mesh` needs, or `devices`.

    The flag means nothing to a GPU or a TPU. A mesh with a -1 and no number of devices takes those
    that are visible.

    Raises:
        MeshError: a bad mesh, or one that does not fit `devices` or the one CPU that JAX is told to take.
    """
    sizes = parse_mesh(mesh, devices, keep_open=True)
    flags = os.environ.get("XLA_FLAGS", "").split()
    if -1 in sizes.values():
        simulated = any(f.startswith(_FLAG) for f in flags) or "JAX_NUM_CPU_DEVICES" in os.environ
        if os.environ.get("JAX_PLATFORMS") == "cpu" and not simulated:
            _fit_one_cpu(mesh)
        return
    count = math.prod(sizes.values())
    flags = [f for f in flags if not f.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_FLAG}={count}"])


def _fit_one_cpu(mesh: str) -> None:
    try:
        parse_mesh(mesh, 1)
    except MeshError as error:
        raise MeshError(f"{error}; or simulate some on this CPU with --devices N") from None


def announce(devices: int | None) -> str:
    """One line on what the run sees. Starts JAX's backend.

    Raises:
        DeviceError: JAX starts no backend, as where JAX_PLATFORMS names one that is not here.
        MeshError: `devices` was asked for where devices are real.
    """
    import jax

    try:
        seen = jax.devices()
    except (RuntimeError, AssertionError) as error:  # a missing CUDA plugin is an assertion of JAX
        raise DeviceError(_no_backend(error)) from error
    if seen[0].platform != "cpu":
        if devices not in (None, len(seen)):
            raise MeshError(
                f"devices {devices}: only a CPU simulates devices, and {len(seen)} x "
                f"{seen[0].device_kind} are visible; leave --devices out"
            )
        return f"{len(seen)} x {seen[0].device_kind}"
    if len(seen) == 1:
        return "one CPU device"
    return f"no accelerator here: simulating {len(seen)} devices on this CPU"


def _no_backend(error: Exception) -> str:
    asked = os.environ.get("JAX_PLATFORMS", "")
    reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".") or "nothing starts it here"
    if not asked:
        return f"no device: {reason}; JAX_PLATFORMS=cpu simulates some"
    known = re.findall(r"'(\w+)'", reason.partition("known backends")[2])
    hint = nearest(asked.lower(), known)
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if asked.lower() in ("cuda", "gpu") and not any(map(importlib.util.find_spec, plugins)):
        hint = "; pip install 'jaxpar[cuda]' adds it"
    return (
        f"JAX_PLATFORMS={asked}: {reason}{hint}; JAX_PLATFORMS=cpu simulates devices, and without the "
        f"variable JAX takes what is here"
    )
