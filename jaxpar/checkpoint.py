"""Save and restore the state of a run with Orbax, in true shapes and without a trace of the mesh.

```
checkpoints/
  200/          one folder a step, complete or absent: Orbax writes beside it and renames
    state/      flat: path of a leaf ("params/embed/tokens") -> array of its true shape
    meta/       JSON: what the caller wants to know again
```

Restoring is strict: the same paths, shapes and dtypes, or an error that lists the differences.
Orbax alone would cast a dtype silently and take an empty folder for a checkpoint.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jaxpar.parallel import Parallel

_SHOWN = 5
"""Differences that an error lists."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or does not fit: says which, why, and what would."""


def save(
    directory: str | pathlib.Path, step: int, state: Any, meta: Mapping[str, Any] | None = None
) -> pathlib.Path:
    """Write the checkpoint of `step`; when this returns, it is complete.

    Args:
        directory: folder of all checkpoints of the run; made if absent.
        state: pytree of arrays in true shapes (`Parallel.unpad`).
        meta: JSON values kept beside it.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: this step is there already, or the disk refuses.
    """
    path = pathlib.Path(directory).absolute() / str(step)
    if path.exists():
        raise CheckpointError(f"{path} is there already; a checkpoint is never written over")
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(_flat(state)), meta=ocp.args.JsonSave(dict(meta or {}))
    )
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    return path


def restore(
    directory: str | pathlib.Path, abstract: Any, *, step: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """Read a checkpoint onto any mesh.

    Args:
        abstract: pytree of ShapeDtypeStructs with the shardings wanted (`true_state`).
        step: the newest complete checkpoint by default.

    Returns:
        (state, meta); the state has true shapes (`Parallel.pad` brings it into stored ones).

    Raises:
        CheckpointError: none there, or its paths, shapes or dtypes are not those of `abstract`.
    """
    found = steps(directory)
    if step is None and not found:
        raise CheckpointError(f"no complete checkpoint under {directory}")
    if step is not None and step not in found:
        raise CheckpointError(f"no complete checkpoint of step {step} under {directory}: {found}")
    path = pathlib.Path(directory).absolute() / str(found[-1] if step is None else step)
    wanted = _flat(abstract)
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata.state.tree
    differences = _differences(stored, wanted)
    if differences:
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        shown = "".join(f"\n  {line}" for line in differences[:_SHOWN])
        raise CheckpointError(f"{path} does not fit this run:{shown}{more}")
    with _checkpointer() as checkpointer:
        read = checkpointer.restore(
            path,
            ocp.args.Composite(state=ocp.args.StandardRestore(wanted), meta=ocp.args.JsonRestore()),
        )
    state = jax.tree.unflatten(jax.tree.structure(abstract), [read.state[k] for k in wanted])
    return state, read.meta


def steps(directory: str | pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order.

    What Orbax was still writing has another name; an empty folder lacks its metadata.
    """
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        return []
    names = [p.name for p in folder.iterdir() if (p / "_CHECKPOINT_METADATA").is_file()]
    return sorted(int(name) for name in names if name.isdigit())


def true_state(par: Parallel) -> Any:
    """Shapes, dtypes and shardings in which `restore` brings the state of `par`.

    A dimension that is padded on this mesh does not divide unpadded: it is restored whole, and
    `Parallel.pad` splits it.
    """
    shapes = jax.eval_shape(par.unpad, par.abstract_state)

    def one(true: Any, stored: Any) -> jax.ShapeDtypeStruct:
        spec = [*stored.sharding.spec, *[None] * len(true.shape)]
        sizes = zip(spec, true.shape, stored.shape, strict=False)
        whole = [axes if size == padded else None for axes, size, padded in sizes]
        sharding = NamedSharding(stored.sharding.mesh, PartitionSpec(*whole))
        return jax.ShapeDtypeStruct(true.shape, true.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, par.abstract_state)


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler()
        )
    )


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, in order: what a checkpoint holds must not depend on Python classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): leaf for k, leaf in leaves}


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: only in the checkpoint" for name in stored if name not in wanted]
    for name, leaf in wanted.items():
        if name not in stored:
            lines.append(f"{name}: not in the checkpoint")
            continue
        here, there = (f"{np.dtype(x.dtype)}{list(x.shape)}" for x in (leaf, stored[name]))
        if here != there:
            lines.append(f"{name}: {there} in the checkpoint, {here} here")
    return lines
