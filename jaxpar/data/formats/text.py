"""Text files: one file is one document, of any size, read in bounded memory.

Files of more than `BIG` bytes are worked on in several pieces cut at line ends; a merge of tokens
over such a cut is lost, and the document is still one.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterator

from jaxpar.data import streams, tokenizers
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats.pieces import Piece, Rows

BIG = 64 << 20


def plan(file: File, text_key: str) -> list[Piece]:
    """One piece, or several of a big file."""
    del text_key
    cuts = [0, file.size]
    if file.size > BIG and not streams.compression(file.path):
        cuts = streams.line_cuts(file.path, file.size)
    return [
        Piece(
            kind="text", file=file, start=start, stop=stop, size=stop - start, last=stop == cuts[-1]
        )
        for start, stop in itertools.pairwise(cuts)
    ]


def read(piece: Piece, text_key: str, end: int) -> Iterator[Rows]:
    """The text in parts as `tokenizers.cut` makes them of the whole piece."""
    del text_key, end
    longest = tokenizers.LONGEST
    text, anything = "", False
    for block in _decoded(piece):
        text, at = text + block, 0
        anything = anything or bool(block)
        while len(text) - at > longest:
            stop = tokenizers.piece_end(text, at, longest)
            yield Rows([text[at:stop]], _where(piece), unfinished=True)
            at = stop
        text = text[at:]
    if not anything:
        raise DataError(f"{piece.file.path} holds no text; leave it out")
    yield Rows([text], _where(piece), unfinished=not piece.last)


def _where(piece: Piece) -> Callable[[int], str]:
    return lambda row: piece.file.path


def _decoded(piece: Piece) -> Iterator[str]:
    path, done = piece.file.path, piece.start
    decoder = codecs.getincrementaldecoder("utf-8")()

    def decode(block: bytes, final: bool = False) -> str:
        held_back = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise not_utf8(path, error, done - held_back) from error

    for block in streams.blocks(path, piece.start, piece.stop):
        yield decode(block)
        done += len(block)
    yield decode(b"", final=True)


def not_utf8(where: str, error: UnicodeDecodeError, base: int = 0) -> DataError:
    """The error of bytes that are no text; their first one is at offset `base`."""
    return DataError(
        f"{where} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
        f"{base + error.start}; convert it, or leave it out"
    )
