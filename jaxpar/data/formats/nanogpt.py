"""Token files as nanoGPT writes them: raw uint16; or with the header of llm.c and modded-nanogpt.

```
nanoGPT            id id id ...                      uint16
llm.c              magic version count 0 ... 0       256 int32
                   id id id ...                      uint16 (GPT-2) or uint32 (Llama 3)
```
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from jaxpar.data import streams
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats import tokenfile
from jaxpar.data.formats.pieces import Encoded, Piece
from jaxpar.data.formats.tokenfile import TokenFile

_HEADER = 256 * 4
_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""Magic number and version of a header: type of the ids behind it."""


def open_tokens(file: File) -> TokenFile:
    """What a file holds, by its header and size.

    Raises:
        DataError: a header that does not match its file, or half an id.
    """
    dtype, start = np.dtype("<u2"), 0
    head = b"".join(streams.blocks(file.path, 0, min(file.size, 12))).ljust(12, b"\0")
    magic, version, stated = struct.unpack("<3i", head)
    if magic in {magic for magic, _ in _KINDS}:
        if (magic, version) not in _KINDS:
            known = ", ".join(f"{m} version {v}" for m, v in _KINDS)
            raise DataError(
                f"{file.path} has the header of llm.c, {magic} version {version}; known are {known}"
            )
        dtype, start = _KINDS[magic, version], _HEADER
    count = tokenfile.count_of(file, dtype, start)
    if start and stated != count:
        raise DataError(
            f"{file.path} holds {count} tokens and its header says {stated}; fetch or write it again"
        )
    return TokenFile(path=file.path, dtype=dtype, start=start, count=count, offsets=None)


def plan(file: File, text_key: str) -> list[Piece]:
    """Runs of ids of about 16 MB."""
    del text_key
    return tokenfile.plan("nanogpt", file, open_tokens(file))


def read(piece: Piece, text_key: str, end: int) -> Iterator[Encoded]:
    """The documents of a piece, cut behind every `end`."""
    del text_key
    return tokenfile.read(piece, open_tokens(piece.file), end)
