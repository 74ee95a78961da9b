"""What a format hands over: pieces of files to read, rows to encode, and documents as tokens."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from jaxtyping import Int64, UInt, UInt8

from jaxpar.data.files import File


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a file that one process reads.

    Attributes:
        kind: name of the format's module.
        file: what it is a part of.
        start, stop: in the format's own unit: bytes, row groups, records, tokens.
        row: rows of the file before this piece, where the format knows.
        size: bytes to work on, about.
        last: whether the file ends here.
    """

    kind: str
    file: File
    start: int
    stop: int
    row: int = 0
    size: int
    last: bool = True


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a piece, in order, not yet encoded.

    Attributes:
        values: texts, or records (`jaxpar.data.records`).
        where: ``FILE, row N`` or ``FILE, line N`` of ``values[i]``.
        unfinished: whether the last value goes on in the next `Rows`.
    """

    values: Sequence[Any]
    where: Callable[[int], str]
    unfinished: bool = False


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Documents as tokens.

    Attributes:
        tokens: of all documents, one after the other.
        lengths: tokens of each, its end token included.
        mask: 0 where a token is not a target to train on; None where all are.
        unfinished: whether the last document goes on in the next `Encoded`.
    """

    tokens: UInt[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    mask: UInt8[np.ndarray, " tokens"] | None = None
    unfinished: bool = False


class Format(Protocol):
    """A module of `jaxpar.data.formats`."""

    def plan(self, file: File, text_key: str) -> list[Piece]:
        """The pieces of a file, in order; what they are depends on the file alone.

        Raises:
            DataError: the file cannot be used.
        """
        ...

    def read(self, piece: Piece, text_key: str, end: int) -> Iterator[Rows | Encoded]:
        """The rows of a piece, or its documents where they are tokens already.

        Args:
            piece: one that `plan` made.
            text_key: field of a record that holds the text.
            end: id of the tokenizer that ends a document; -1 for none.

        Raises:
            DataError: names file and row.
        """
        ...


def format_of(kind: str) -> Format:
    """The module of a kind; it is imported when it is first needed."""
    return cast(Format, importlib.import_module(f"jaxpar.data.formats.{kind}"))
