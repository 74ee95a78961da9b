"""Bytes of large files as blocks and lines, compressed or not, in bounded memory.

```
a.jsonl.zst ─► blocks (about 1 MB each, decompressed) ─► lines
a.jsonl     ─► line_cuts [0, 16 MB, 32 MB, ...] at line ends ─► blocks of one part ─► lines
```
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxpar.data import files
from jaxpar.data.errors import DataError

PIECE = 16 << 20
"""Bytes of the parts that a large file is worked on in."""

_PIECES = 1024
"""A file has no more parts than this, however large it is."""

_BLOCK = 1 << 20
_SQUEEZED = 1 << 16
"""Bytes of compressed input at once: text packs tenfold, and output is held whole."""


def compression(path: str) -> str:
    """``gz``, ``zst`` or nothing, by the end of a name."""
    return {"gz": "gz", "zst": "zst", "zstd": "zst"}.get(path.lower().rpartition(".")[2], "")


def blocks(path: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Bytes `start` to `stop` of a file; of a compressed one always all, decompressed.

    Raises:
        DataError: names a file that cannot be read, is damaged or ends too early.
    """
    if kind := compression(path):
        return _inflated(path, kind, _raw(path, 0, None, _SQUEEZED))
    return _raw(path, start, stop, _BLOCK)


def lines(of: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of blocks, without their ends."""
    begun: list[bytes] = []
    for block in of:
        first, *others = block.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            *whole, last = others
            yield from whole
            begun = [last]
    if last := b"".join(begun):
        yield last


def line_cuts(path: str, size: int) -> list[int]:
    """Offsets from 0 to `size`, each behind a line end, about `PIECE` bytes apart.

    They depend on the file alone, never on how many processes there are.
    """
    step = max(PIECE, math.ceil(size / _PIECES))
    cuts = [0]
    with files.opened(path) as file:
        for nominal in range(step, size, step):
            if nominal <= cuts[-1]:
                continue  # a line longer than a part
            file.seek(nominal - 1)
            at = nominal - 1
            while (newline := (block := file.read(_SQUEEZED)).find(b"\n")) < 0 and block:
                at += len(block)
            if not block or at + newline + 1 >= size:
                break
            cuts.append(at + newline + 1)
    return [*cuts, size]


def _raw(path: str, start: int, stop: int | None, size: int) -> Iterator[bytes]:
    with files.opened(path) as file:
        try:
            file.seek(start)
            left = math.inf if stop is None else stop - start
            while left > 0 and (block := file.read(int(min(size, left)))):
                left -= len(block)
                yield block
        except OSError as error:
            raise files.unreadable(path, error) from error
        if stop is not None and left > 0:
            raise DataError(
                f"{path} became shorter while it was read; start again when it is whole"
            )


def _inflated(path: str, kind: str, packed: Iterator[bytes]) -> Iterator[bytes]:
    """Decompressed blocks of one stream or of several, one behind the other."""
    begin, errors = _gzip() if kind == "gz" else _zstd()
    stream: Any = None
    done = 0
    for block in packed:
        while block:
            if stream is None:
                # gzip files may be padded with zeros, on tapes and by some object stores.
                if kind == "gz" and done and not (block := block.lstrip(b"\0")):
                    break
                stream = begin()
            try:
                out = stream.decompress(block)
            except errors as error:
                raise DataError(
                    f"{path} is not a whole .{kind} file: {error}, after {done} bytes of text; "
                    "fetch or write it again"
                ) from error
            done += len(out)
            if out:
                yield out
            block = b""
            if stream.eof:
                block, stream = stream.unused_data, None
    if stream is not None:
        raise DataError(
            f"{path} is cut short: its .{kind} stream does not end, after {done} bytes of text; "
            "fetch or write it again"
        )


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    # 16 more than the largest window: a gzip header and checksum are expected, and checked.
    return (lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)), zlib.error


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    import zstandard

    # The largest window that `zstd --long` writes.
    library = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return library.decompressobj, zstandard.ZstdError
