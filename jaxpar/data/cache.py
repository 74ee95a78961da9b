"""Folders that are made once and used by everyone: token caches, by key.

```
cache/tokens/KEY/             whole, or not there
cache/tokens/KEY.tmp-PID      being written; counts for nothing
cache/tokens/KEY.damaged      set aside, to be looked at or deleted
cache/tokens/KEY.lock         held by the one who writes
```

A folder appears under its key by one rename when all of it is written and sealed, so that a process
that is killed leaves nothing that counts. Whoever holds the lock is the only writer: leftovers that
it finds belong to the dead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from jaxpar.data import sealed
from jaxpar.data.errors import DataError

Say = Callable[[str], None]


def root(folder: str | None) -> Path:
    """The cache folder that the user named, else jaxpar in $XDG_CACHE_HOME or ~/.cache."""
    if folder is not None:
        return Path(folder).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    # The specification of that variable ignores relative paths.
    base = Path(home) if home and os.path.isabs(home) else Path.home() / ".cache"
    return base / "jaxpar"


def made(
    folder: Path, build: Callable[[Path], dict[str, Any]], say: Say
) -> tuple[Path, dict[str, Any]]:
    """A folder and its meta; if it is not there or not whole, `build` writes it.

    Args:
        folder: where it is kept; its last part is the key.
        build: writes the files into the empty folder that it is given, and returns what meta.json
            shall hold.
        say: told of a wait for another process, and of damage.

    Raises:
        DataError: the folder cannot be written, or what `build` raises.
    """
    try:
        if folder.exists():
            with contextlib.suppress(sealed.Damaged):
                return folder, sealed.unseal(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, say):
            return folder, _made_alone(folder, build, say)
    except OSError as error:
        raise unwritable(folder.parent, error) from error


def unwritable(folder: Path, error: OSError) -> DataError:
    """The error of a cache folder that cannot be used."""
    return DataError(
        f"cannot write the token cache in {folder}: {error.strerror or error}; free space there, "
        "or name another folder in data.cache"
    )


def _made_alone(folder: Path, build: Callable[[Path], dict[str, Any]], say: Say) -> dict[str, Any]:
    if folder.exists():
        try:
            return sealed.unseal(folder)
        except sealed.Damaged as damage:
            aside = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            say(f"the token cache {folder} is damaged: {damage}; set aside as {aside.name}")
    for left in folder.parent.glob(f"{folder.name}.tmp-*"):
        # A worker of the dead may still be writing; what it leaves is removed the next time.
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    # Only a process of this number could have left it, and that one is dead.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        sealed.seal(temporary, build(temporary))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sealed.unseal(folder)


@contextlib.contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"waiting for another process that writes the token cache {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
