"""Folders that the `datasets` library saved (`Dataset.save_to_disk`); needs the extra `hf`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from jaxpar.data import files, streams
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats import tables
from jaxpar.data.formats.pieces import Piece, Rows
from jaxpar.data.tokenizers import optional


def is_saved(path: str) -> bool:
    """Whether a folder is a saved dataset.

    Raises:
        DataError: it is a folder of several splits, of which one must be named.
    """
    splits = files.join(path, "dataset_dict.json")
    if files.exists(splits):
        try:
            names = json.loads(files.read(splits))["splits"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{splits} is not what datasets writes: {error}") from error
        raise DataError(
            f"{path} holds the splits {', '.join(names)}; name one, such as "
            f"{files.join(path, names[0])}"
        )
    return all(files.exists(files.join(path, n)) for n in ("state.json", "dataset_info.json"))


def saved(path: str) -> File:
    """The folder as one file.

    Raises:
        DataError: a part of it cannot be read.
    """
    parts = files.below(path)
    size = sum(files.stamp(part).size for part in parts)
    return File(path.rstrip("/").rpartition("/")[2], path, size, tuple(parts))


def plan(file: File, text_key: str) -> list[Piece]:
    """Runs of rows of about 16 MB."""
    dataset = _load(file)
    if not len(dataset):
        raise DataError(f"{file.path} holds no row; leave it out")
    tables.columns(dataset.features.arrow_schema, text_key, file.path)
    step = max(1, streams.PIECE * len(dataset) // max(1, file.size))
    return [
        Piece(
            kind="huggingface",
            file=file,
            start=start,
            stop=min(start + step, len(dataset)),
            row=start,
            size=file.size * (min(start + step, len(dataset)) - start) // len(dataset),
            last=start + step >= len(dataset),
        )
        for start in range(0, len(dataset), step)
    ]


def read(piece: Piece, text_key: str, end: int) -> Iterator[Rows]:
    """The rows of a piece, some at a time."""
    del end
    path = piece.file.path
    dataset = _load(piece.file)
    names = tables.columns(dataset.features.arrow_schema, text_key, path)
    dataset = dataset.select_columns(list(names)).with_format("arrow")
    for start in range(piece.start, piece.stop, tables.ROWS):

        def where(i: int, start: int = start) -> str:
            return f"{path}, row {start + i + 1}"

        try:
            table = dataset[start : min(start + tables.ROWS, piece.stop)]
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from error
        yield Rows(tables.records(table, names, where), where)


def _load(file: File) -> Any:
    library = optional("datasets", f"{file.path} is a Hugging Face dataset on disk")
    try:
        return library.load_from_disk(file.path)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _damaged(file.path, error) from error


def _damaged(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(
        f"{path} is not a whole dataset on disk: {reason}; save it again with save_to_disk"
    )
