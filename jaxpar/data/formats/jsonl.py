"""JSON lines: a record a line, read in byte ranges that begin and end at line ends.

A compressed file is one piece, since nobody can begin in the middle of it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from jaxpar.data import streams
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats.pieces import Piece, Rows
from jaxpar.data.formats.text import not_utf8

_BATCH = 1 << 20
"""Bytes of lines that are encoded at once."""

_MARK = b"\xef\xbb\xbf"
"""Byte order mark, which Windows puts in front of UTF-8."""


def plan(file: File, text_key: str) -> list[Piece]:
    """Pieces of about 16 MB."""
    del text_key
    cuts = [0, file.size]
    if not streams.compression(file.path):
        cuts = streams.line_cuts(file.path, file.size)
    return [
        Piece(
            kind="jsonl",
            file=file,
            start=start,
            stop=stop,
            size=stop - start,
            last=stop == cuts[-1],
        )
        for start, stop in itertools.pairwise(cuts)
    ]


def read(piece: Piece, text_key: str, end: int) -> Iterator[Rows]:
    """The records of a piece; blank lines are passed over."""
    del text_key, end
    values: list[Any] = []
    numbers: list[int] = []
    size = 0
    nothing = True
    for number, line in enumerate(streams.lines(_blocks(piece))):
        if number == 0 and piece.start == 0:
            line = line.removeprefix(_MARK)
        if not line or line.isspace():
            continue
        values.append(_decoded(line, piece, number))
        numbers.append(number)
        size += len(line)
        if size >= _BATCH:
            yield Rows(values, _where(piece, numbers))
            values, numbers, size, nothing = [], [], 0, False
    if values:
        yield Rows(values, _where(piece, numbers))
    elif nothing and piece.start == 0 and piece.last:
        raise DataError(f"{piece.file.path} holds no record; leave it out")


def _blocks(piece: Piece) -> Iterator[bytes]:
    return streams.blocks(piece.file.path, piece.start, piece.stop)


def _where(piece: Piece, numbers: list[int]) -> Callable[[int], str]:
    return lambda i: _line(piece, numbers[i])


def _line(piece: Piece, number: int) -> str:
    """``FILE, line N`` of a line of the piece; those before it are counted only now."""
    before = 0
    if piece.start:
        before = sum(b.count(b"\n") for b in streams.blocks(piece.file.path, 0, piece.start))
    return f"{piece.file.path}, line {before + number + 1}"


def _decoded(line: bytes, piece: Piece, number: int) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as first:
        where = _line(piece, number)
        try:
            # Python's own reader takes NaN and lone surrogates, which others write.
            return json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise not_utf8(where, error) from error
        except (ValueError, RecursionError) as error:
            hint = "; give one object a line"
            if line.lstrip().startswith(b"[") and number == 0:
                hint = "; it looks like one JSON array over many lines: write one object a line"
            raise DataError(f"{where} is not JSON: {first}{hint}") from error
