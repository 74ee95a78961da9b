"""Megatron's indexed datasets: ids in a .bin, sequences and documents in an .idx of the same name.

```
.idx   "MMIDIDX\\0\\0"  version u64 = 1  type of an id u8  sequences u64  document bounds u64
       length of each sequence i32   its place in the .bin, bytes i64
       sequence that each document begins with, and the end i64
```
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from jaxpar.data import files
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats import tokenfile
from jaxpar.data.formats.pieces import Encoded, Piece
from jaxpar.data.formats.tokenfile import TokenFile

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")

_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_AS = {1: "<u1", 3: "<u2", 4: "<u4", 8: "<u2"}
"""How ids are mapped: a negative one becomes far too large, and is found as such."""


def pair(path: str) -> File | None:
    """A .bin or .idx file with its other half as one file, named after the .bin; None if it has none.

    Raises:
        DataError: an .idx without its .bin.
    """
    stem = path.rpartition(".")[0]
    data, index = f"{stem}.bin", f"{stem}.idx"
    if not files.exists(index):
        return None
    if not files.exists(data):
        raise DataError(f"{index} is the index of {data}, which is not there; fetch both")
    return File(data.rpartition("/")[2], data, files.stamp(data).size, (data, index))


def open_tokens(file: File) -> TokenFile:
    """What a pair holds.

    Raises:
        DataError: an index that is damaged, or that does not match its .bin.
    """
    data, index = file.parts
    raw = files.read(index)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise DataError(
            f"{index} is not a Megatron index (MMIDIDX); convert older ones with Megatron's tools, "
            "or leave it out to read the .bin as raw uint16"
        )
    _, version, code, sequences, bounds = _HEADER.unpack_from(raw)
    if version != 1 or code not in _AS:
        kind = np.dtype(_TYPES[code]).name if code in _TYPES else f"of an unknown type ({code})"
        raise DataError(
            f"{index}: version {version} with ids {kind}; what can be read is version 1 with ids "
            "uint8, int16, uint16 or int32"
        )
    dtype = np.dtype(_AS[code])
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    # A byte a sequence more: the modality of its ids, in newer files.
    if len(raw) not in (expected, expected + sequences):
        raise _mismatch(
            index, f"it has {len(raw)} bytes and its header asks for {expected}", "it is damaged"
        )
    at = _HEADER.size
    lengths = np.frombuffer(raw, "<i4", sequences, at).astype(np.int64)
    places = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", bounds, at + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    moved = np.flatnonzero(places != ends[:-1] * dtype.itemsize)
    if len(moved) or (lengths < 0).any():
        raise _mismatch(
            index,
            f"sequence {moved[0] if len(moved) else int(np.argmax(lengths < 0))} does not begin "
            "where the one before it ends",
            "it is damaged, or part of a larger set",
        )
    size = files.stamp(data).size
    if ends[-1] * dtype.itemsize != size:
        raise _mismatch(
            index,
            f"it counts {ends[-1]} tokens of {dtype.itemsize} bytes and {data} has {size} bytes",
            "one of them is another version or cut short",
        )
    whole = bounds > 0 and documents[0] == 0 and documents[-1] == sequences
    if not whole or (np.diff(documents) < 0).any():
        raise _mismatch(index, "its documents do not cover its sequences", "it is damaged")
    # Documents without a token are none.
    offsets = np.unique(ends[documents])
    if len(offsets) < 2:
        raise DataError(f"{data} holds no token; leave it out")
    return TokenFile(path=data, dtype=dtype, start=0, count=int(ends[-1]), offsets=offsets)


def plan(file: File, text_key: str) -> list[Piece]:
    """Runs of ids of about 16 MB."""
    del text_key
    return tokenfile.plan("megatron", file, open_tokens(file))


def read(piece: Piece, text_key: str, end: int) -> Iterator[Encoded]:
    """The documents of a piece, as the index has them."""
    del text_key, end
    return tokenfile.read(piece, open_tokens(piece.file), -1)


def _mismatch(index: str, what: str, why: str) -> DataError:
    return DataError(f"{index} does not match its .bin: {what}; {why}: fetch or write both again")
