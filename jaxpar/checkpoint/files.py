"""What lies in a folder of checkpoints, and what of it counts.

```
checkpoints/
  200/                           complete: Orbax writes beside it and renames
    state/                       path of a leaf ("params/embed/tokens") -> array of its true shape
    meta/metadata                JSON: what the caller gave, fingerprints, versions, time, metric, and its own digest
  300.orbax-checkpoint-tmp.../   a save under way, or one whose process was killed
  100.deleting/                  no longer kept
  250.damaged/                   set aside by `restore`; nothing of it is deleted
```

Deleting and setting aside rename first, so that a kill in between leaves nothing that counts and is not whole. Pure
files: nothing here imports JAX or Orbax.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

STATE, META = "state", "meta"
_COMPLETE = "_CHECKPOINT_METADATA"
_TEMPORARY = ".orbax-checkpoint-tmp"
_DELETING = ".deleting"
_DAMAGED = ".damaged"
_DIGEST = "digest"

_PARTS = (_COMPLETE, f"{META}/metadata", f"{STATE}/_METADATA")
"""Files without which a folder is no checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or does not fit: says which, why, and what would."""


class Damaged(CheckpointError):
    """A checkpoint that is not all there, or not what was written.

    Attributes:
        leaves: path of a leaf -> what is wrong with it, where it can be told.
    """

    def __init__(self, message: str, leaves: Mapping[str, str] | None = None):
        super().__init__(message)
        self.leaves = dict(leaves or {})


def steps(folder: str | pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order."""
    return [
        step for step in numbered(folder) if not why_incomplete(pathlib.Path(folder, str(step)))
    ]


def numbered(folder: str | pathlib.Path) -> list[int]:
    """Steps whose name stands in a folder, complete or not, in order."""
    names = [path.name for path in _entries(folder)]
    return sorted(int(n) for n in names if n.isdecimal() and n.isascii() and str(int(n)) == n)


def why_incomplete(path: pathlib.Path) -> str:
    """Why a path is no complete checkpoint; "" if it is one as far as file names tell."""
    if not path.is_dir():
        return "not a folder" if path.exists() else "not there"
    if not any(path.iterdir()):
        return "an empty folder"
    return next((f"{part} is missing" for part in _PARTS if not (path / part).is_file()), "")


def incomplete(folder: str | pathlib.Path) -> list[str]:
    """One line for each thing in a folder that does not count as a checkpoint, and why."""
    whole = {str(step) for step in steps(folder)}
    return [
        f"{path.name}: {_what_else(path)}" for path in _entries(folder) if path.name not in whole
    ]


def damaged(folder: str | pathlib.Path) -> list[str]:
    """Names in a folder that were checkpoints and are not whole, set aside or not yet."""
    broken = {str(step) for step in numbered(folder)} - {str(step) for step in steps(folder)}
    return [p.name for p in _entries(folder) if p.name in broken or _DAMAGED in p.name]


def clean(folder: str | pathlib.Path) -> list[str]:
    """Delete what killed saves and deletions have left; for the folder's one writer.

    Returns:
        The names that are gone.
    """
    left = [p for p in _entries(folder) if _TEMPORARY in p.name or p.name.endswith(_DELETING)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left if not path.exists()]


def remove(folder: pathlib.Path, step: int) -> None:
    """Delete a checkpoint: from the first moment on it does not count.

    Raises:
        OSError: the disk refuses.
    """
    aside = _rename(folder / str(step), _DELETING)
    if aside is not None:
        shutil.rmtree(aside)


def remove_partial(folder: pathlib.Path, step: int) -> None:
    """Delete what a failed save of `step` has written, as far as the disk lets."""
    for path in folder.glob(f"{step}{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: pathlib.Path, step: int, label: str = "damaged") -> pathlib.Path | None:
    """Rename a checkpoint so that it does not count, and delete nothing.

    Returns:
        Its new path; None if it is not there any more.

    Raises:
        OSError: the disk refuses.
    """
    return _rename(folder / str(step), f".{label}")


def locate(path: str | pathlib.Path, step: int | None = None) -> tuple[pathlib.Path, int | None]:
    """The folder of checkpoints that a run folder, a folder of checkpoints or one checkpoint means.

    Args:
        step: the one to take; that of `path`, if it is one checkpoint.

    Returns:
        (folder, step); the step is None where none was named.

    Raises:
        CheckpointError: there is no such folder, it holds no checkpoints, or it is another step than the one asked for.
    """
    path = pathlib.Path(path).absolute()
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder; give a run folder, its checkpoints or one of them"
        )
    if (path / STATE).is_dir() or (path / _COMPLETE).exists():
        if not path.name.isdecimal():
            raise CheckpointError(f"{path} was set aside: the name of a checkpoint is its step")
        if step not in (None, int(path.name)):
            raise CheckpointError(f"{path} is the checkpoint of step {path.name}, not of {step}")
        return path.parent, int(path.name)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not _entries(folder):
        raise CheckpointError(f"no checkpoints under {path}")
    return folder, step


def nbytes(path: pathlib.Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    """The JSON of a checkpoint.

    Raises:
        Damaged: files are missing, it cannot be read, or it is not what was written.
        CheckpointError: it may not be read.
    """
    reason = why_incomplete(path)
    if reason:
        raise Damaged(f"{path}: {reason}")
    try:
        meta = json.loads((path / META / "metadata").read_text(encoding="utf-8"))
    except PermissionError as error:
        raise CheckpointError(f"{path} may not be read: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: meta/metadata cannot be read: {error}") from error
    if not isinstance(meta, dict) or meta.pop(_DIGEST, None) != _digest(meta):
        raise Damaged(f"{path}: meta/metadata is not what was written (its digest differs)")
    if meta["step"] != int(path.name):
        raise Damaged(f"{path} holds step {meta['step']}: the folder was renamed")
    return meta


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` with a digest, by which `read_meta` sees a change."""
    return {**meta, _DIGEST: _digest(meta)}


def _digest(meta: Mapping[str, Any]) -> str:
    # Through JSON and back: a tuple and a list, 1 and True as a key, are one in what is read.
    plain = json.loads(json.dumps(meta))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def _entries(folder: str | pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(pathlib.Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _what_else(path: pathlib.Path) -> str:
    if _TEMPORARY in path.name:
        return "a save under way, or cut short"
    if path.name.endswith(_DELETING):
        return "a deletion that was cut short"
    stem, label = path.name.split(".")[0], path.suffix[1:]
    if stem.isdecimal() and label:
        return f"set aside as {label}"
    return why_incomplete(path) or "the name is not a step"


def _rename(path: pathlib.Path, suffix: str) -> pathlib.Path | None:
    """The path under the first free name of ``200.damaged``, ``200.2.damaged`` and so on; None if it is gone."""
    names = [path.name + suffix, *(f"{path.name}.{n}{suffix}" for n in range(2, 1000))]
    target = next(t for name in names if not (t := path.with_name(name)).exists())
    try:
        return path.rename(target)
    except FileNotFoundError:
        return None
