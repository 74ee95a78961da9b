"""Partition rules: a path names its dimensions, and dimensions lie on mesh axes.

```
"blocks/attention/query" ──pattern──► ("layers", "embed", "heads", "head_dim")
                                                    ──axes──► heads over `model`
```

Strict: whatever does not fit is an error that names the path, the cause and the nearest remedy. Two
ways out are asked for by name and shown in the Layout: `pad` (store more rows than the model has)
and `replicate` (keep a dimension whole where it does not divide). Works on any pytree, and knows
nothing of devices: only axis sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax

from jaxpar.axes import AXES, BATCH_AXES

Kind = Literal["parameter", "gradient", "master", "moment", "other"]
ROLES = ("matrix", "embedding", "norm", "bias")
LAYERS = "layers"
"""Name of the dimension along which a scan stacks layers; ZeRO never splits it."""

_KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
"""Bytes of one typed random key (jax.random.key_data): such leaves lie in states with dropout."""


class LayoutError(ValueError):
    """Rules, parameters and mesh do not fit together; the message lists up to ten reasons."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array and how it is split; the row of a Layout.

    Attributes:
        path: names joined by "/".
        kind: what it is kept for.
        shape: true shape.
        stored: shape after padding; equal to `shape` without.
        dtype: element type.
        dims: name of every dimension.
        spec: for every dimension the logical mesh axes that split it, slowest first.
        rule: pattern that matched.
        role: "matrix", "embedding", "norm" or "bias"; decides weight decay.
        reason: why it is as it is.
    """

    path: str
    kind: Kind = "parameter"
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...]
    spec: tuple[tuple[str, ...], ...]
    rule: str = ""
    role: str = "matrix"
    reason: str = "rule"

    @property
    def padded(self) -> bool:
        """Whether it is stored larger than it is."""
        return self.stored != self.shape

    @property
    def floating(self) -> bool:
        """Whether its elements are real numbers that a dtype for training applies to."""
        if self.dtype in _KEY_BYTES:
            return False
        return jax.numpy.issubdtype(jax.numpy.dtype(self.dtype), jax.numpy.floating)

    def local(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's part."""
        return tuple(
            n // math.prod(sizes.get(a, 1) for a in names)
            for n, names in zip(self.stored, self.spec, strict=True)
        )

    def bytes_per_device(self, sizes: Mapping[str, int]) -> int:
        """Exact bytes that one device holds."""
        each = _KEY_BYTES.get(self.dtype) or jax.numpy.dtype(self.dtype).itemsize
        return math.prod(self.local(sizes)) * each

    def copies(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Axes larger than 1 along which every device holds the same part."""
        split = {a for names in self.spec for a in names}
        return tuple(a for a in AXES if sizes.get(a, 1) > 1 and a not in split)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A path pattern and what it says.

    Attributes:
        pattern: regular expression that must match the whole path.
        dims: name of every dimension.
        role: "matrix", "embedding", "norm" or "bias".
    """

    pattern: str
    dims: tuple[str, ...]
    role: str = "matrix"


class Rules:
    """Path patterns to dimension names to mesh axes; the first that matches a whole path wins.

    Args:
        entries: (pattern, dims) or (pattern, dims, role); paths are joined by "/".
        axes: dimension name -> mesh axis, tuple of axes (slowest first) or None. Every dimension
            is named here. Axes that split the rows of a batch (`replica`, `data`) split no
            parameter: ZeRO does that.
        pad: dimensions stored with zeros at the end where they do not divide.
        replicate: dimensions kept whole where they do not divide.

    Raises:
        LayoutError: a rule set that cannot be right for any parameters.
    """

    def __init__(
        self,
        entries: Iterable[tuple[Any, ...] | Rule],
        *,
        axes: Mapping[str, str | Sequence[str] | None],
        pad: Sequence[str] = (),
        replicate: Sequence[str] = (),
    ):
        if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
            raise LayoutError(f"rules are a {type(entries).__name__}; {_LIST}")
        self.entries = tuple(e if isinstance(e, Rule) else _rule(e) for e in entries)
        if not isinstance(axes, Mapping):
            raise LayoutError(f"axes is a {type(axes).__name__}; {_AXES}")
        for name, on in axes.items():
            if on is not None and not _are_names(on):
                raise LayoutError(f"axes: {name!r} lies on {on!r}; {_AXES}")
        self.axes = {name: () if on is None else _names(on) for name, on in axes.items()}
        self.pad, self.replicate = _names(pad), _names(replicate)
        self._check()

    def _check(self) -> None:
        errors: list[str] = []
        seen: dict[str, Rule] = {}
        for rule in self.entries:
            if rule.pattern in seen:
                errors.append(
                    f"two rules have the pattern {rule.pattern!r}: {seen[rule.pattern].dims} and "
                    f"{rule.dims}; keep one"
                )
            seen[rule.pattern] = rule
            try:
                re.compile(rule.pattern)
            except re.error as error:
                errors.append(f"rule {rule.pattern!r} is not a regular expression: {error}")
            if rule.role not in ROLES:
                errors.append(
                    f"rule {rule.pattern!r}: role {rule.role!r} is not one of {', '.join(ROLES)}"
                )
            for dim in rule.dims:
                if dim not in self.axes:
                    errors.append(
                        f"rule {rule.pattern!r}: dimension {dim!r} is not in axes"
                        f"{_nearest(dim, self.axes)}; name its mesh axis there, or None"
                    )
            owner: dict[str, str] = {}
            for dim in rule.dims:
                for axis in self.axes.get(dim, ()):
                    if axis in owner:
                        errors.append(
                            f"rule {rule.pattern!r}: mesh axis {axis!r} would split the array "
                            f"twice, by {owner[axis]!r} -> {axis!r} and by {dim!r} -> {axis!r}; "
                            f"map one to None, or name the dimension otherwise in this rule"
                        )
                    owner[axis] = dim
        for name, on in self.axes.items():
            for axis in on:
                if axis not in AXES:
                    errors.append(
                        f"axes: {name!r} lies on unknown mesh axis {axis!r}{_nearest(axis, AXES)}"
                    )
        for option, names in (("pad", self.pad), ("replicate", self.replicate)):
            for name in names:
                if name not in self.axes:
                    near = _nearest(name, self.axes)
                    errors.append(f"{option}: unknown dimension {name!r}{near}")
        both = set(self.pad) & set(self.replicate)
        if both:
            errors.append(f"dimensions {sorted(both)} are in pad and in replicate; choose one")
        raise_all(errors)

    def leaves(self, shapes: Any, mesh: Any) -> Any:
        """A pytree of `Leaf` like `shapes`.

        Args:
            shapes: pytree of arrays or ShapeDtypeStructs.
            mesh: a `Mesh` or a mapping of axis names to sizes.

        Raises:
            LayoutError: unmatched leaves, unused rules, wrong ranks, dimensions that do not divide.
        """
        sizes = sizes_of(mesh)
        flat, treedef = jax.tree.flatten(shapes)
        paths = paths_of(shapes)
        unmatched: list[tuple[int, str]] = []
        errors: list[str] = []
        used: set[str] = set()
        out = []
        for path, x in zip(paths, flat, strict=True):
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                errors.append(
                    f"{path} is a {type(x).__name__}, not an array; keep parameters and the rest "
                    f"of a model apart (equinox.partition, flax.nnx.split)"
                )
                continue
            rule = next((r for r in self.entries if re.fullmatch(r.pattern, path)), None)
            if rule is None:
                near = _nearest(path, [r.pattern for r in self.entries])
                message = f"{path} {tuple(x.shape)} matches no rule{near}; add one"
                unmatched.append((-math.prod(x.shape), message))
                continue
            used.add(rule.pattern)
            if len(rule.dims) != len(x.shape):
                errors.append(
                    f"{path} {tuple(x.shape)} has {len(x.shape)} dimensions and rule "
                    f"{rule.pattern!r} names {len(rule.dims)}: {rule.dims}"
                )
                continue
            leaf, wrong = self._leaf(path, x, rule, sizes)
            errors += wrong
            out.append(leaf)
        twice = [p for p, n in collections.Counter(paths).items() if n > 1]
        errors += [f"two leaves have the path {p}; a path names one leaf" for p in twice]
        # What comes first explains the rest: a misspelt rule, then the largest leaves it left out.
        idle = [self._idle(rule, paths) for rule in self.entries if rule.pattern not in used]
        raise_all(idle + [message for _, message in sorted(unmatched)] + errors)
        return jax.tree.unflatten(treedef, out)

    def _idle(self, rule: Rule, paths: Sequence[str]) -> str:
        """Why `rule` applied to nothing."""
        path = next((p for p in paths if re.fullmatch(rule.pattern, p)), None)
        if path is None:
            return f"rule {rule.pattern!r} matches no path{_nearest(rule.pattern, paths)}"
        first = next(r for r in self.entries if re.fullmatch(r.pattern, path))
        return (
            f"rule {rule.pattern!r} is never reached: {first.pattern!r} stands before it and takes "
            f"{path}; put it first, or drop it"
        )

    def _leaf(
        self, path: str, x: Any, rule: Rule, sizes: Mapping[str, int]
    ) -> tuple[Leaf, list[str]]:
        """The row of one array, and what is wrong with it."""
        stored, spec, reasons, errors = list(x.shape), [], [], []
        for i, (dim, n) in enumerate(zip(rule.dims, x.shape, strict=True)):
            rows = [a for a in self.axes[dim] if a in BATCH_AXES]
            if rows:
                errors.append(
                    f"{path} {tuple(x.shape)}: dimension {i} {dim!r} (rule {rule.pattern!r}) lies on "
                    f"{rows[0]!r}, which splits the rows of a batch: each shard's loss would see a part "
                    f"of the array. Map {dim!r} to 'model' or None; zero=3 splits it over data"
                )
            axes = tuple(a for a in self.axes[dim] if sizes[a] > 1)
            count = math.prod(sizes[a] for a in axes)
            on = " x ".join(f"{a}={sizes[a]}" for a in axes)
            if n % count:
                low, high = n // count * count, -(-n // count) * count
                if dim in self.pad:
                    stored[i] = high
                    reasons.append(f"{dim} padded {n} -> {high} for {on}")
                elif dim in self.replicate:
                    axes = ()
                    reasons.append(f"{dim} {n} replicated over {on} (asked)")
                else:
                    sizes_that_fit = f"{low} or {high}" if low else f"{high}"
                    errors.append(
                        f"{path} {tuple(x.shape)}: dimension {i} {dim!r} = {n} does not divide by "
                        f"{on}; {sizes_that_fit} would, or pad=({dim!r},), or replicate=({dim!r},)"
                    )
            spec.append(axes)
        leaf = Leaf(
            path=path,
            shape=tuple(x.shape),
            stored=tuple(stored),
            dtype=str(x.dtype),
            dims=rule.dims,
            spec=tuple(spec),
            rule=rule.pattern,
            role=rule.role,
            reason="; ".join(reasons) or "rule",
        )
        return leaf, errors


def dtype_named(name: str) -> Any:
    """The dtype of a `Leaf`; those of typed random keys have no numpy name."""
    kinds = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
    if name not in kinds:
        return jax.numpy.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=kinds[name])).dtype


def paths_of(tree: Any) -> list[str]:
    """The path of every leaf, names joined by "/": dict keys, attributes and indices alike.

    Flax NNX keeps each array in a variable; the variable's own ``value`` is not a name of the model
    and is left out.
    """
    out = []
    for keys, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]:
        names = []
        for key in keys:
            field = next((f for f in ("key", "name", "idx") if hasattr(key, f)), None)
            names.append(str(getattr(key, field) if field else key))
        out += ["/".join(names)] * len(jax.tree.leaves(node))
    return out


_LIST = "write a list of (pattern, dims) or (pattern, dims, role)"
_AXES = "write {dimension: 'model'}, a tuple of mesh axes, or None"


def _rule(entry: Any) -> Rule:
    if isinstance(entry, str) or not isinstance(entry, Sequence) or len(entry) not in (2, 3):
        raise LayoutError(f"rule {entry!r}; {_LIST}")
    pattern, dims, *role = entry
    if not isinstance(pattern, str):
        raise LayoutError(f"rule {entry!r}: the pattern is a string, a regular expression")
    if isinstance(dims, jax.sharding.PartitionSpec) or not _are_names(dims):
        raise LayoutError(
            f"rule {pattern!r}: dims are {dims!r}; name every dimension, as ('embed', 'mlp'), and its "
            f"mesh axis in axes={{'mlp': 'model', 'embed': None}}"
        )
    return Rule(pattern, _names(dims), *role)


def _are_names(given: Any) -> bool:
    return isinstance(given, str) or (
        isinstance(given, Sequence) and all(isinstance(n, str) for n in given)
    )


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several; a lone string is one name, not its letters."""
    return (given,) if isinstance(given, str) else tuple(given)


def _is_variable(x: Any) -> bool:
    # By name, for flax is not needed to use this module.
    return any(
        c.__name__ == "Variable" and c.__module__.startswith("flax.nnx") for c in type(x).__mro__
    )


def sizes_of(mesh: Any) -> dict[str, int]:
    """Axis sizes of a `Mesh` or of a mapping; names that are missing have size 1."""
    given = mesh if isinstance(mesh, Mapping) else mesh.sizes
    unknown = [a for a in given if a not in AXES]
    if unknown:
        raise LayoutError(f"unknown mesh axis {unknown[0]!r}{_nearest(unknown[0], AXES)}")
    for axis, n in given.items():
        if not isinstance(n, numbers.Integral) or n < 1:
            raise LayoutError(
                f"mesh axis {axis!r} has size {n!r}; sizes are whole numbers from 1, and -1 is "
                f"worked out from the devices by make_mesh"
            )
    return {a: int(given.get(a, 1)) for a in AXES}


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, 0.4)
    return f" (nearest: {close[0]!r})" if close else ""


def raise_all(errors: Sequence[str]) -> None:
    """Raise a `LayoutError` of up to ten reasons, if there is one."""
    if errors:
        more = f"\n  ... and {len(errors) - 10} more" if len(errors) > 10 else ""
        raise LayoutError("\n  ".join(errors[:10]) + more)
