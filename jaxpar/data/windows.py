"""Batches of one array of tokens, without documents: what `TrainBatches` of a `Stream` reads.

```
tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         seq = 4
window 0   tokens  t0 t1 t2 t3   targets t1 t2 t3 t4
window 1   tokens  t4 t5 t6 t7   targets t5 t6 t7 t8
```
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from jaxpar.data.errors import DataError
from jaxpar.data.order import shuffled
from jaxpar.data.packing import IGNORED, Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Training batches.

    Attributes:
        tokens: token ids, one-dimensional, any integer dtype.
        seq: tokens a window.
        rows: windows a batch, over all devices.
        seed: another seed is another order.
        vocab: ids run from 0 to vocab - 1.

    Raises:
        DataError: fewer tokens than one window needs.
    """

    tokens: Int[np.ndarray, " tokens"]
    seq: int
    rows: int
    seed: int
    vocab: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(
                f"{len(self.tokens)} tokens do not fill one window of {self.seq} + 1; "
                "give more text"
            )

    @property
    def count(self) -> int:
        """Windows an epoch: the tail that does not fill one is not trained on."""
        return (len(self.tokens) - 1) // self.seq

    def ids(self, step: int) -> Int[np.ndarray, " rows"]:
        """Indices of the windows in batch `step`."""
        places = step * self.rows + np.arange(self.rows)
        return shuffled(places, size=self.count, seed=self.seed)

    def batch(self, step: int) -> Batch:
        """Batch `step`: tokens and targets (rows, seq) int32, row_id (rows,) int32.

        A row's id is its place in the endless order, modulo 2**31.

        Raises:
            DataError: a token id outside the vocabulary, with its batch and row.
        """
        starts = self.ids(step) * self.seq
        span = self.tokens[starts[:, None] + np.arange(self.seq + 1)].astype(np.int32)
        row_id = ((step * self.rows + np.arange(self.rows)) % 2**31).astype(np.int32)
        batch = {"tokens": span[:, :-1], "targets": span[:, 1:], "row_id": row_id}
        check_tokens(batch, self.vocab, where=f"batch {step}")
        return batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Evaluation batches: every target once, in order.

    The last batch is filled up with targets that are ignored. Attributes are those of `Windows`.

    Raises:
        DataError: fewer than two tokens.
    """

    tokens: Int[np.ndarray, " tokens"]
    seq: int
    rows: int
    vocab: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise DataError(
                f"{len(self.tokens)} held-out tokens give no target to evaluate on; give more text"
            )

    def __len__(self) -> int:
        return math.ceil(math.ceil((len(self.tokens) - 1) / self.seq) / self.rows)

    def batch(self, index: int) -> Batch:
        """Batch `index` of ``len(self)``, shapes as in `Windows.batch`; a row's id is its window.

        Raises:
            DataError: a token id outside the vocabulary, with its batch and row.
        """
        size = self.rows * self.seq
        part = np.asarray(self.tokens[index * size : (index + 1) * size + 1]).astype(np.int32)
        tokens, targets = np.zeros(size, np.int32), np.full(size, IGNORED, np.int32)
        targets[: len(part) - 1] = part[1:]
        tokens[: len(part) - 1] = part[:-1]
        shape = (self.rows, self.seq)
        row_id = (index * self.rows + np.arange(self.rows)).astype(np.int32)
        batch = {
            "tokens": tokens.reshape(shape),
            "targets": targets.reshape(shape),
            "row_id": row_id,
        }
        check_tokens(batch, self.vocab, where=f"held-out batch {index}")
        return batch


def check_tokens(batch: Batch, vocab: int, *, where: str) -> None:
    """Refuse ids outside the vocabulary; targets may also be -100 (ignored).

    A lookup on a device would clamp them, or give NaN, and say nothing.

    Raises:
        DataError: the batch, row and position of the first bad id.
    """
    for name, extra in (("tokens", None), ("targets", IGNORED)):
        ids = batch[name]
        # Two reductions over a batch that is nearly always good cost less than a search.
        if ids.max(initial=0) < vocab and ids.min(initial=0) >= 0:
            continue
        bad = (ids < 0) | (ids >= vocab)
        if extra is not None:
            bad &= ids != extra
        if bad.any():
            row, position = np.argwhere(bad)[0]
            worst = int(ids[row, position])
            remedy = f"; set model.vocab to at least {ids.max() + 1}" if worst >= vocab else ""
            raise DataError(
                f"{where}, row {row}: {name}[{position}] is {worst}, outside the vocabulary "
                f"(0 to {vocab - 1}){remedy}"
            )
