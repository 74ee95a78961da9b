"""ArrayRecord files: a record is UTF-8 text, or a JSON object that holds it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxpar.data import files, streams
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats.pieces import Piece, Rows
from jaxpar.data.formats.text import not_utf8

_BATCH = 512
"""Records that are in memory at once."""


def plan(file: File, text_key: str) -> list[Piece]:
    """Runs of records of about 16 MB."""
    del text_key
    with _reader(file) as reader:
        count = reader.num_records()
    if not count:
        raise DataError(f"{file.path} holds no record; leave it out")
    step = max(1, streams.PIECE * count // file.size)
    return [
        Piece(
            kind="arrayrecord",
            file=file,
            start=start,
            stop=min(start + step, count),
            row=start,
            size=file.size * (min(start + step, count) - start) // count,
            last=start + step >= count,
        )
        for start in range(0, count, step)
    ]


def read(piece: Piece, text_key: str, end: int) -> Iterator[Rows]:
    """The records of a piece, some at a time."""
    del text_key, end
    path = piece.file.path
    with _reader(piece.file) as reader:
        for start in range(piece.start, piece.stop, _BATCH):
            stop = min(start + _BATCH, piece.stop)
            try:
                raw = reader.read(list(range(start, stop)))
            except (RuntimeError, ValueError, IndexError) as error:
                raise _damaged(path, error, f", in rows {start + 1} to {stop}") from error

            def where(i: int, start: int = start) -> str:
                return f"{path}, row {start + i + 1}"

            yield Rows([_value(record, where(i)) for i, record in enumerate(raw)], where)


def _value(record: bytes, where: str) -> Any:
    try:
        text = record.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from error
    if not text.lstrip().startswith("{"):
        return text
    # A text may begin with a brace as well: only what is an object in full is one.
    try:
        value = msgspec.json.decode(record)
    except msgspec.DecodeError:
        try:
            value = json.loads(text)
        except ValueError:
            return text
    return value if isinstance(value, dict) else text


@contextlib.contextmanager
def _reader(file: File) -> Iterator[Any]:
    try:
        library = importlib.import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise DataError(
            f"{file.path} is an ArrayRecord file, which needs the package array-record; there is "
            "none for this system: convert it to JSONL or Parquet where there is one"
        ) from error
    with _local(file.path) as path:
        reader = library.ArrayRecordReader(path)
        if not reader.ok():
            try:
                reader.close()  # says only now why the file cannot be read
            except RuntimeError as error:
                raise _damaged(file.path, error) from error
            raise _damaged(file.path, RuntimeError("no reason is given"))
        try:
            yield reader
        finally:
            # What went wrong has been said by `read` already.
            with contextlib.suppress(RuntimeError):
                reader.close()


@contextlib.contextmanager
def _local(path: str) -> Iterator[str]:
    """The file on this machine: the library reads no other."""
    if not files.is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        copy = os.path.join(folder, "copy")
        with files.opened(path) as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        yield copy


def _damaged(path: str, error: Exception, place: str = "") -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(
        f"{path} is not a whole ArrayRecord file{place}: {reason}; fetch or write it again"
    )
