"""A Layout: one row a leaf, for parameters, gradients, master copies and optimizer state.

Built from shapes, rules and axis sizes alone, so that it says what fits before any device is
touched. It prints, sums bytes per device, differs from another, goes to JSON and back.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from typing import Any

import jax
import optax
from rich.table import Table

from jaxpar import zero as stages
from jaxpar.axes import AXES
from jaxpar.optimizer_state import place_state
from jaxpar.rules import Kind, LayoutError, Leaf, Rules, sizes_of

KINDS: tuple[Kind, ...] = ("parameter", "gradient", "master", "moment", "other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where every leaf is stored.

    Attributes:
        sizes: mesh axis -> size, for every name of `AXES`.
        zero: ZeRO stage.
        params, grads, masters, opt_state: pytrees of `Leaf`; `masters` and `opt_state` may be None.
            Gradients are the buffer that microbatches are added in.
    """

    sizes: dict[str, int]
    zero: int
    params: Any
    grads: Any
    masters: Any = None
    opt_state: Any = None

    @classmethod
    def build(
        cls,
        shapes: Any,
        rules: Rules,
        mesh: Any,
        *,
        zero: int = 0,
        optimizer: optax.GradientTransformation | None = None,
        param_dtype: str = "float32",
        grad_dtype: str = "float32",
        master_dtype: str | None = None,
        combine: bool = True,
    ) -> Layout:
        """Lay out a model.

        Args:
            shapes: pytree of arrays or ShapeDtypeStructs of the parameters, true shapes.
            mesh: a `Mesh`, or a mapping of axis names to sizes: no device is needed.
            combine: whether ZeRO may split a dimension that the rules split too
                (`jaxpar.zero.shard`).

        Raises:
            LayoutError: rules, shapes and mesh do not fit together.
        """
        if zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero {zero!r}; the stages are 0, 1, 2 and 3")
        sizes = sizes_of(mesh)
        base = rules.leaves(shapes, sizes)

        def stored(leaf: Leaf) -> Leaf:
            return (
                stages.shard(leaf, sizes, combine=combine)
                if zero >= stages.split_from(leaf.kind)
                else leaf
            )

        def kept(kind: Kind, dtype: str) -> Any:
            def one(leaf: Leaf) -> Leaf:
                wanted = dtype if leaf.floating else leaf.dtype
                return stored(dataclasses.replace(leaf, kind=kind, dtype=wanted))

            return jax.tree.map(one, base, is_leaf=_is_row)

        state = None
        if optimizer is not None:
            state = place_state(optimizer, base, master_dtype or param_dtype, stored)
        return cls(
            sizes=sizes,
            zero=zero,
            params=kept("parameter", param_dtype),
            grads=kept("gradient", grad_dtype),
            masters=None if master_dtype is None else kept("master", master_dtype),
            opt_state=state,
        )

    @functools.cached_property
    def rows(self) -> tuple[Leaf, ...]:
        """Every leaf: parameters first, then gradients, masters and optimizer state."""
        trees = (self.params, self.grads, self.masters, self.opt_state)
        return tuple(leaf for tree in trees for leaf in jax.tree.leaves(tree, is_leaf=_is_row))

    def bytes_per_device(self, kind: Kind | None = None) -> int:
        """Bytes that one device holds, of one kind or of all."""
        return sum(r.bytes_per_device(self.sizes) for r in self.rows if kind in (None, r.kind))

    def parameters(self) -> int:
        """Number of parameters of the model, without padding."""
        return sum(_count(r.shape) for r in self.rows if r.kind == "parameter")

    def decay_mask(self) -> Any:
        """Pytree of bool like the parameters, by role: matrices and embeddings decay, norms and
        biases do not. (By number of dimensions, norms stacked over layers would decay too.)
        """
        return jax.tree.map(
            lambda leaf: leaf.role in ("matrix", "embedding"), self.params, is_leaf=_is_row
        )

    def unsharded(self, least: int = 1 << 20) -> tuple[Leaf, ...]:
        """Parameters of which every device holds at least `least` bytes though an axis could split
        them: `model` and `stage` always, ZeRO's axes at stage 3. `replica` copies on purpose.

        A misspelt entry of ``axes`` or a forgotten rule shows here. The largest come first.
        """
        able = {"model", "stage"} | (set(stages.SHARDED_OVER) if self.zero == 3 else set())
        big = [
            r
            for r in self.rows
            if r.kind == "parameter"
            and able & set(r.copies(self.sizes))
            and r.bytes_per_device(self.sizes) >= least
        ]
        return tuple(sorted(big, key=lambda r: -r.bytes_per_device(self.sizes)))

    # ---- showing ------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Mesh, stage and number of parameters in one line."""
        mesh = " x ".join(f"{a}={self.sizes[a]}" for a in AXES if self.sizes[a] > 1) or "one device"
        return f"{self.parameters():,} parameters on {mesh}, ZeRO {self.zero}"

    def _shown(self, kinds: Iterable[Kind], by_bytes: bool) -> list[Leaf]:
        rows = [r for r in self.rows if r.kind in kinds]
        return sorted(rows, key=lambda r: -r.bytes_per_device(self.sizes)) if by_bytes else rows

    def table(self, kinds: Iterable[Kind] = ("parameter",), *, by_bytes: bool = False) -> Table:
        """The rows of `kinds`, and under them the bytes per device of every kind."""
        table = Table(
            title=self.title, title_justify="left", caption=self.summary(), caption_justify="left"
        )
        for name, justify in (
            ("path", "left"),
            ("shape", "left"),
            ("split", "left"),
            ("bytes/device", "right"),
            ("why", "left"),
        ):
            table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
        for r in self._shown(tuple(kinds), by_bytes):
            table.add_row(*_cells(r, self.sizes))
        return table

    def summary(self) -> str:
        """Bytes per device by kind, in one line."""
        parts = [(k, self.bytes_per_device(k)) for k in KINDS]
        each = ", ".join(f"{k}s {_human(n)}" for k, n in parts if n)
        return f"per device: {each}; total {_human(self.bytes_per_device())}"

    def __str__(self) -> str:
        rows = [("path", "shape", "split", "bytes/device", "why")]
        rows += [_cells(r, self.sizes) for r in self._shown(("parameter",), False)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            " ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[4]]).rstrip()
            for r in rows
        ]
        return "\n".join([self.title, *lines, self.summary()])

    def diff(self, other: Layout) -> str:
        """What changes from this layout to `other`: rows whose split or bytes differ, then sums."""
        mine = {(r.kind, r.path): r for r in self.rows}
        theirs = {(r.kind, r.path): r for r in other.rows}
        lines = [f"- {self.title}", f"+ {other.title}"]
        for key in [*mine, *(k for k in theirs if k not in mine)]:
            a, b = mine.get(key), theirs.get(key)
            if a is None or b is None:
                lines.append(f"{'+' if a is None else '-'} {key[0]} {key[1]}")
            elif (a.spec, a.stored, a.dtype) != (b.spec, b.stored, b.dtype):
                before, after = a.bytes_per_device(self.sizes), b.bytes_per_device(other.sizes)
                lines.append(
                    f"  {key[0]} {key[1]}: {_split(a)} -> {_split(b)}, "
                    f"{_human(before)} -> {_human(after)} a device"
                )
        lines += [f"- {self.summary()}", f"+ {other.summary()}"]
        return "\n".join(lines)

    # ---- JSON ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Axis sizes, stage and rows."""
        rows = [dataclasses.asdict(r) for r in self.rows]
        total = self.bytes_per_device()
        data = {"sizes": self.sizes, "zero": self.zero, "bytes_per_device": total, "rows": rows}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout in `text`; its pytrees are dicts of path -> `Leaf`.

        Raises:
            LayoutError: the text is not a layout.
        """
        try:
            data = json.loads(text)
            sizes = sizes_of(data["sizes"])
            rows = [_row(r, sizes) for r in data["rows"]]
            if data["zero"] not in (0, 1, 2, 3):
                raise ValueError(f"zero {data['zero']!r}; the stages are 0, 1, 2 and 3")

            def tree(*kinds: Kind) -> Any:
                # Ordered: JAX flattens a plain dict by its sorted keys, and rows keep their order.
                return collections.OrderedDict((r.path, r) for r in rows if r.kind in kinds)

            return cls(
                sizes=sizes,
                zero=data["zero"],
                params=tree("parameter"),
                grads=tree("gradient"),
                masters=tree("master") or None,
                opt_state=tree("moment", "other") or None,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LayoutError(f"not a layout in JSON: {error!r}") from error


def _row(fields: dict[str, Any], sizes: dict[str, int]) -> Leaf:
    """The row in `fields`, refused where its bytes per device would be wrong or cannot be told."""
    tuples = {name: tuple(fields[name]) for name in ("shape", "stored", "dims")}
    leaf = Leaf(**{**fields, **tuples, "spec": tuple(map(tuple, fields["spec"]))})
    if leaf.kind not in KINDS:
        raise ValueError(f"{leaf.path}: unknown kind {leaf.kind!r}")
    if len({len(t) for t in (leaf.shape, leaf.stored, leaf.dims, leaf.spec)}) > 1:
        raise ValueError(f"{leaf.path}: shape, stored, dims and spec differ in length")
    for n, names in zip(leaf.stored, leaf.spec, strict=True):
        unknown = [a for a in names if a not in AXES]
        if unknown:
            raise ValueError(f"{leaf.path}: unknown mesh axis {unknown[0]!r}")
        if n % math.prod(sizes[a] for a in names):
            on = " x ".join(f"{a}={sizes[a]}" for a in names)
            raise ValueError(f"{leaf.path}: {n} does not divide by {on}")
    leaf.bytes_per_device(sizes)  # raises TypeError for an unknown dtype
    return leaf


def _is_row(x: Any) -> bool:
    return isinstance(x, Leaf)


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _split(leaf: Leaf) -> str:
    parts = [
        f"{d or i}:{'+'.join(names)}"
        for i, (d, names) in enumerate(zip(leaf.dims, leaf.spec, strict=True))
        if names
    ]
    return " ".join(parts) or "whole"


def _cells(r: Leaf, sizes: dict[str, int]) -> tuple[str, str, str, str, str]:
    shape = "x".join(map(str, r.stored)) or "scalar"
    return r.path, f"{shape} {r.dtype}", _split(r), f"{r.bytes_per_device(sizes):,}", r.reason


def _human(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError
