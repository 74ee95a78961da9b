"""Several sources in one order: which source serves a place, and which of its rows.

```
weights {a: 3, b: 1}, a cycle of 8 places (4096 in truth): 6 of a, 2 of b, shuffled anew each cycle

place    0 1 2 3 4 5 6 7 | 8 9 ...
source   a a b a a a b a | a b ...
nth      0 1 0 2 3 4 1 5 | 6 2 ...      the nth row that this source serves: no gap, no repeat
row      shuffled(nth) in that source, which thus goes through epochs of its own
```

Counts within a cycle are integers, so the nth of a place is a product and a table of one cycle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxpar.data.order import derive, shuffled

CYCLE = 4096
"""Places over which shares are exact: off by less than 1/4096, and no source by less than that."""

_CHOICE = -1
"""Label of the seed that decides which source serves a place; sources have labels from 0."""

_KEPT = 16
"""Cycles whose tables are kept: batches that straddle two, from several threads."""


class Order:
    """The endless order of the rows of all sources.

    Args:
        sizes: rows of each source.
        weights: how often each is read, up to a factor; every weight above 0.
        seed: another seed is another order.

    Raises:
        ValueError: more sources than places in a cycle.
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float], seed: int):
        self.sizes = tuple(sizes)
        self.counts = shares(weights, CYCLE)
        self.seed = seed
        self._kept = functools.lru_cache(maxsize=_KEPT)(self._cycle)

    def at(self, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n 2"]:
        """(source, row) at each place, counted from 0 at the beginning of training."""
        cycles, within = np.divmod(places, CYCLE)
        if len(places) and cycles.min() == cycles.max():
            return self._kept(int(cycles[0]))[within]
        out = np.empty((len(places), 2), np.int64)
        for cycle in np.unique(cycles):
            here = cycles == cycle
            out[here] = self._kept(int(cycle))[within[here]]
        return out

    def _cycle(self, cycle: int) -> Int[np.ndarray, "cycle 2"]:
        table = np.zeros((CYCLE, 2), np.int64)
        if len(self.sizes) > 1:
            owners = np.repeat(np.arange(len(self.sizes)), self.counts)
            places = np.arange(cycle * CYCLE, (cycle + 1) * CYCLE)
            order = shuffled(places, size=CYCLE, seed=derive(self.seed, _CHOICE))
            table[:, 0] = owners[order]
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            nth = np.arange(cycle * count, (cycle + 1) * count)
            rows = shuffled(nth, size=size, seed=derive(self.seed, source))
            table[table[:, 0] == source, 1] = rows
        table.flags.writeable = False  # shared by every caller
        return table


def shares(weights: Sequence[float], cycle: int) -> tuple[int, ...]:
    """How many places of a cycle each weight gets: largest remainder, and at least one.

    Raises:
        ValueError: more weights than places.

    >>> shares([3, 1], 8)
    (6, 2)
    >>> shares([1, 1, 1], 8)
    (3, 3, 2)
    >>> shares([1, 1e-9], 8)
    (7, 1)
    """
    if len(weights) > cycle:
        raise ValueError(f"a mixture of {len(weights)} sources; at most {cycle} can be mixed")
    exact = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64) * cycle
    counts = np.floor(exact).astype(np.int64)
    rest = exact - counts
    counts[np.argsort(-rest, kind="stable")[: cycle - counts.sum()]] += 1
    for none in np.flatnonzero(counts == 0):
        counts[np.argmax(counts)] -= 1
        counts[none] = 1
    return tuple(counts.tolist())
