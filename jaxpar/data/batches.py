"""Training batches: rows of all sources, in an order that is a function of seed and step alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxpar.data.mixture import Order
from jaxpar.data.packing import Batch, Rows, gather

TOGETHER = 2**19
"""Tokens that are read at a time: what a call costs is little beside that, and so is the memory."""

_MOST = 16
"""Steps that are read at a time: what is made ahead of a tiny batch stays little, too."""


class TrainBatches:
    """Training batches without end.

    Row r of batch s is place ``s * rows + r`` of `Order`, whichever process asks for it.

    Args:
        sources: rows of each source; all packed, or none.
        weights: how often each source is read, up to a factor.
        rows: rows a batch, over all devices.
        seed: another seed is another order.
        vocab: ids run from 0 to vocab - 1.

    Raises:
        DataError: a token id outside the vocabulary, by file and row.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        *,
        rows: int,
        seed: int,
        vocab: int,
        weights: Sequence[float] | None = None,
    ):
        for source in sources:
            source.store.check_vocab(vocab)
        self.sources = tuple(sources)
        self.rows = rows
        self.order = Order(
            [len(source) for source in sources], weights=weights or [1] * len(sources), seed=seed
        )

    def ids(self, step: int, rows: slice | np.ndarray | None = None) -> Int[np.ndarray, "rows 2"]:
        """(source, row of that source) of each row of batch `step`: what is read."""
        return self.order.at(self._places(step, rows))

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """Batch `step`.

        Args:
            rows: the rows of the batch that are wanted, all by default. Nothing else is read.

        Returns:
            tokens, targets (rows, seq) int32, the target -100 where there is none; row_id (rows,)
            int32, a row's place in the endless order modulo 2**31; of packed rows also positions and
            segments (rows, seq) int32, see `jaxpar.data.packing`.
        """
        return self.batches([step], rows)[0]

    def batches(self, steps: Sequence[int], rows: slice | np.ndarray | None = None) -> list[Batch]:
        """`batch` of each of these steps, read together; parts of the same arrays."""
        places = np.concatenate([self._places(step, rows) for step in steps])
        source, row = self.order.at(places).T
        read = gather(self.sources, source, row)
        read["row_id"] = (places % 2**31).astype(np.int32)
        count = len(places) // len(steps)
        return [
            {name: x[n * count : (n + 1) * count] for name, x in read.items()}
            for n in range(len(steps))
        ]

    def together(self, rows: int) -> int:
        """How many steps it pays to read together where `rows` rows of each are read."""
        return min(max(1, TOGETHER // (rows * self.sources[0].seq)), _MOST)

    def _places(self, step: int, rows: slice | np.ndarray | None) -> Int[np.ndarray, " rows"]:
        every = np.arange(step * self.rows, (step + 1) * self.rows)
        return every if rows is None else every[rows]
