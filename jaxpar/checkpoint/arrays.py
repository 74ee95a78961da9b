"""The one module that talks to Orbax: arrays by path go to disk and come back.

In: a flat dict, path of a leaf -> array, so that what a checkpoint holds does not depend on Python classes. What an
error of Orbax means is decided here: damage, or a disk that refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from jaxpar.checkpoint.files import META, STATE, CheckpointError, Damaged

# Folders are made at once: in the background, a disk that refuses would leave the writers waiting for them in vain.
_ASYNC = ocp.AsyncOptions(create_directories_asynchronously=False)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Shape and element type of an array on disk, as metadata says."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Writer:
    """Writes one checkpoint at a time, in the background."""

    def __init__(self) -> None:
        self._orbax = ocp.AsyncCheckpointer(_composite(), async_options=_ASYNC)
        self._filter = _SaidAnyway()
        logging.getLogger("absl").addFilter(self._filter)

    def start(
        self, path: pathlib.Path, arrays: Mapping[str, Any], meta: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Begin to write; when this returns, arrays on an accelerator may be donated, and those of `held` anyhow.

        Args:
            arrays: of JAX or numpy.
            meta: gives the JSON; called in the background, so it may wait for devices.
        """
        self._orbax.save(
            path,
            ocp.args.Composite(state=ocp.args.PyTreeSave(dict(arrays)), meta=_LateJsonSave(meta)),
        )

    def wait(self) -> None:
        """Until what was started is complete under its final name; raises what went wrong, once."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Let go of Orbax's threads."""
        self._orbax.close()
        logging.getLogger("absl").removeFilter(self._filter)


def held(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """(arrays for `Writer.start`, whether it may be called later, from any thread); does not wait for a device.

    From an accelerator Orbax copies to the host before `start` returns. On a CPU the host copy would be the device's own
    buffer, which the next step may write over: those are copied here, as are arrays of numpy. Several processes have to
    start together, in the order of their programs.
    """
    out = {k: x if isinstance(x, jax.Array) else np.array(x) for k, x in arrays.items()}
    device = {k: x for k, x in out.items() if isinstance(x, jax.Array)}
    here = {k: x for k, x in device.items() if _on_cpu(x)}
    out |= dict(zip(here, _copies(tuple(here.values())), strict=True))
    return out, len(here) == len(device) and jax.process_count() == 1


@jax.jit
def _copies(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return jax.tree.map(jnp.copy, arrays)


def _on_cpu(x: jax.Array) -> bool:
    return next(iter(x.sharding.device_set)).platform == "cpu"


def metadata(path: pathlib.Path) -> dict[str, Stored]:
    """What a checkpoint holds; reads no array.

    Raises:
        Damaged: its metadata cannot be read.
    """
    with ocp.Checkpointer(_composite()) as orbax, _reading(path):
        tree = orbax.metadata(path).item_metadata.state.tree
        return {name: Stored(tuple(x.shape), np.dtype(x.dtype)) for name, x in tree.items()}


def read(
    path: pathlib.Path, wanted: Mapping[str, Stored], shardings: Mapping[str, Sharding]
) -> dict[str, Any]:
    """Arrays of a checkpoint as they were written: no cast.

    Args:
        wanted: the arrays to read, as `metadata` gives them.
        shardings: where to bring each; those that are not named come as numpy arrays.

    Raises:
        Damaged: one of them cannot be read.
        CheckpointError: it may not be read.
    """

    def how(name: str, x: Stored) -> ocp.RestoreArgs:
        if name not in shardings:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=shardings[name], global_shape=x.shape)

    if not wanted:
        return {}
    item = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    args = ocp.args.PyTreeRestore(
        item, {name: how(name, x) for name, x in wanted.items()}, partial_restore=True
    )
    with ocp.Checkpointer(_composite()) as orbax, _reading(path):
        return orbax.restore(path, ocp.args.Composite(state=args)).state


class _reading:
    """Names what an error under `path` means; a refusal is no damage."""

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # A device that is out of memory says nothing of the checkpoint.
        if not isinstance(error, Exception) or isinstance(
            error, jax.errors.JaxRuntimeError | MemoryError
        ):
            return
        if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
            raise CheckpointError(f"{self._path} may not be read: {reason(error)}") from error
        raise Damaged(f"{self._path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error of Orbax or of the disk on one line of bearable length."""
    line = " ".join(str(error).split()) or type(error).__name__
    # What TensorStore adds are its own paths, several times over.
    code = re.search(r"\[os_error_code='(\d+)'\]", line)
    if code:
        return os.strerror(int(code[1]))
    line = line.partition(" See full TensorStore details")[0]
    return line if len(line) <= 400 else f"{line[:200]} ... {line[-200:]}"


class _SaidAnyway(logging.Filter):
    """Leaves out the tracebacks that Orbax logs, several times, of errors that it also raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)


class _LateJson(ocp.JsonCheckpointHandler):
    """JSON that is known only when the devices are done: asked for in the background."""

    async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        del item

        async def write() -> None:
            text = json.dumps(args.make(), indent=1)
            if jax.process_index() == 0:
                (directory / "metadata").write_text(text)

        return [CommitFutureAwaitingContractedSignals(write(), name="meta")]


@ocp.args.register_with_handler(_LateJson, for_save=True)
@dataclasses.dataclass
class _LateJsonSave(ocp.args.CheckpointArgs):
    make: Callable[[], Mapping[str, Any]]


@ocp.args.register_with_handler(_LateJson, for_restore=True)
@dataclasses.dataclass
class _LateJsonRestore(ocp.args.CheckpointArgs):
    """Unused: `files.read_meta` reads it without Orbax. Orbax wants the pair."""


def _composite() -> ocp.CompositeCheckpointHandler:
    arrays = ocp.PyTreeCheckpointHandler(
        use_compression=False,  # weights do not get smaller, and training needs the cores
        type_handler_registry=_type_handlers(),
    )
    return ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(async_options=_ASYNC),
        **{STATE: arrays, META: _LateJson()},
    )


def _type_handlers() -> Any:
    """Orbax's own; but one process writes a copied array whole, which needs no program to cut it for each device."""
    several = jax.process_count() > 1
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=several)),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
    )


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jaxpar")
    return {n: version(n) for n in names} | {"python": platform.python_version()}
