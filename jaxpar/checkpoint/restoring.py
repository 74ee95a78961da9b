"""One checkpoint becomes the state of a run: on any mesh, ZeRO stage and number of devices, strict and verified.

```
files ── metadata ──► plan: which array on disk makes which leaf; what does not fit is an error
                        │
arrays ── as written ───┴──► fingerprints, on the devices ──► stack, cast, pad ──► TrainState
```

Values are compared with what was saved before anything is done to them. A checkpoint that is damaged (`Damaged`) and one
that is whole and does not fit (`CheckpointError`) are different things.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxpar import fingerprint
from jaxpar.checkpoint import arrays, files
from jaxpar.checkpoint.arrays import Stored
from jaxpar.checkpoint.files import CheckpointError, Damaged
from jaxpar.padding import padded
from jaxpar.staged import BLOCKS
from jaxpar.state import reshaped

if TYPE_CHECKING:
    from jaxpar.parallel import Parallel

_SHOWN = 5
"""Differences that an error lists."""

_FRESH = ("step", "skipped", "rng")
_NOT_WEIGHTS = ("opt_state", *_FRESH)
"""Parts of a state that weights alone do not bring."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gave.

    Attributes:
        state: in stored shapes and shardings.
        step: of the checkpoint; the state's own is 0 where only weights were taken.
        meta: JSON that was saved with it.
        notes: lines that a person should see: what was passed over, what was cast.
    """

    state: Any
    step: int
    meta: dict[str, Any]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Source:
    """The arrays on disk that make one leaf: one, or one a layer to be stacked."""

    names: tuple[str, ...]
    whole: Stored
    stacked: bool = False

    @property
    def part(self) -> Stored:
        """Each of the arrays."""
        return Stored(self.whole.shape[1:], self.whole.dtype) if self.stacked else self.whole


def restore(
    path: pathlib.Path,
    par: Parallel,
    *,
    allow_cast: bool = False,
    reset_optimizer: bool = False,
    weights_only: bool = False,
    rng: Any = 0,
) -> Restored:
    """The state of `par` from one checkpoint; the arguments are those of `Checkpoints.restore`.

    Raises:
        Damaged: it is not whole, or not what was written.
        CheckpointError: it does not fit.
    """
    meta = files.read_meta(path)
    abstract = true_state(par)
    left_out = _NOT_WEIGHTS if weights_only else ("opt_state",) if reset_optimizer else ()

    def takes(name: str) -> bool:
        return name.split("/")[0] not in left_out

    wanted = {name: x for name, x in flat(abstract).items() if takes(name)}
    there = {n: s for n, s in sources(path, meta).items() if takes(n)}
    chosen, notes = plan(
        path, there, wanted, allow_cast=allow_cast, weights=meta["form"]["weights"]
    )
    values: dict[str, Any] = dict.fromkeys(flat(abstract))  # None where a leaf is made afresh
    values |= fetch(path, chosen, wanted, meta["fingerprints"])
    state = jax.tree.unflatten(jax.tree.structure(abstract), list(values.values()))
    if weights_only:
        state = dataclasses.replace(state, **_first(par, rng))
    state = _with_fresh_optimizer(par, state) if "opt_state" in left_out else par.pad(state)
    return Restored(state=state, step=meta["step"], meta=meta, notes=notes)


def true_state(par: Parallel) -> Any:
    """Shapes, dtypes and shardings in which the state of `par` is read.

    A dimension that is padded on this mesh does not divide unpadded: it is read whole, and `Parallel.pad` splits it.
    """
    shapes = jax.eval_shape(par.unpad, par.abstract_state)

    def one(true: Any, stored: Any) -> jax.ShapeDtypeStruct:
        spec = [*stored.sharding.spec, *[None] * len(true.shape)]
        sizes = zip(spec, true.shape, stored.shape, strict=False)
        whole = [axes if size == padded else None for axes, size, padded in sizes]
        sharding = NamedSharding(stored.sharding.mesh, PartitionSpec(*whole))
        return jax.ShapeDtypeStruct(true.shape, true.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, par.abstract_state)


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, in order: what a checkpoint holds must not depend on Python classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): leaf for k, leaf in leaves}


# ---- what is there ----------------------------------------------------------------------------


def layer_name(name: str, layer: int) -> str:
    """Path of one layer of a stacked leaf.

    >>> layer_name("opt_state/0/mu/blocks/mlp/up", 3)
    'opt_state/0/mu/blocks/3/mlp/up'
    """
    parts = name.split("/")
    at = len(parts) - parts[::-1].index(BLOCKS)
    return "/".join([*parts[:at], str(layer), *parts[at:]])


def sources(path: pathlib.Path, meta: Mapping[str, Any]) -> dict[str, Source]:
    """Path of every leaf that a checkpoint holds in its canonical, stacked form -> where it comes from.

    Raises:
        Damaged: arrays and JSON do not belong together.
    """
    stored = arrays.metadata(path)
    odd = sorted(set(stored) ^ set(meta["fingerprints"]))
    if odd:
        raise Damaged(
            f"{path}: {_listed(odd)} stand in one of state and meta only",
            dict.fromkeys(odd, "missing"),
        )
    found: dict[str, Source] = {}
    parts: set[str] = set()
    for name, layers in meta["form"].get("stacked", {}).items():
        names = tuple(layer_name(name, i) for i in range(layers))
        one = stored.get(names[0])
        if one is None or any(stored.get(n) != one for n in names):
            raise Damaged(f"{path}: the layers of {name} are not alike")
        found[name] = Source(names, Stored((layers, *one.shape), one.dtype), stacked=True)
        parts.update(names)
    return found | {n: Source((n,), x) for n, x in stored.items() if n not in parts}


# ---- whether it fits --------------------------------------------------------------------------


def plan(
    path: pathlib.Path,
    there: Mapping[str, Source],
    wanted: Mapping[str, Any],
    *,
    allow_cast: bool,
    weights: bool = False,
) -> tuple[dict[str, Source], list[str]]:
    """The source of each leaf that is wanted (arrays or ShapeDtypeStructs by path), and lines on what is cast.

    Masters are the true values. Where they come or go between runs, which takes `allow_cast`, they are made from the
    parameters, or the parameters from them.

    Raises:
        CheckpointError: paths, shapes or dtypes differ; lists the first differences and what would help.
    """
    chosen, casts = _with_masters(dict(there), wanted)
    strict = _differences(there, wanted, allow_cast=False)
    loose = _differences(chosen, wanted, allow_cast=True)
    if not strict:
        return dict(there), []
    if allow_cast and not loose:
        cast = [n for n, x in wanted.items() if chosen[n].whole.dtype != x.dtype]
        kinds = {f"{chosen[n].whole.dtype} to {np.dtype(wanted[n].dtype)}" for n in cast}
        if cast:
            casts.append(
                f"{len(cast)} leaves cast from {', '.join(sorted(kinds))}: {_listed(cast)}"
            )
        return chosen, casts
    differences = loose if allow_cast else strict
    more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    shown = "".join(f"\n  {line}" for line in differences[:_SHOWN])
    if weights and any(re.split("[/:]", line)[0] in _NOT_WEIGHTS for line in differences):
        hint = "\nit holds weights only: a new run can start from them (--init-from)"
    elif not loose:
        hint = "\n--allow-cast lets values change their dtype"
    elif all(line.startswith("opt_state") for line in differences):
        hint = "\n--reset-optimizer starts the optimizer state anew"
    else:
        hint = ""
    raise CheckpointError(f"{path} does not fit this run:{shown}{more}{hint}")


def _with_masters(
    there: dict[str, Source], wanted: Mapping[str, Any]
) -> tuple[dict[str, Source], list[str]]:
    has, wants = (any(n.startswith("masters/") for n in names) for names in (there, wanted))
    if wants and not has:
        made = {
            n: there[_params(n)] for n in wanted if n.startswith("masters/") and _params(n) in there
        }
        return there | made, ["masters are made from the parameters of the checkpoint"]
    if has and not wants:
        masters = {_params(n): s for n, s in there.items() if n.startswith("masters/")}
        rest = {n: s for n, s in there.items() if not n.startswith("masters/")}
        return rest | masters, ["parameters are made from the masters of the checkpoint"]
    return there, []


def _params(master: str) -> str:
    return f"params/{master.removeprefix('masters/')}"


def _differences(
    there: Mapping[str, Source], wanted: Mapping[str, Any], *, allow_cast: bool
) -> list[str]:
    lines = [f"{name}: only in the checkpoint" for name in there if name not in wanted]
    for name, leaf in wanted.items():
        if name not in there:
            lines.append(f"{name}: not in the checkpoint")
            continue
        stored, here = there[name].whole, Stored(tuple(leaf.shape), np.dtype(leaf.dtype))
        floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (stored, here))
        if stored.shape != here.shape or (
            stored.dtype != here.dtype and not (allow_cast and floats)
        ):
            lines.append(f"{name}: {stored} in the checkpoint, {here} here")
    return lines


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---- values -----------------------------------------------------------------------------------


def fetch(
    path: pathlib.Path,
    chosen: Mapping[str, Source],
    wanted: Mapping[str, Any],
    prints: Mapping[str, str],
) -> dict[str, jax.Array]:
    """The wanted leaves, in their shapes, dtypes and shardings; read, verified, stacked and cast.

    Raises:
        Damaged: an array cannot be read, or is not what was saved; names each.
    """
    parts: dict[str, Stored] = {}
    shardings: dict[str, Sharding] = {}
    for name, target in wanted.items():
        source = chosen[name]
        for n in source.names:
            parts[n] = source.part
            # Where JAX has no 64-bit types, such an array would be narrowed before it could be verified.
            if jax.dtypes.canonicalize_dtype(source.part.dtype) == source.part.dtype:
                shardings[n] = _unstacked(target.sharding) if source.stacked else target.sharding
    read = arrays.read(path, parts, shardings)
    verify(path, fingerprint.named(read), prints)

    stacks: dict[str, bool] = {}
    ready: dict[str, list[Any]] = {}
    for name, target in wanted.items():
        xs = [read[n] for n in chosen[name].names]
        stacks[name] = chosen[name].stacked
        if isinstance(xs[0], np.ndarray):  # cast here: a device would narrow it first
            xs = [x.astype(target.dtype) for x in xs]
        ready[name] = xs

    def made(ready: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            name: (jnp.stack(xs) if stacks[name] else xs[0]).astype(wanted[name].dtype)
            for name, xs in ready.items()
        }

    as_asked = {name: target.sharding for name, target in wanted.items()}
    return jax.jit(made, out_shardings=as_asked)(ready)


def verify(path: pathlib.Path, here: Mapping[str, str], prints: Mapping[str, str]) -> None:
    """Compare fingerprints of what was read with those of what was saved.

    Raises:
        Damaged: some differ; names each.
    """
    wrong = [name for name, text in here.items() if text != prints.get(name)]
    if wrong:
        leaves = dict.fromkeys(wrong, "its values are not those that were saved")
        verb = "is" if len(wrong) == 1 else "are"
        raise Damaged(f"{path}: {_listed(wrong)} {verb} not what was saved (fingerprint)", leaves)


def _unstacked(sharding: Any) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _first(par: Parallel, rng: Any) -> dict[str, Any]:
    """Counts and random key of a run that begins; what else `init` makes, the compiler leaves out."""

    def first() -> dict[str, Any]:
        state = par.init(rng)
        return {name: getattr(state, name) for name in _FRESH}

    whole = {name: getattr(par.shardings, name) for name in _FRESH}
    return jax.jit(first, out_shardings=whole)()


def _with_fresh_optimizer(par: Parallel, state: Any) -> Any:
    """The state in stored shapes, with the optimizer state that `par` begins with."""
    rest = dataclasses.replace(par.layout, opt_state=None)

    def fresh(state: Any) -> Any:
        state = reshaped(state, rest, padded)
        updated = state.params if state.masters is None else state.masters
        return dataclasses.replace(state, opt_state=par.program.optimizer.init(updated))

    bare = dataclasses.replace(state, opt_state=None)
    return jax.jit(fresh, out_shardings=par.shardings)(bare)
