"""Tokens as batches: fixed windows in a shuffled order that is a pure function of (seed, step).

```
tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 ...         seq = 4
window 0   tokens  t0 t1 t2 t3   targets t1 t2 t3 t4
window 1   tokens  t4 t5 t6 t7   targets t5 t6 t7 t8
```

Every target belongs to exactly one window. Row r of batch s is place ``s * rows + r`` of an endless
order in which each epoch is another permutation of all windows. The permutation is a keyed Feistel
network: any place of it costs the same and needs no memory, so step a million is as near as step 0.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from jaxtyping import Int, UInt64

from jaxpar.data.files import DataError

IGNORED = -100
"""Target that the loss leaves out."""

_ROUNDS = 6

Batch = dict[str, np.ndarray]
Item = TypeVar("Item")


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
        epochs, within = np.divmod(places, self.count)
        out = np.empty(self.rows, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permute(within[here], size=self.count, seed=self.seed, epoch=int(epoch))
        return out

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


def permute(
    places: Int[np.ndarray, " n"], *, size: int, seed: int, epoch: int
) -> Int[np.ndarray, " n"]:
    """Images of `places` under the permutation of ``range(size)`` keyed by (seed, epoch).

    A Feistel network over a grid just larger than `size`; a place that lands outside goes through
    again (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    >>> sorted(permute(np.arange(5), size=5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    a = math.isqrt(size - 1) + 1
    b = math.ceil(size / a)
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) ^ _word(seed))
    keys = _mix(keys ^ _word(epoch))

    def once(x: np.ndarray) -> np.ndarray:
        left, right = np.divmod(x, np.uint64(b))
        for k in range(0, _ROUNDS, 2):
            left = (left + _mix(right ^ keys[k]) % np.uint64(a)) % np.uint64(a)
            right = (right + _mix(left ^ keys[k + 1]) % np.uint64(b)) % np.uint64(b)
        return left * np.uint64(b) + right

    out = once(np.asarray(places).astype(np.uint64))
    while (outside := out >= size).any():
        out[outside] = once(out[outside])
    return out.astype(np.int64)


def _word(n: int) -> np.uint64:
    """64 bits of a number, far apart for neighbours."""
    return _mix(np.array([(n + 1) * 0x9E3779B97F4A7C15 % 2**64], np.uint64))[0]


def _mix(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def prefetch(make: Callable[[int], Item], steps: Iterable[int]) -> Iterator[Item]:
    """``make(step)`` for every step in order, one ahead of the caller, in a thread.

    What `make` raises is raised here, at its own step.
    """
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        pending: concurrent.futures.Future[Item] | None = None
        for step in steps:
            ready, pending = pending, pool.submit(make, step)
            if ready is not None:
                yield ready.result()
        if pending is not None:
            yield pending.result()
