"""Rows of a store in each packing: given numbers of rows, their tokens, targets and documents.

```
documents      a0 a1 a2 | b0 b1 | c0 c1 c2 c3        seq = 4, . is -100, 0 in segments is padding

stream         tokens   a0 a1 a2 b0   b1 c0 c1 c2    one text, documents see each other
               targets  a1 a2 b0 b1   c0 c1 c2 c3

concatenate    tokens   a0 a1 a2 b0   b1 c0 c1 c2    one text cut into rows, documents kept apart
               targets  a1 a2 .  b1   .  c1 c2 c3
               positions 0 1  2  0    0  0  1  2
               segments  1 1  1  2    1  2  2  2

best_fit       tokens   c0 c1 c2 b0   a0 a1 .. ..    whole documents where they fit (best_fit.py)
               targets  c1 c2 c3 b1   a1 a2 .  .
               positions 0 1  2  0    0  1  0  0
               segments  1 1  1  2    1  1  0  0
```

A row is a dict of arrays: tokens, targets, and for packed rows positions and segments, each
(rows, seq) int32. Only the rows that are asked for are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int

from jaxpar.data.best_fit import Plan
from jaxpar.data.errors import DataError
from jaxpar.data.store import TokenStore

IGNORED = -100
"""Target that the loss leaves out."""

Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Rows of one source."""

    store: TokenStore
    seq: int
    packed: bool
    """Whether there are positions and segments."""

    def __len__(self) -> int:
        """Rows an epoch."""
        ...

    def read(self, rows: Int[np.ndarray, " n"]) -> Batch:
        """These rows, in this order."""
        ...


class Stream:
    """Windows over all text: window w is tokens ``w * seq`` to ``(w + 1) * seq``, targets one later.

    Args:
        tail: whether the last window may be filled up; else the tail is left out.

    Raises:
        DataError: fewer tokens than one window needs.
    """

    packed = False

    def __init__(self, store: TokenStore, seq: int, *, tail: bool = False):
        self.store, self.seq = store, seq
        pairs = max(len(store.tokens) - 1, 0)
        self._count = math.ceil(pairs / seq) if tail else pairs // seq
        if not self._count:
            need = "give one target" if tail else f"fill one window of {seq} + 1"
            raise DataError(
                f"{store.name}: {len(store.tokens)} tokens do not {need}; give more text"
                + ("" if tail else ", or a shorter data.sequence")
            )
        self._tokens, self._mask = _plain(store)

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Int[np.ndarray, " n"]) -> Batch:
        """tokens and targets, which may be views of one array."""
        shape = (len(rows), self.seq + 1)
        span = np.zeros(shape, np.int32)
        starts = rows * self.seq
        _copy(self._tokens, span, starts)
        tokens, targets = span[:, :-1], span[:, 1:]
        if self._mask is not None:
            mask = np.zeros(shape, np.uint8)
            _copy(self._mask, mask, starts)
            targets = np.where(mask[:, 1:], targets, np.int32(IGNORED))
        filled = len(self._tokens) - 1 - starts
        if filled.min(initial=self.seq) < self.seq:
            real = np.arange(self.seq) < filled[:, None]
            tokens, targets = np.where(real, tokens, 0), np.where(real, targets, np.int32(IGNORED))
        return {"tokens": tokens, "targets": targets}


class Concatenated:
    """The stream of documents cut into rows of seq; the last row is filled up.

    A document that goes on in the next row is a new segment there, with positions from 0.

    Raises:
        DataError: no document has two tokens, or all of them are shorter than one row.
    """

    packed = True

    def __init__(self, store: TokenStore, seq: int, *, tail: bool = False):
        self.store, self.seq = store, seq
        _check_packed(store, 2 if tail else seq)
        self._tokens, self._mask = _plain(store)
        self._offsets = np.asarray(store.offsets)
        # The very last token ends a document: as an input it would have no target.
        self._count = math.ceil((len(self._tokens) - 1) / seq)

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Int[np.ndarray, " n"]) -> Batch:
        """tokens, targets, positions, segments."""
        offsets = self._offsets
        begin = rows * self.seq
        end = np.minimum(begin + self.seq, len(self._tokens))
        first = np.searchsorted(offsets, begin, side="right") - 1
        counts = np.searchsorted(offsets, end, side="left") - first
        line = np.repeat(np.arange(len(rows)), counts)
        document = np.arange(len(line)) + (first - (np.cumsum(counts) - counts))[line]
        until = offsets[document + 1]
        start = np.maximum(offsets[document], begin[line])
        stop = np.minimum(until, end[line])
        if (stop == start).any():  # documents without a token
            some = stop > start
            line, start, stop, until = line[some], start[some], stop[some], until[some]
            counts = np.bincount(line, minlength=len(rows))
        pieces = _Pieces(
            counts=counts,
            at=start + (self.seq * np.arange(len(rows)) - begin)[line],
            start=start,
            length=stop - start,
            room=self.seq - (end - begin),
            closed=stop == until,
        )
        arrays = [stored for stored in (self._tokens, self._mask) if stored is not None]
        copies = [np.zeros((len(rows), self.seq), stored.dtype) for stored in arrays]
        for stored, copy in zip(arrays, copies, strict=True):
            _copy(stored, copy, begin)
        return _packed(arrays, copies, pieces)


class BestFit:
    """The rows of a `Plan`.

    Raises:
        DataError: as `Concatenated`.
    """

    packed = True

    def __init__(self, store: TokenStore, seq: int, plan: Plan):
        self.store, self.seq = store, seq
        _check_packed(store, seq)
        self._tokens, self._mask = _plain(store)
        self._first, self._start = np.asarray(plan.first), np.asarray(plan.start)
        self._length = np.asarray(plan.length)
        self._filled = np.add.reduceat(self._length, self._first[:-1])

    def __len__(self) -> int:
        return len(self._first) - 1

    def read(self, rows: Int[np.ndarray, " n"]) -> Batch:
        """tokens, targets, positions, segments."""
        first = self._first[rows]
        counts = self._first[rows + 1] - first
        heads = np.cumsum(counts) - counts
        which = np.arange(counts.sum()) + np.repeat(first - heads, counts)
        start, length = self._start[which], self._length[which]
        room = self.seq - self._filled[rows]
        before = np.cumsum(length) - length
        pieces = _Pieces(
            counts=counts,
            at=before + np.repeat(np.cumsum(room) - room, counts),
            start=start,
            length=length,
            room=room,
            closed=None,
        )
        arrays = [stored for stored in (self._tokens, self._mask) if stored is not None]
        copies = [_join(stored, pieces, self.seq) for stored in arrays]
        return _packed(arrays, copies, pieces)


def gather(sources: Sequence[Rows], source: np.ndarray, row: np.ndarray) -> Batch:
    """One row of one source for each entry; a source of -1 is a row without a target.

    Args:
        source: (rows,) index into `sources`, or -1.
        row: (rows,) index of its row.
    """
    if len(sources) == 1 and source.min(initial=0) == 0:
        return sources[0].read(row)
    shape = (len(source), sources[0].seq)
    batch = {"tokens": np.zeros(shape, np.int32), "targets": np.full(shape, IGNORED, np.int32)}
    if sources[0].packed:
        batch |= {"positions": np.zeros(shape, np.int32), "segments": np.zeros(shape, np.int32)}
    for which, rows in enumerate(sources):
        here = source == which
        if here.any():
            for name, part in rows.read(row[here]).items():
                batch[name][here] = part
    return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Parts of documents in the rows of a batch, in order, none empty, at least one a row.

    Attributes:
        counts: pieces of each row.
        at: place of the first token in the flat batch, row * seq + position.
        start: place of the first token in the store.
        length: tokens.
        room: padding at the end of each row.
        closed: whether the document ends with the piece: its last token has no target. None: never.
    """

    counts: Int[np.ndarray, " rows"]
    at: Int[np.ndarray, " pieces"]
    start: Int[np.ndarray, " pieces"]
    length: Int[np.ndarray, " pieces"]
    room: Int[np.ndarray, " rows"]
    closed: Bool[np.ndarray, " pieces"] | None


def _packed(stored: list[np.ndarray], copies: list[np.ndarray], pieces: _Pieces) -> Batch:
    """A batch.

    Args:
        stored: tokens of the store and, where there is one, its mask.
        copies: of each, what the rows hold, (rows, seq), 0 in padding.
    """
    copy, rows, seq = copies[0], *copies[0].shape
    tokens, targets = copy.astype(np.int32), np.empty((rows, seq), np.int32)
    # Not from `tokens`: between two arrays of 32 bits that lie alike in their pages, a copy that is
    # shifted by one runs at a tenth of the speed (each load waits for the store before it).
    targets.ravel()[:-1] = copy.ravel()[1:]
    last = pieces.at + pieces.length - 1
    # A closed piece may end with the store; what is read for it does not count.
    after = np.minimum(pieces.start + pieces.length, len(stored[0]) - 1)
    targets.ravel()[last] = stored[0][after]
    if len(stored) > 1:
        mask = np.empty((rows, seq), bool)
        mask.ravel()[:-1] = copies[1].ravel()[1:]
        mask.ravel()[last] = stored[1][after]
        targets[~mask] = IGNORED
    if pieces.closed is not None:
        targets.ravel()[last[pieces.closed]] = IGNORED

    # Filled up to where the next piece begins, the padding of a row included: cleared below.
    width = np.empty(len(pieces.at), np.int64)
    np.subtract(pieces.at[1:], pieces.at[:-1], out=width[:-1])
    width[-1:] = rows * seq - pieces.at[-1:]
    heads = np.cumsum(pieces.counts) - pieces.counts
    nth = np.arange(1, len(width) + 1, dtype=np.int32)
    nth -= np.repeat(heads.astype(np.int32), pieces.counts)
    positions = np.repeat((pieces.at % seq).astype(np.int32), width).reshape(rows, seq)
    np.subtract(np.arange(seq, dtype=np.int32), positions, out=positions)
    batch = {
        "tokens": tokens,
        "targets": targets,
        "positions": positions,
        "segments": np.repeat(nth, width).reshape(rows, seq),
    }
    if pieces.room.any():
        ends = np.arange(1, rows + 1) * seq
        total = np.cumsum(pieces.room)
        place = np.arange(total[-1]) + np.repeat(ends - total, pieces.room)
        batch["targets"].ravel()[place] = IGNORED
        batch["positions"].ravel()[place] = 0
        batch["segments"].ravel()[place] = 0
    return batch


def _copy(stored: np.ndarray, out: np.ndarray, starts: Int[np.ndarray, " rows"]) -> None:
    """Fill row i of `out` from place ``starts[i]`` on, as far as there is something."""
    width = out.shape[1]
    for line, start in zip(out, starts.tolist(), strict=True):
        part = stored[start : start + width]
        line[: len(part)] = part


def _join(stored: np.ndarray, pieces: _Pieces, seq: int) -> np.ndarray:
    """The pieces, and zeros behind those of each row: (rows, seq)."""
    stop = pieces.start + pieces.length
    parts = [stored[a:b] for a, b in zip(pieces.start.tolist(), stop.tolist(), strict=True)]
    if pieces.room.any():
        ends = np.cumsum(pieces.counts)
        zeros = np.zeros(seq, stored.dtype)
        for row in np.flatnonzero(pieces.room)[::-1].tolist():  # from behind: places stay
            parts.insert(ends[row], zeros[: pieces.room[row]])
    # One call: what a call costs is most of the time that a short piece takes.
    return np.concatenate([stored[:0], *parts]).reshape(-1, seq)


def _plain(store: TokenStore) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens and mask as plain arrays: a slice of a memmap costs ten times as much."""
    mask = store.mask
    return np.asarray(store.tokens), None if mask is None else np.asarray(mask)


def _check_packed(store: TokenStore, least: int) -> None:
    tokens = len(store.tokens)
    if not (np.diff(store.offsets) > 1).any():
        raise DataError(f"{store.name}: no document of {len(store)} has two tokens; give more text")
    if tokens < least:
        raise DataError(
            f"{store.name}: {tokens} tokens do not fill one row of {least}; "
            "give more text, or a shorter data.sequence"
        )
