"""Read a compiled program: every collective with its kind, axes, bytes and how often it runs.

In: the text of a compiled program (``compiled.as_text()``), from any backend. Out: `Collective` rows. A sharding claim is
proved here, not by what was asked for.

    wire bytes a device sends, ring algorithms, payload V over K devices:
        all-gather, reduce-scatter, all-to-all  V (K-1)/K        all-reduce  2 V (K-1)/K        permute  V
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
)
_SHAPE = re.compile(r"\b(pred|bf16|f\d+e\w+|[sufc]\d+)\[([\d,]*)\]")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations|called_computations)=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
        kind: one of `KINDS`.
        payload: bytes of the whole array: the result of a gather, the operand of a scatter.
        group: number of devices that take part together.
        times: executions, loop trip counts applied.
        loops: names of the loops around it, outermost first.
        dtypes: element types sent.
        axes: mesh axes it runs over; () where no mesh was given and the program names none itself.
        asynchronous: whether it is started and awaited apart.
        source: the JAX operation that caused it.
    """

    kind: str
    payload: int
    group: int
    times: int
    loops: tuple[str, ...]
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    asynchronous: bool
    source: str

    @property
    def wire(self) -> float:
        """Bytes each device sends in all executions."""
        factor = {"all-reduce": 2.0, "collective-permute": 1.0}.get(self.kind, 1.0)
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return factor * self.payload * share * self.times


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    name: str
    shape: str
    op: str
    rest: str


def collectives(text: str, mesh: Any = None) -> list[Collective]:
    """Every collective of the program in `text`; `mesh` (a `jax.sharding.Mesh`) names the axes of each."""
    computations, entry = _parse(text)
    return list(_walk(computations, entry, 1, (), "", (mesh, _devices(text))))


def matmul_flops(text: str) -> int:
    """FLOPs of all matrix products (2 m n k each), loop trip counts applied, on one device.

    Counts `dot` instructions, as the CPU and GPU compilers leave them; the TPU compiler turns them into convolutions.
    """
    computations, entry = _parse(text)

    def total(name: str) -> int:
        lines = {x.name: x for x in computations.get(name, ())}
        flops = 0
        for line in lines.values():
            if line.op == "dot":
                flops += _dot_flops(line, lines)
            elif line.op == "while":
                body = re.search(r"body=%?([\w.\-]+)", line.rest)
                flops += _trips(computations, name, line) * total(body[1] if body else "")
            else:
                flops += sum(total(called) for called in _called(line))
        return flops

    return total(entry)


def _dot_flops(line: _Line, lines: dict[str, _Line]) -> int:
    out = math.prod(_dims(line.shape))
    left = re.match(r"\s*(?:[a-z0-9]+\[[\d,]*\](?:\{[^}]*\})?\s+)?%?([\w.\-]+)", line.rest)
    inline = re.match(r"\s*([a-z0-9]+\[[\d,]*\])", line.rest)
    shape = _dims(inline[1] if inline else lines[left[1] if left else ""].shape)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
    return (
        2
        * out
        * math.prod(shape[int(d)] for d in (contracted[1] if contracted else "").split(",") if d)
    )


def _dims(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(d) for d in (found[2] if found else "").split(",") if d]


def _devices(text: str) -> int:
    """Devices that the program runs on: replicas times partitions, as its first line says."""
    head = text.lstrip().split("\n", 1)[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
    return math.prod(int(n) for n in counts)


def _parse(text: str) -> tuple[dict[str, list[_Line]], str]:
    computations: dict[str, list[_Line]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
            continue
        found = _LINE.match(line)
        if found and current:
            name, shape, op, rest = found.groups()
            computations[current].append(_Line(name=name, shape=shape, op=op, rest=rest))
    return computations, entry


def _walk(
    computations: dict[str, list[_Line]],
    name: str,
    times: int,
    loops: tuple[str, ...],
    inside: str,
    where: tuple[Any, int],
) -> Iterator[Collective]:
    for line in computations.get(name, ()):
        op = line.op.removesuffix("-start")
        if op in KINDS:
            yield _collective(line, op, times, loops, inside, where)
        elif line.op == "while":
            body = re.search(r"body=%?([\w.\-]+)", line.rest)
            trips = _trips(computations, name, line)
            yield from _walk(
                computations,
                body[1] if body else "",
                times * trips,
                (*loops, line.name),
                inside,
                where,
            )
        elif not _awaits(line):
            for called in _called(line):
                within = f"{inside} {line.op} {line.name} {called}"
                yield from _walk(computations, called, times, loops, within, where)


def _awaits(line: _Line) -> bool:
    """Whether a line only goes on with what a start began, and repeats the start's computation.

    The TPU compiler writes start and done as fusions that are named for it.
    """
    names = " ".join([line.name, *_called(line)])
    fused = re.search(r"async[-_]collective[-_]done", names)
    return line.op.endswith(("-done", "-update")) or bool(fused)


def _called(line: _Line) -> list[str]:
    if line.op in ("reduce", "scatter", "sort", "map", "reduce-window", "select-and-scatter"):
        return []
    out = _CALLED.findall(line.rest)
    for many, one in _BRANCHES.findall(line.rest):
        out += re.findall(r"%?([\w.\-]+)", many) if many else [one]
    return out


def _collective(
    line: _Line,
    op: str,
    times: int,
    loops: tuple[str, ...],
    inside: str,
    where: tuple[Any, int],
) -> Collective:
    shape = line.shape
    if line.op.endswith("-start"):
        # (operand, result, scratch...), each a tuple where it has several parts; but an all-reduce
        # gives its results alone.
        parts = _elements(shape)
        paired = op in ("all-gather", "collective-permute") or parts[0].startswith("(")
        shape = parts[1] if len(parts) > 1 and paired else shape
    shapes = _SHAPE.findall(shape)
    size = sum(_nbytes(d, dims) for d, dims in shapes)
    groups, names = _groups(line.rest, *where)
    group = len(groups[0]) if groups else 1
    kind = op
    # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and the slice that it keeps.
    if op == "all-reduce" and re.search(r"all-reduce-scatter|reduce[-_]scatter", inside):
        kind = "reduce-scatter"
    elif op == "reduce-scatter":
        size *= group
    source = re.search(r'op_name="([^"]*)"', line.rest)
    return Collective(
        kind=kind,
        payload=size,
        group=group,
        times=times,
        loops=loops,
        dtypes=tuple(sorted({d for d, _ in shapes})),
        axes=names,
        asynchronous=line.op.endswith("-start") or "async" in inside,
        source=source[1] if source else "",
    )


def _elements(shape: str) -> list[str]:
    """Elements of a tuple shape; the shape itself where it is no tuple."""
    if not shape.startswith("("):
        return [shape]
    parts, depth = [""], 0
    # The printer numbers every fifth element: /*index=5*/.
    for c in re.sub(r"/\*.*?\*/", "", shape)[1:-1]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def _nbytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.ceil(bits * math.prod(int(d) for d in dims.split(",") if d) / 8)


def _groups(rest: str, mesh: Any, devices: int) -> tuple[list[list[int]], tuple[str, ...]]:
    """Device groups of a collective, and the mesh axes that they follow."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{}]*\{([^}]*)\}", rest)
    if named:
        sizes = {k: int(v) for k, v in re.findall(r"'([^']+)'=(\d+)", named[1])}
        # A part of an axis is written 'data':(2)4, four along it after a factor of two.
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        count = math.prod(int(part or sizes[axis]) for axis, part in parts)
        return [list(range(count))], tuple(dict.fromkeys(axis for axis, _ in parts))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest)
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest)
    groups: list[list[int]] = []
    if iota:
        ids = np.arange(math.prod(map(int, iota[3].split(",")))).reshape(
            [int(d) for d in iota[3].split(",")]
        )
        if iota[4]:
            ids = ids.transpose([int(d) for d in iota[4].split(",")])
        groups = ids.reshape(int(iota[1]), int(iota[2])).tolist()
    elif listed or pairs:
        body = (listed or pairs)[1]  # pyright: ignore[reportOptionalSubscript]
        groups = [
            [int(d) for d in g.split(",") if d.strip()] for g in re.findall(r"\{([\d, ]*)\}", body)
        ]
    elif "replica_groups={}" in rest:  # every device
        groups = [list(range(devices if mesh is None else mesh.devices.size))]
    return groups, _axes(groups, mesh, bool(pairs)) if groups and mesh is not None else ()


def _axes(groups: list[list[int]], mesh: Any, pairs: bool) -> tuple[str, ...]:
    """Smallest set of mesh axes along which the members of every group differ and nothing else does."""
    shape = mesh.devices.shape
    for count in range(1, len(shape) + 1):
        for chosen in itertools.combinations(range(len(shape)), count):
            if all(_along(g, shape, chosen) for g in groups):
                full = math.prod(shape[c] for c in chosen)
                if pairs or all(len(g) == full for g in groups):
                    return tuple(mesh.axis_names[c] for c in chosen)
    return ()


def _along(group: list[int], shape: tuple[int, ...], chosen: tuple[int, ...]) -> bool:
    places = np.array(np.unravel_index(group, shape)).T
    return all(len(set(places[:, d])) == 1 for d in range(len(shape)) if d not in chosen)


def _trips(computations: dict[str, list[_Line]], name: str, loop: _Line) -> int:
    """Trip count of a loop: as the compiler wrote it, else from ``compare(counter, constant)`` in its condition.

    Raises:
        ValueError: neither is there, so that executions cannot be counted.
    """
    known = re.search(r'known_trip_count\\?"?:\s*\{\\?"?n\\?"?:\\?"?(\d+)', loop.rest)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    lines = {x.name: x for x in computations.get(condition[1] if condition else "", ())}
    texts = list(lines.values())
    # A comparison may hide in a fusion; its constant is then an operand of the fusion or lies inside it.
    for x in list(texts):
        if x.op == "fusion":
            for called in _called(x):
                texts += computations.get(called, ())
    bounds = [
        int(x.rest.split(")")[0])
        for x in texts
        if x.op == "constant" and re.match(r"s32\[\]|s64\[\]", x.shape)
    ]
    if len(bounds) == 1:
        return max(1, bounds[0])
    raise ValueError(
        f"no trip count for the loop {loop.name} of {name}: {len(bounds)} constants in its condition"
    )
