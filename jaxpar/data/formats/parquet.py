"""Parquet files: pieces are runs of row groups, of which only the columns that hold text are read."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from jaxpar.data import files, streams
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats import tables
from jaxpar.data.formats.pieces import Piece, Rows


def plan(file: File, text_key: str) -> list[Piece]:
    """Runs of row groups of about 16 MB; a row group is never cut."""
    with files.opened(file.path) as stream:
        table = _table(stream, file)
        names = tables.columns(table.schema_arrow, text_key, file.path)
        about = table.metadata
        if not about.num_rows:
            raise DataError(f"{file.path} holds no row; leave it out")
        pieces: list[Piece] = []
        start = row = rows = size = 0
        for group in range(about.num_row_groups):
            part = about.row_group(group)
            rows += part.num_rows
            size += sum(
                part.column(i).total_uncompressed_size
                for i in range(part.num_columns)
                if part.column(i).path_in_schema.split(".")[0] in names
            )
            last = group == about.num_row_groups - 1
            if size >= streams.PIECE or last:
                stop = group + 1
                pieces.append(
                    Piece(
                        kind="parquet",
                        file=file,
                        start=start,
                        stop=stop,
                        row=row,
                        size=size,
                        last=last,
                    )
                )
                start, row, rows, size = stop, row + rows, 0, 0
        return pieces


def read(piece: Piece, text_key: str, end: int) -> Iterator[Rows]:
    """The rows of a piece, some at a time."""
    del end
    path, row = piece.file.path, piece.row
    with files.opened(path) as stream:
        table = _table(stream, piece.file)
        names = tables.columns(table.schema_arrow, text_key, path)
        try:
            for batch in table.iter_batches(
                batch_size=tables.ROWS,
                row_groups=list(range(piece.start, piece.stop)),
                columns=list(names),
                use_threads=False,  # the processes are parallel already
            ):

                def where(i: int, row: int = row) -> str:
                    return f"{path}, row {row + i + 1}"

                if batch.num_rows:
                    part = pa.Table.from_batches([batch])
                    yield Rows(tables.records(part, names, where), where)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error, f", in the rows after row {row}") from error


def _table(stream: object, file: File) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file.path, error) from error


def _damaged(path: str, error: Exception, place: str = "") -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    return DataError(
        f"{path} is not a whole Parquet file{place}: {reason}; fetch or write it again"
    )
