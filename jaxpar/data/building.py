"""Builds a token cache: pieces of files are encoded by several processes and joined in order.

```
pieces ─► tasks (about 16 MB) ─► workers ─► 000000.tokens  000000.lengths  (000000.mask)
                                            000001.tokens  ...
                                 join    ─► tokens  offsets  (mask)
```

What is written depends on the pieces alone, never on the number of workers. Memory is bounded by
what one batch of rows takes, times the workers.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxpar.data.errors import DataError
from jaxpar.data.files import is_private
from jaxpar.data.formats.pieces import Encoded, Piece, Rows, format_of
from jaxpar.data.records import Encoder
from jaxpar.data.streams import PIECE

TOKENS, OFFSETS, MASK = "tokens.bin", "offsets.bin", "mask.bin"

IN_PROCESS = 8 << 20
"""Bytes up to which no process is started: that costs more than it saves."""

_COPY = 8 << 20


@dataclasses.dataclass(frozen=True)
class Done:
    """What a worker wrote for one task.

    Attributes:
        tokens: how many.
        begun: documents of each piece; the first of the first one may have begun in an earlier
            task.
        masked: whether there is a mask.
        unfinished: whether the last document goes on in the next task.
        largest: largest id.
    """

    tokens: int
    begun: tuple[int, ...]
    masked: bool
    unfinished: bool
    largest: int


@dataclasses.dataclass(frozen=True)
class Built:
    """What is in the folder.

    Attributes:
        tokens, documents: how many.
        masked: whether there is a mask.
        first: index of the first document of each file.
        largest: largest id.
    """

    tokens: int
    documents: int
    masked: bool
    first: tuple[int, ...]
    largest: int


def tasks_of(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Runs of pieces of about 16 MB: many small files are one task, a large one is many."""
    tasks: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if size and size + piece.size > PIECE:
            tasks.append([])
            size = 0
        tasks[-1].append(piece)
        size += piece.size
    return tasks


def build(
    folder: Path,
    pieces: Sequence[Piece],
    encoder: Encoder,
    *,
    end: int,
    workers: int | None,
    advance: Callable[[int], None],
) -> Built:
    """Write tokens, offsets and, where something is not trained on, a mask.

    Args:
        folder: empty.
        pieces: of all files, in order.
        encoder: of rows.
        end: for formats that are tokens already: the id that ends a document; -1 for none.
        workers: processes; None for one a core.
        advance: told of bytes that are done.

    Raises:
        DataError: names file and row of what cannot be used.
        OSError: the folder cannot be written.
    """
    tasks = tasks_of(pieces)
    size = sum(piece.size for piece in pieces)
    count = min(len(tasks), workers or _cores())
    # What only this process sees cannot be read by another.
    alone = size < IN_PROCESS or any(is_private(piece.file.path) for piece in pieces)
    run = _here if count == 1 or alone else _in_processes
    done: dict[int, Done] = {}
    for number, result in run(folder, tasks, encoder, end, count):
        done[number] = result
        advance(sum(piece.size for piece in tasks[number]))
    return _join(folder, tasks, [done[i] for i in range(len(tasks))], encoder.dtype)


def _cores() -> int:
    # Containers and batch systems often give fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _here(
    folder: Path, tasks: list[list[Piece]], encoder: Encoder, end: int, count: int
) -> Iterator[tuple[int, Done]]:
    del count
    for number, pieces in enumerate(tasks):
        yield number, encode_task(folder, number, pieces, encoder, end)


def _in_processes(
    folder: Path, tasks: list[list[Piece]], encoder: Encoder, end: int, count: int
) -> Iterator[tuple[int, Done]]:
    pool = concurrent.futures.ProcessPoolExecutor(
        count,
        # A fork would copy the threads of JAX in a state that nobody can use.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(encoder, end),
    )
    try:
        number = {
            pool.submit(_work, folder, number, pieces): number
            for number, pieces in enumerate(tasks)
        }
        for future in concurrent.futures.as_completed(number):
            yield number[future], future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises ended without a word; the system may have ended it for "
            "memory (fewer data.workers need less), or the script that started it runs again when "
            "it is imported: put its work under if __name__ == '__main__'"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Encoder, int] | None = None
"""What a worker process encodes with; set once when it begins, so that it travels only once."""


def _begin(encoder: Encoder, end: int) -> None:
    global _worker
    _worker = encoder, end
    # Ctrl-C reaches every process; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker is one thread of work; the library would start one a core in each of them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    # When the first process is killed, a worker would wait for its next task for ever.
    threading.Thread(target=follow, daemon=True, name="follow").start()


def _work(folder: Path, number: int, pieces: list[Piece]) -> Done:
    assert _worker is not None
    return encode_task(folder, number, pieces, *_worker)


def encode_task(folder: Path, number: int, pieces: list[Piece], encoder: Encoder, end: int) -> Done:
    """Encode some pieces into part files of `folder`.

    Raises:
        DataError: names file and row of what cannot be used.
        OSError: the folder cannot be written.
    """
    with _Part(folder, number, encoder.dtype) as part:
        for piece in pieces:
            part.begin()
            for some in format_of(piece.kind).read(piece, encoder.text_key, end):
                part.add(encoder(some) if isinstance(some, Rows) else some)
        return part.done()


class _Part:
    """Part files of one task."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype) -> None:
        self._paths = _paths(folder, number)
        self._dtype = dtype
        self._stack = contextlib.ExitStack()
        self._open = {name: self._opened(name) for name in ("tokens", "lengths")}
        self._tokens = self._largest = 0
        self._begun: list[int] = []
        self._last: int | None = None
        """Length of a document that goes on."""

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _opened(self, name: str) -> BinaryIO:
        return self._stack.enter_context(open(self._paths[name], "wb"))

    def begin(self) -> None:
        """The next documents are of another piece."""
        self._begun.append(0)

    def add(self, some: Encoded) -> None:
        """Write some documents."""
        count = len(some.tokens)
        self._open["tokens"].write(some.tokens.astype(self._dtype, copy=False).data)
        if count:
            self._largest = max(self._largest, int(some.tokens.max()))
        if some.mask is not None and "mask" not in self._open:
            self._open["mask"] = self._opened("mask")
            _ones(self._open["mask"], self._tokens)
        if "mask" in self._open:
            if some.mask is None:
                _ones(self._open["mask"], count)
            else:
                self._open["mask"].write(np.ascontiguousarray(some.mask).data)
        self._tokens += count
        lengths = some.lengths.astype(np.int64)
        begun = len(lengths)
        if self._last is not None and begun:
            lengths[0] += self._last
            begun -= 1
            self._last = None
        self._begun[-1] += begun
        if some.unfinished and len(lengths):
            self._last = int(lengths[-1])
            lengths = lengths[:-1]
        self._open["lengths"].write(lengths.data)

    def done(self) -> Done:
        """Finish the files."""
        unfinished = self._last is not None
        if unfinished:
            self._open["lengths"].write(np.array([self._last], np.int64).data)
        for file in self._open.values():
            file.flush()
        return Done(
            tokens=self._tokens,
            begun=tuple(self._begun),
            masked="mask" in self._open,
            unfinished=unfinished,
            largest=self._largest,
        )


def _paths(folder: Path, number: int) -> dict[str, Path]:
    return {name: folder / f"{number:06d}.{name}" for name in ("tokens", "lengths", "mask")}


def _ones(file: BinaryIO, count: int) -> None:
    block = b"\x01" * min(count, _COPY)
    while count > 0:
        file.write(block[:count])
        count -= len(block)


def _join(folder: Path, tasks: list[list[Piece]], done: list[Done], dtype: np.dtype) -> Built:
    """One file of the part files of all tasks, in order; each is deleted when it is copied."""
    masked = any(part.masked for part in done)
    lengths: list[np.ndarray] = []
    first: list[int] = []
    documents = 0
    goes_on = False
    last_file = None
    with open(folder / TOKENS, "wb") as tokens, open(folder / MASK, "wb") as mask:
        for number, (pieces, part) in enumerate(zip(tasks, done, strict=True)):
            paths = _paths(folder, number)
            _append(tokens, paths["tokens"])
            if part.masked:
                _append(mask, paths["mask"])
            elif masked:
                _ones(mask, part.tokens)
            some = np.fromfile(paths["lengths"], np.int64)
            paths["lengths"].unlink()
            begun = list(part.begun)
            if goes_on:
                lengths[-1][-1] += some[0]
                some = some[1:]
                begun[0] -= 1
            if len(some):
                lengths.append(some)
            goes_on = part.unfinished
            for piece, more in zip(pieces, begun, strict=True):
                if piece.file != last_file:
                    first.append(documents)
                    last_file = piece.file
                documents += more
    if not masked:
        (folder / MASK).unlink()
    if not documents:
        raise DataError(f"{tasks[0][0].file.path} holds no record; leave it out")
    offsets = np.zeros(documents + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    offsets.tofile(folder / OFFSETS)
    return Built(
        tokens=sum(part.tokens for part in done),
        documents=documents,
        masked=masked,
        first=tuple(first),
        largest=max(part.largest for part in done),
    )


def _append(target: BinaryIO, path: Path) -> None:
    with open(path, "rb") as source:
        while block := source.read(_COPY):
            target.write(block)
    path.unlink()
