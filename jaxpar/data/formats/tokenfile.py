"""Files of ready token ids: as a memory map, or copied in pieces where there are several.

A single local file is mapped as it is. Several become one array only by being copied into the
token cache, which takes pieces as every other format does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from jaxpar.data import files, streams
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats.pieces import Encoded, Piece

_CHUNK = 1 << 20
"""Tokens that are copied at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Ids in a file.

    Attributes:
        path: the .bin file.
        dtype: of an id, little-endian and unsigned.
        start: bytes before the first id.
        count: ids.
        offsets: where documents begin, and the end; None where only end tokens say so.
    """

    path: str
    dtype: np.dtype
    start: int
    count: int
    offsets: Int64[np.ndarray, " documents+1"] | None

    def mapped(self) -> np.ndarray:
        """All ids, (tokens,), on the file itself.

        Raises:
            DataError: the file cannot be mapped.
        """
        try:
            ids = np.memmap(self.path, self.dtype, "r", offset=self.start, shape=(self.count,))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {self.path} into memory: {error}") from error
        # A plain array on the map: slices of the subclass cost several times as much.
        return ids.view(np.ndarray)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids `start` to `stop`.

        Raises:
            DataError: the file cannot be read, or became shorter.
        """
        size = self.dtype.itemsize
        parts = streams.blocks(self.path, self.start + start * size, self.start + stop * size)
        return np.frombuffer(b"".join(parts), self.dtype)

    def document_ends(self, end: int) -> tuple[Int64[np.ndarray, " documents+1"], int]:
        """Where documents begin, and the largest id: one pass over the file.

        Args:
            end: id behind which a new document begins; -1 for none.
        """
        found: list[np.ndarray] = []
        largest = 0
        ids = self.mapped()
        for start in range(0, self.count, streams.PIECE):
            chunk = ids[start : start + streams.PIECE]
            largest = max(largest, int(chunk.max()))
            found.append(np.flatnonzero(chunk == end) + (start + 1))
        ends = np.concatenate(found)
        return np.unique(np.concatenate([[0], ends, [self.count]])).astype(np.int64), largest


def plan(kind: str, file: File, tokens: TokenFile) -> list[Piece]:
    """Runs of ids of about 16 MB."""
    step = streams.PIECE // tokens.dtype.itemsize
    return [
        Piece(
            kind=kind,
            file=file,
            start=start,
            stop=min(start + step, tokens.count),
            size=(min(start + step, tokens.count) - start) * tokens.dtype.itemsize,
            last=start + step >= tokens.count,
        )
        for start in range(0, tokens.count, step)
    ]


def read(piece: Piece, tokens: TokenFile, end: int) -> Iterator[Encoded]:
    """The documents of a piece, some ids at a time."""
    for start in range(piece.start, piece.stop, _CHUNK):
        stop = min(start + _CHUNK, piece.stop)
        ids = tokens.read(start, stop)
        if tokens.offsets is None:
            ends = np.flatnonzero(ids == end) + 1
        else:
            low, high = np.searchsorted(tokens.offsets, (start, stop), side="right")
            ends = tokens.offsets[low:high] - start
        cuts = np.unique(np.concatenate([[0], ends, [len(ids)]]))
        finished = stop == tokens.count or (len(ends) > 0 and ends[-1] == len(ids))
        yield Encoded(ids, np.diff(cuts).astype(np.int64), unfinished=not finished)


def count_of(file: File, dtype: np.dtype, start: int) -> int:
    """Ids in a file, by its size.

    Raises:
        DataError: it is not a whole number.
    """
    size = files.stamp(file.path).size - start
    if size <= 0 or size % dtype.itemsize:
        raise DataError(
            f"{file.path} holds {size} bytes of tokens, which is no whole number of {dtype.name}; "
            "fetch or write it again (a text file needs another suffix than .bin)"
        )
    return size // dtype.itemsize
