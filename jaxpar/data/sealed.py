"""Folders that are whole or do not count: files beside a meta.json with their sizes and checksums.

```
seal(folder, meta)   last act of whoever wrote the files
unseal(folder)       their meta again, or `Damaged` and why
```
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

META = "meta.json"
VERIFIED = "verified.json"

BIG = 4 << 30
"""Folders of more bytes are read once; after that sizes and modification times have to do."""

_CHUNK = 64 << 20
_BLOCK = 4 << 20
_THREADS = 4


class Damaged(Exception):
    """The files are not what was sealed: says which, and how."""


def seal(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, with the size and checksums of every other file there.

    Raises:
        OSError: the folder cannot be read or written.
    """
    names = sorted(path.name for path in folder.iterdir())
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        sums = {
            name: {"size": (folder / name).stat().st_size, "crc32": _crc32(folder / name, pool)}
            for name in names
        }
    body = {**meta, "files": sums}
    whole = json.dumps({**body, "meta_crc32": _of_text(body)}, indent=1)
    (folder / META).write_text(whole)


def unseal(folder: Path) -> dict[str, Any]:
    """The meta of a folder that is whole.

    Raises:
        Damaged: a file is missing, has another size, or other content.
    """
    try:
        meta = json.loads((folder / META).read_bytes())
        stated = meta.pop("meta_crc32")
        names = meta["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{META} cannot be read: {error}") from error
    if stated != _of_text(meta):
        raise Damaged(f"{META} has other content than was written")
    stamps = {}
    for name, about in names:
        try:
            info = (folder / name).stat()
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from error
        if info.st_size != about["size"]:
            raise Damaged(f"{name} has {info.st_size} bytes and was written with {about['size']}")
        stamps[name] = [info.st_size, info.st_mtime_ns]
    big = sum(size for size, _ in stamps.values()) > BIG
    if big and _verified(folder) == stamps:
        return meta
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for name, about in names:
            try:
                sums = _crc32(folder / name, pool)
            except OSError as error:
                raise Damaged(f"{name}: {error.strerror}") from error
            if sums != about["crc32"]:
                raise Damaged(f"{name} has other content than was written")
    if big:
        # On a disk that cannot be written the files are read again next time.
        with contextlib.suppress(OSError):
            temporary = folder / f"{VERIFIED}.{os.getpid()}"
            temporary.write_text(json.dumps(stamps))
            temporary.replace(folder / VERIFIED)
    return meta


def _verified(folder: Path) -> Any:
    try:
        return json.loads((folder / VERIFIED).read_bytes())
    except (OSError, ValueError):
        return None


def _of_text(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _crc32(path: Path, pool: concurrent.futures.Executor) -> list[int]:
    """CRC-32 of every 64 MB, so that several are computed at once; zlib releases the GIL."""
    return list(pool.map(lambda at: _chunk(path, at), range(0, path.stat().st_size, _CHUNK)))


def _chunk(path: Path, start: int) -> int:
    value, left = 0, _CHUNK
    with open(path, "rb") as file:
        file.seek(start)
        while left and (block := file.read(min(_BLOCK, left))):
            value = zlib.crc32(block, value)
            left -= len(block)
    return value
