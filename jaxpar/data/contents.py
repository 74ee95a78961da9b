"""The content of a file as a hash, so that what was made of it is used again only if it is the same.

A file that changed need not show it: an editor or a copy can keep size and modification time. So
files are read in full, except large ones whose hash was noted when they had already been at rest:
for those, path, size and modification time stand for the content.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from jaxpar.data import files

SMALL = 64 << 20
"""Files up to so many bytes are always read."""

_REST = 2_000_000_000
"""Nanoseconds between the last change of a file and its note: clocks of file systems are coarse,
and a change within the same tick would not show (the rule of git's index)."""

_THREADS = 4
_BLOCK = 1 << 20


def digests(paths: Iterable[str], cache: Path) -> list[str]:
    """SHA-256 of each file, hex; notes about large ones are kept in a cache folder.

    Raises:
        DataError: names a file that cannot be read.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as pool:
        return list(pool.map(lambda path: _digest(path, cache / "contents"), paths))


def _digest(path: str, notes: Path) -> str:
    stamp = files.stamp(path)
    # A remote tag is made of the content; a local time is not, so small files are read.
    if stamp.version is None or (stamp.modified_ns is not None and stamp.size <= SMALL):
        return _read(path)
    full = path if files.is_remote(path) else os.path.abspath(path)
    note = notes / f"{hashlib.sha256(full.encode()).hexdigest()[:32]}.json"
    known = {"path": full, "size": stamp.size, "version": stamp.version}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        old = json.loads(note.read_bytes())
        rested = stamp.modified_ns is None or old["at"] - stamp.modified_ns > _REST
        if rested and all(old[key] == value for key, value in known.items()):
            return str(old["sha256"])
    at = time.time_ns()
    digest = _read(path)
    # A note saves time, and no more: without one the file is read again.
    with contextlib.suppress(OSError):
        notes.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**known, "at": at, "sha256": digest}))
        temporary.replace(note)
    return digest


def _read(path: str) -> str:
    digest = hashlib.sha256()
    with files.opened(path) as file:
        try:
            while block := file.read(_BLOCK):
                digest.update(block)
        except OSError as error:
            raise files.unreadable(path, error) from error
    return digest.hexdigest()
