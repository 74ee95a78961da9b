"""Columns of Arrow tables as records: what Parquet files and Hugging Face datasets share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpar.data.errors import DataError
from jaxpar.data.formats.text import not_utf8
from jaxpar.data.records import fields

ROWS = 512
"""Rows that are in memory at once: documents of a megabyte are rare, and then fit still."""


def columns(schema: pa.Schema, text_key: str, path: str) -> tuple[str, ...]:
    """The columns to read of a table.

    Raises:
        DataError: none fits, or one has a type that holds neither text nor ids.
    """
    names = fields(schema.names, text_key, path)
    for name in names:
        kind = schema.field(name).type
        ids = name != text_key and name not in ("prompt", "completion")
        if not (_is_list(kind) if ids else _is_text(kind)):
            wanted = "lists of integers" if ids else "text"
            raise DataError(f"{path}: column {name!r} is {kind}; it must be {wanted}")
    return names


def records(table: pa.Table, names: tuple[str, ...], where: Callable[[int], str]) -> list[Any]:
    """The rows of a table as texts, where there is one column of them, or as dicts.

    Raises:
        DataError: names the row of a text that is not UTF-8.
    """
    whole = [_values(table.column(name), where) for name in names]
    if len(names) == 1 and _is_text(table.column(names[0]).type):
        # A null must reach the encoder as a field, which can be named.
        return [v if isinstance(v, str) else {names[0]: v} for v in whole[0]]
    return [dict(zip(names, row, strict=True)) for row in zip(*whole, strict=True)]


def _values(column: pa.ChunkedArray, where: Callable[[int], str]) -> list[Any]:
    if _is_list(column.type) and not column.null_count:
        return list(_arrays(column))
    try:
        values = column.to_pylist()
    except UnicodeDecodeError as error:
        row = next(i for i, value in enumerate(column) if not _decodes(value))
        raise not_utf8(where(row), error) from error
    for row, value in enumerate(values):
        if isinstance(value, bytes):
            try:
                values[row] = value.decode()
            except UnicodeDecodeError as error:
                raise not_utf8(where(row), error) from error
    return values


def _arrays(column: pa.ChunkedArray) -> Iterator[Any]:
    """Lists of integers as numpy arrays on the table's own memory, where no integer is null."""
    for chunk in column.chunks:
        flat = chunk.flatten()
        if flat.null_count:
            yield from chunk.to_pylist()
            continue
        ids = flat.to_numpy(zero_copy_only=False)
        ends = np.cumsum(
            pc.call_function("list_value_length", [chunk]).to_numpy(zero_copy_only=False)
        )
        for start, stop in itertools.pairwise([0, *ends.tolist()]):
            yield ids[start:stop]


def _decodes(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(test(kind) for test in lists):
        return False
    return pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
