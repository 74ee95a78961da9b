"""Which documents share a row: best-fit decreasing, as a table that is made once and kept.

```
documents  aaaaa bbb cc d         seq = 4, one token of each document is a target only
pieces     aaaa bb c              longest first, into the row with the least room that is enough
rows       aaaa | bbc.            first = 0 1 3, start = a0 b0 c0, length = 4 2 1
```

A document of n tokens has n - 1 pairs of an input and the token after it. It is cut into pieces of
at most `seq` pairs; a piece reads one token more than it has inputs, so that no target is lost at a
cut and none is trained on twice. Source: Ding et al., Fewer Truncations Improve Language Modeling,
ICML 2024 (arXiv:2404.10830).
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Int, Int32, Int64

from jaxpar.data import cache
from jaxpar.data.store import TokenStore

_VERSION = 1
"""Of the table: a change that moves any piece raises it, and old files are left aside."""


_ARRAYS = ("first", "start", "length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Pieces of every row.

    Attributes:
        first: the pieces of row r are ``first[r]`` to ``first[r + 1]`` (exclusive).
        start: index of a piece's first token.
        length: inputs of a piece, 1 to seq; the target of its last is the token after it.
    """

    first: Int64[np.ndarray, " rows+1"]
    start: Int64[np.ndarray, " pieces"]
    length: Int32[np.ndarray, " pieces"]

    def __len__(self) -> int:
        """Rows."""
        return len(self.first) - 1


def load_or_make(
    store: TokenStore, seq: int, *, folder: pathlib.Path, say: Callable[[str], None]
) -> Plan:
    """The plan of a store, from `folder` where it lies there whole, else made and left there.

    Args:
        folder: of plans, made if it is absent.
        say: told of a damaged plan, and of a wait for another process that makes it.

    Raises:
        DataError: the folder cannot be written.
    """
    text = f"{store.fingerprint} best_fit {seq} {_VERSION}"
    key = hashlib.sha256(text.encode()).hexdigest()[:32]

    def build(target: pathlib.Path) -> dict[str, int]:
        plan = make(store, seq)
        for name in _ARRAYS:
            np.save(target / f"{name}.npy", getattr(plan, name))
        return {"rows": len(plan), "pieces": len(plan.start), "sequence": seq}

    where, _ = cache.made(folder / key, build, say)
    return Plan(**{name: np.load(where / f"{name}.npy", mmap_mode="r") for name in _ARRAYS})


def make(store: TokenStore, seq: int) -> Plan:
    """The plan of a store; the same on every machine.

    Seconds for millions of documents: sorts, and a few array operations for each length.
    """
    start, length = cut(store, seq)
    row, rows = pack(length, seq)
    by_row = np.argsort(row, kind="stable")
    first = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=first[1:])
    return Plan(first=first, start=start[by_row], length=length[by_row])


def cut(
    store: TokenStore, seq: int
) -> tuple[Int64[np.ndarray, " pieces"], Int32[np.ndarray, " pieces"]]:
    """First token and number of inputs of every piece, in the order of the documents."""
    pairs = np.maximum(np.diff(store.offsets) - 1, 0)
    parts = -(-pairs // seq)
    document = np.repeat(np.arange(len(parts)), parts)
    done = seq * (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts))
    length = np.minimum(pairs[document] - done, seq).astype(np.int32)
    return store.offsets[document] + done, length


def pack(length: Int[np.ndarray, " pieces"], seq: int) -> tuple[Int64[np.ndarray, " pieces"], int]:
    """The row of every piece, and how many rows there are.

    Best-fit decreasing: each piece goes into the row with the least room that is enough. Pieces of
    one length go in together: a row that is the best fit for one of them stays the best fit for the
    next until it has no room for another, so a row with room c takes c // length of them.

    >>> row, rows = pack(np.array([2, 4, 1]), 4)
    >>> (row.tolist(), rows)
    ([1, 0, 1], 2)
    """
    # 16-bit keys are sorted by radix, in a time that is linear in the pieces.
    order = np.argsort(
        (seq - length).astype(np.uint16 if seq < 2**16 else np.uint32), kind="stable"
    )
    many = np.bincount(length, minlength=seq + 1).tolist()
    placed = np.empty(len(length), np.int64)  # rows of the pieces in `order`
    rooms = _Rooms(seq)
    at = 0
    for size in np.unique(length)[::-1].tolist():
        todo = many[size]
        while todo:
            room = rooms.least(size)
            fit = room // size
            rows = rooms.take(room, -(-todo // fit))
            taken = min(todo, fit * len(rows))
            placed[at : at + taken] = np.repeat(rows, fit)[:taken]
            full, rest = divmod(taken, fit)
            rooms.put(room - fit * size, rows[:full])
            if rest:
                rooms.put(room - rest * size, rows[full:])
            at += taken
            todo -= taken
    out = np.empty_like(placed)
    out[order] = placed
    return out, rooms.rows


class _Rooms:
    """Rows by the room that is left in them; a row that nothing is in has room `seq`."""

    def __init__(self, seq: int):
        self.seq = seq
        self.rows = 0
        self._kept: list[list[np.ndarray]] = [[] for _ in range(seq + 1)]
        self._some = 0  # bit c is set where a begun row has room c: finding the least is one shift

    def least(self, size: int) -> int:
        """The least room of at least `size`."""
        above = self._some >> size
        return size + (above & -above).bit_length() - 1 if above else self.seq

    def take(self, room: int, count: int) -> Int64[np.ndarray, " rows"]:
        """At least one row, at most `count`, with just that room; of none begun, new ones."""
        kept = self._kept[room]
        if not kept:
            self.rows += count
            return np.arange(self.rows - count, self.rows)
        rows = kept.pop()
        if len(rows) > count:
            kept.append(rows[count:])
            rows = rows[:count]
        if not kept:
            self._some &= ~(1 << room)
        return rows

    def put(self, room: int, rows: Int64[np.ndarray, " rows"]) -> None:
        """Keep rows for later; full ones are done with."""
        if room and len(rows):
            self._kept[room].append(rows)
            self._some |= 1 << room
