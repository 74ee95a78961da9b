"""Names of the mesh axes, and the text that sizes them: ``4x2``, ``data=4,model=2``.

Pure Python: the command line reads it before JAX is imported.
"""

from __future__ import annotations

import difflib
import math
import re

AXES = ("replica", "stage", "data", "expert", "context", "model")
"""Every axis in placement order, slowest network first."""

BATCH_AXES = ("replica", "data")
"""Axes over which the rows of a batch are split."""

_SHORT = ("data", "model", "stage")
"""What the numbers of ``4x2x2`` mean, in their order."""


class MeshError(ValueError):
    """A mesh that cannot be: says what was asked, what is wrong and what would work."""


def parse_mesh(
    text: str, devices: int | None, *, keep_open: bool = False, topology: str | None = None
) -> dict[str, int]:
    """Sizes of every axis of `AXES`; axes that `text` leaves out have size 1.

    Args:
        text: ``4x2`` is data x model, ``4x2x2`` data x model x stage, ``8`` data; or ``data=4,model=2`` in any order. One
            size may be -1.
        devices: how many there are; None skips the check (and forbids -1).
        keep_open: without a number of devices, leave -1 in the sizes instead of refusing it.
        topology: chips that are not here and that `devices` counts, for the messages.

    Raises:
        MeshError: with the meshes that fit.

    >>> sizes = parse_mesh("4x2", 8)
    >>> sizes["data"], sizes["model"], sizes["stage"]
    (4, 2, 1)
    >>> parse_mesh("-1x2", None, keep_open=True)["data"]
    -1
    """
    if devices is not None and devices < 1:
        raise MeshError(f"mesh {text} on {devices} devices: a mesh needs at least one")
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    sizes.update(_named(text) if "=" in text else _short(text))
    wild = [name for name, size in sizes.items() if size == -1]
    if len(wild) > 1:
        raise MeshError(f"mesh {text} leaves {' and '.join(wild)} open; only one size may be -1")
    known = math.prod(size for size in sizes.values() if size != -1)
    if wild:
        if devices is None:
            if keep_open:
                return sizes
            raise MeshError(
                f"mesh {text} leaves {wild[0]} open, and the number of devices is not known; write it out"
            )
        if devices % known:
            raise MeshError(
                f"mesh {text}: {known} does not divide the {_counted(devices, topology)}; {_fitting(devices)}"
            )
        sizes[wild[0]] = devices // known
    elif devices is not None and known != devices:
        there = f"{devices} {'is' if devices == 1 else 'are'} visible"
        if topology is not None:
            there = f"topology {topology} has {devices}"
        raise MeshError(f"mesh {text} needs {known} devices and {there}; {_fitting(devices)}")
    return sizes


def format_mesh(sizes: dict[str, int]) -> str:
    """The text of a mesh, axes of size 1 left out."""
    return ",".join(f"{a}={sizes[a]}" for a in AXES if sizes.get(a, 1) != 1) or "data=1"


def _short(text: str) -> dict[str, int]:
    parts = text.strip().split("x")
    if len(parts) > len(_SHORT):
        raise MeshError(
            f"mesh {text} has {len(parts)} sizes; the short form has up to three, data x model x stage. "
            f"Name the axes: data=4,model=2,replica=2"
        )
    return {name: _size(part, name, text) for name, part in zip(_SHORT, parts, strict=False)}


def _named(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (p.strip() for p in part.partition("="))
        if not equals:
            raise MeshError(f"mesh {text}: {part.strip()!r} is not name=size")
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1, 0.4)
            hint = f"did you mean {near[0]}?" if near else f"the axes are {', '.join(AXES)}"
            raise MeshError(f"mesh {text}: unknown axis {name!r}; {hint}")
        if name in sizes:
            raise MeshError(f"mesh {text} sizes {name} twice; keep one")
        sizes[name] = _size(size, name, text)
    return sizes


def _size(text: str, name: str, mesh: str) -> int:
    # int() alone would also take 1_0, +4 and digits of other scripts.
    size = int(text) if re.fullmatch(r"-?[0-9]+", text) else 0
    if size < 1 and size != -1:
        raise MeshError(
            f"mesh {mesh!r}: {name} is {text!r}; sizes are whole numbers from 1, or -1 for what is left. "
            f"4x2 and data=4,model=2 are meshes"
        )
    return size


def _counted(devices: int, topology: str | None) -> str:
    noun, verb = ("device", "is") if devices == 1 else ("devices", "are")
    where = f"that {verb} visible" if topology is None else f"of topology {topology}"
    return f"{devices} {noun} {where}"


def _fitting(devices: int) -> str:
    """That the data x model meshes of `devices` fit: the squarest few, data side first."""
    small = [m for m in range(1, math.isqrt(devices) + 1) if devices % m == 0]
    pairs = {p for m in small for p in ((m, devices // m), (devices // m, m))}
    best = sorted(pairs, key=lambda p: (abs(math.log(p[0] / (2 * p[1]))), p[1]))
    names = [f"{d}x{m}" for d, m in best[:4]]
    return f"{names[0]} fits" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} fit"
