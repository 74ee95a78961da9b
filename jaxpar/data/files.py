"""Files of a source, on this machine or behind fsspec: found by path, folder or glob, and opened.

```
"texts/**/*.txt"  "~/corpus"  "gs://bucket/train-*.parquet"  ─► find ─► File(name, path, size), ...
```

What is wrong with a set of files is found here, before any of them is read.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import posixpath
import re
from collections.abc import Iterable
from typing import IO, Any

from jaxpar.data.errors import DataError as DataError

_SHARD = re.compile(r"(?P<head>.*[-._])(?P<index>\d{4,})-of-(?P<total>\d{4,})(?P<tail>[^/]*)$")
_NAMED = 5
"""Missing shards that an error names before it counts the rest."""


@dataclasses.dataclass(frozen=True)
class File:
    """One file, or one folder that a library reads as a whole.

    Attributes:
        name: path below the folder that all files of the source share.
        path: as it can be opened.
        size: bytes.
        parts: every path whose content decides what is read.
    """

    name: str
    path: str
    size: int
    parts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What changes when a file does, without reading it.

    Attributes:
        size: bytes.
        version: modification time or tag of the storage; None where it gives neither.
        modified_ns: of local files, nanoseconds since 1970.
    """

    size: int
    version: str | None
    modified_ns: int | None


def find(source: str) -> list[File]:
    """The files of a path, of the files under a folder, or of those that match a glob, sorted.

    ``**`` in a glob goes into folders, ``~`` is the home folder, and paths with ``://`` go through
    fsspec.

    Raises:
        DataError: no such file; one that is empty or cannot be read; shards that are missing.
    """
    paths, single = _find_remote(source) if is_remote(source) else _find_local(source)
    if not paths:
        kind = "matches" if glob.has_magic(source) else "is there at"
        raise DataError(
            f"no file {kind} {expand(source)!r}; give a path, a folder, a glob such as "
            "'texts/*.txt', or stdlib"
        )
    if not single:
        _check_shards(paths)
    return describe(paths)


def describe(paths: Iterable[str], *, root: str | None = None) -> list[File]:
    """`File` of each path, named below `root` or the folder that all of them share.

    Raises:
        DataError: one that is empty or cannot be read.
    """
    paths = list(paths)
    if root is None:
        # Remote paths are absolute already, and know nothing of this machine's folders.
        folders = [
            os.path.dirname(path if is_remote(path) else os.path.abspath(path)) for path in paths
        ]
        root = os.path.commonpath(folders) if not is_remote(paths[0]) else _common(folders)
    out = []
    for path in paths:
        size = stamp(path).size
        if not size:
            raise DataError(f"{path} is empty; leave it out, or write it again")
        name = posixpath.relpath(path, root) if is_remote(path) else os.path.relpath(path, root)
        out.append(File(name, path, size, (path,)))
    return out


def is_remote(path: str) -> bool:
    """Whether fsspec reads it."""
    return "://" in path


def is_private(path: str) -> bool:
    """Whether only this process sees it, as with ``memory://``."""
    return path.startswith("memory://")


def expand(path: str) -> str:
    """A path without ``~`` and ``file://``."""
    if path.startswith("file://"):
        path = path.removeprefix("file://")
    return path if is_remote(path) else os.path.expanduser(path)


def join(folder: str, name: str) -> str:
    """Path of `name` in a folder."""
    return posixpath.join(folder, name) if is_remote(folder) else os.path.join(folder, name)


def exists(path: str) -> bool:
    """Whether there is such a file."""
    if is_remote(path):
        system, inside = _filesystem(path)
        return system.isfile(inside)
    return os.path.isfile(path)


def is_folder(path: str) -> bool:
    """Whether there is such a folder."""
    if is_remote(path):
        system, inside = _filesystem(path)
        return system.isdir(inside)
    return os.path.isdir(path)


def below(folder: str) -> list[str]:
    """Every file under a folder, sorted; hidden ones are left out."""
    if is_remote(folder):
        system, inside = _filesystem(folder)
        found = [system.unstrip_protocol(str(name)) for name in system.find(inside)]
        return sorted(name for name in found if not posixpath.basename(name).startswith("."))
    found = glob.glob(os.path.join(glob.escape(folder), "**"), recursive=True)
    return sorted(name for name in found if not os.path.isdir(name))


def opened(path: str) -> IO[bytes]:
    """The file, open for reading bytes.

    Raises:
        DataError: names the file and what is wrong.
    """
    try:
        if is_remote(path):
            system, inside = _filesystem(path)
            return system.open(inside, "rb")
        return open(path, "rb")
    except OSError as error:
        raise unreadable(path, error) from error


def read(path: str) -> bytes:
    """All bytes of a file.

    Raises:
        DataError: names the file and what is wrong.
    """
    try:
        with opened(path) as file:
            return file.read()
    except OSError as error:
        raise unreadable(path, error) from error


def stamp(path: str) -> Stamp:
    """Size and version of a file.

    Raises:
        DataError: names the file and what is wrong.
    """
    try:
        if not is_remote(path):
            info = os.stat(path)
            return Stamp(info.st_size, str(info.st_mtime_ns), info.st_mtime_ns)
        system, inside = _filesystem(path)
        about = system.info(inside)
    except OSError as error:
        raise unreadable(path, error) from error
    tags = (about.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "content_md5"))
    version = next((str(tag) for tag in tags if tag), None)
    return Stamp(int(about["size"]), version, None)


def unreadable(path: str, error: OSError) -> DataError:
    """The error of a file that the system does not give."""
    return DataError(f"cannot read {path}: {error.strerror or error}")


def shards(path: str) -> re.Match[str] | None:
    """The parts of a name such as ``x-00003-of-00010.parquet``: head, index, total, tail."""
    return _SHARD.match(path)


def _find_local(source: str) -> tuple[list[str], bool]:
    path = expand(source)
    if os.path.isdir(path):
        return below(path), False
    if os.path.lexists(path):
        return [path], True
    found = glob.glob(path, recursive=True)
    return sorted(name for name in found if not os.path.isdir(name)), False


def _find_remote(source: str) -> tuple[list[str], bool]:
    system, inside = _filesystem(source)
    try:
        if system.isfile(inside):
            return [source], True
        if system.isdir(inside):
            return below(source), False
        found = system.glob(inside) if glob.has_magic(inside) else []
        return sorted(system.unstrip_protocol(n) for n in found if system.isfile(n)), False
    except OSError as error:
        raise unreadable(source, error) from error


def _filesystem(path: str) -> tuple[Any, str]:
    import fsspec.core

    protocol = path.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise DataError(
            f"{path}: {protocol}:// needs a package that is not installed: {error}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path}: {error}; give a local path, or one that fsspec knows, such as gs:// or s3://"
        ) from error


def _common(folders: list[str]) -> str:
    """The longest folder that all remote folders lie under."""
    protocol = folders[0].partition("://")[0]
    inside = [folder.partition("://")[2] for folder in folders]
    return f"{protocol}://{posixpath.commonpath(inside)}"


def _check_shards(paths: list[str]) -> None:
    """Refuse sets such as ``x-00003-of-00010`` of which a shard is nowhere.

    A shard that is there and was not asked for was left out on purpose.
    """
    sets: dict[tuple[str, str, str], set[int]] = {}
    for path in paths:
        if match := _SHARD.match(path):
            # Some writers put a hash of the content between number and suffix.
            kind = match["tail"][match["tail"].find(".") :] if "." in match["tail"] else ""
            key = (match["head"], match["total"], kind)
            sets.setdefault(key, set()).add(int(match["index"]))
    for (head, total, kind), there in sets.items():
        if not set(range(int(total))) - there:
            continue
        for path in _beside(head):
            match = _SHARD.match(path)
            if match and os.path.basename(match["head"]) == os.path.basename(head):
                there.add(int(match["index"]))
        missing = sorted(set(range(int(total))) - there)
        if missing:
            names = [f"{head}{i:0{len(total)}d}-of-{total}{kind}" for i in missing]
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise DataError(
                f"{len(names)} of {int(total)} shards are missing: "
                f"{', '.join(names[:_NAMED])}{more}; fetch them, or give each shard that is there "
                "as a source of its own"
            )


def _beside(path: str) -> list[str]:
    """Everything in the folder that a path lies in."""
    folder = os.path.dirname(path)
    if is_remote(path):
        system, inside = _filesystem(folder)
        return [str(name) for name in system.ls(inside, detail=False)]
    return os.listdir(folder or ".")
