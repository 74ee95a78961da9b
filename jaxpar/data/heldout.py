"""Evaluation batches: every target of every held-out document once, whatever the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxpar.data.packing import Batch, Rows, gather


class HeldOutBatches:
    """Held-out rows of all sources, one source after the other.

    Every process sees the same number of batches; the last is filled up with rows without a target,
    so a sum over targets divided by their number is the mean over all of them.

    Args:
        sources: rows of each source, their tails included; all packed, or none.
        rows: rows a batch, over all devices.
        vocab: ids run from 0 to vocab - 1.

    Raises:
        DataError: a token id outside the vocabulary, by file and row.
    """

    def __init__(self, sources: Sequence[Rows], *, rows: int, vocab: int):
        for source in sources:
            source.store.check_vocab(vocab)
        self.sources = tuple(sources)
        self.rows = rows
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        """Batches."""
        return math.ceil(int(self._ends[-1]) / self.rows)

    def batch(self, index: int, rows: slice | np.ndarray | None = None) -> Batch:
        """Batch `index` of ``len(self)``, as `TrainBatches.batch`; a row's id is its number.

        Raises:
            IndexError: there is no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"held-out batch {index}; there are {len(self)}")
        number = np.arange(index * self.rows, (index + 1) * self.rows)
        number = number if rows is None else number[rows]
        source = np.searchsorted(self._ends, number, side="right")
        row = number - np.append(0, self._ends)[source]
        source[source == len(self.sources)] = -1
        return {**gather(self.sources, source, row), "row_id": number.astype(np.int32)}
