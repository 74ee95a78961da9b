"""The folder of a run: new, gone on with or refused, never silently written over, and never by two at once.

```
runs/NAME/
  config.yaml     what the run was last started with; config-until-STEP.yaml: what it was started with before
  layout.json     where every leaf lives
  metrics.jsonl   one row a step; dropped.jsonl: rows of steps that were taken again
  tensorboard/    checkpoints/
  .lock           held while a process writes here; running.json says which
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Iterator
from typing import Any

from filelock import FileLock, Timeout

from jaxpar import config as configs
from jaxpar.config import RunConfig

_LOCK, _HOLDER, _CONFIG = ".lock", "running.json", "config.yaml"

FIXED = (
    "model", "seed", "data.source", "data.heldout", "data.text_key", "data.tokenizer", "data.packing",
    "data.batch", "data.sequence", "init_from",
)  # fmt: skip
"""Fields that a run keeps for life: another value would be another model, or repeat and lose data."""

_FREE = {
    "mesh", "devices", "run_dir", "resume", "overwrite", "stop_after", "eval_every", "eval_batches", "checkpoint_every",
    "async_checkpoint", "keep_checkpoints", "keep_best", "keep_every", "sample_tokens", "show", "allow_cast",
    "reset_optimizer", "data.cache", "data.workers",
}  # fmt: skip
"""Fields whose change is nobody's surprise; a change of any other one is said."""


class RunFolderError(ValueError):
    """A run folder that cannot be used: it would be written over, is another run's, or is in use."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and what is already there.

    Attributes:
        path: the folder.
        resumes: whether a run is there to go on with.
        notes: lines to be said before it starts: what differs from how the run was started before.
    """

    path: pathlib.Path
    resumes: bool
    notes: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"


def choose(config: RunConfig) -> RunFolder:
    """The run folder of a config, named by the time where it names none; touches nothing.

    Raises:
        RunFolderError: something is in it that is not a run, or a run that may not be gone on with.
    """
    path = pathlib.Path(config.run_dir or time.strftime("runs/%Y-%m-%d_%H-%M-%S"))
    if "://" in str(config.run_dir):
        raise RunFolderError(
            f"run folder {config.run_dir} is not on this machine's disks; give a path"
        )
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"run folder {path} is a file; choose another with --run-dir")
    if not path.is_dir() or not {p.name for p in path.iterdir()} - {_LOCK, _HOLDER}:
        return RunFolder(path, resumes=False)
    if not (path / _CONFIG).is_file():
        raise RunFolderError(f"{path} is not empty and does not look like a run folder: left alone")
    if config.overwrite:
        return RunFolder(path, resumes=False)
    if not config.resume:
        raise RunFolderError(
            f"run folder {path} has a run in it; go on with it (--resume), choose another with --run-dir, or lose what "
            "is in it with --overwrite"
        )
    notes = _compare(configs.from_yaml(path / _CONFIG), config, path)
    return RunFolder(path, resumes=True, notes=notes)


@contextlib.contextmanager
def claim(folder: RunFolder, config: RunConfig) -> Iterator[RunFolder]:
    """Hold the folder for this process alone, and make it; what was to be overwritten goes now.

    Raises:
        RunFolderError: another process writes there, or the folder changed since it was chosen.
    """
    existed = folder.path.is_dir()
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.path / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunFolderError(
            f"run folder {folder.path} is in use{_holder(folder.path)}; stop that run or choose another --run-dir"
        ) from None
    try:
        if existed:
            now = choose(dataclasses.replace(config, run_dir=str(folder.path)))
            if now.resumes != folder.resumes:
                raise RunFolderError(
                    f"run folder {folder.path} was changed by another process just now; start again"
                )
        if not folder.resumes:
            _empty(folder.path)
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        (folder.path / _HOLDER).write_text(json.dumps(me))
        yield folder
    finally:
        with contextlib.suppress(OSError):
            (folder.path / _HOLDER).unlink(missing_ok=True)
        lock.release()


def write_config(folder: RunFolder, config: RunConfig, step: int) -> None:
    """Write ``config.yaml``; one of an earlier start that differs stays under another name."""
    path, text = folder.path / _CONFIG, configs.to_yaml(config)
    if path.is_file() and (old := path.read_text()) != text:
        kept = folder.path / f"config-until-{step}.yaml"
        if not kept.exists():
            kept.write_text(old)
    new = path.with_suffix(".tmp")
    new.write_text(text)
    new.replace(path)  # whole or not at all: a folder without it is no run folder


def _holder(path: pathlib.Path) -> str:
    try:
        who = json.loads((path / _HOLDER).read_text())
        return f" by process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError):
        return " by another process"


def _empty(path: pathlib.Path) -> None:
    for entry in path.iterdir():
        if entry.name in (_LOCK, _HOLDER):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _compare(old: RunConfig, new: RunConfig, path: pathlib.Path) -> tuple[str, ...]:
    before, after = (_fields(c) for c in (old, new))
    changed = [name for name in after if before[name] != after[name]]
    fixed = [n for n in changed if any(n == f or n.startswith(f"{f}.") for f in FIXED)]
    if fixed:
        listed = ", ".join(f"{n} {before[n]!r} -> {after[n]!r}" for n in fixed[:5])
        raise RunFolderError(
            f"run folder {path} has a run that differs: {listed}; go on as it was with --config {path / _CONFIG}, or "
            "start another in a new --run-dir (--init-from takes its weights along)"
        )
    return tuple(f"{n}: {before[n]} -> {after[n]}" for n in changed if n not in _FREE)


def _fields(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in configs.to_dict(config).items():
        if name in configs.SECTIONS:
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat
