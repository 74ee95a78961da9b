"""Which checkpoints stay: the newest, the best and every so many steps, each for its own reason.

Pure numbers. The newest complete checkpoint always stays: it is where a run goes on from, however bad its metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def retained(
    steps: Iterable[int],
    metrics: Mapping[int, float | None],
    keep: int = 3,
    keep_best: int = 0,
    keep_every: int = 0,
) -> set[int]:
    """The steps that stay.

    Args:
        steps: complete checkpoints.
        metrics: step -> metric, lower is better; None, NaN or no entry can not be among the best.
        keep: number of newest that stay; 0 for all.
        keep_best: number of those with the lowest metric that stay; of equal ones the newer.
        keep_every: multiples of it stay for good; 0 for none.

    >>> sorted(retained([10, 20, 30, 40], {10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0}, keep=1, keep_best=1))
    [10, 40]
    """
    ordered = sorted(steps)
    if not ordered or not keep:
        return set(ordered)
    known = {s: m for s in ordered if (m := metrics.get(s)) is not None and not math.isnan(m)}
    best = sorted(known, key=lambda s: (known[s], -s))[:keep_best]
    spaced = [s for s in ordered if keep_every and s % keep_every == 0]
    return {*ordered[-keep:], *best, *spaced}
