"""Mean loss over held-out targets: each counts once, whatever the batches and the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpar import data
from jaxpar.parallel import Parallel
from jaxpar.state import TrainState


def evaluate(
    par: Parallel,
    state: TrainState,
    heldout: Any,
    limit: int | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    read: Callable[[int], Any] | None = None,
) -> dict[str, float]:
    """Mean over held-out targets of the loss and of every metric: one sum over one weight; and ``targets``, their number.

    Args:
        heldout: ``len()`` batches, ``batch(i)``.
        limit: batches to take, evenly spread over all; all by default.
        read: batch i on the devices; ``heldout.batch(i)``, by default (`feeding.reader` where there are processes).
        check: called before every batch; what it raises ends the evaluation.
    """
    count = min(limit or len(heldout), len(heldout))
    chosen = [i * len(heldout) // count for i in range(count)]
    totals: dict[str, np.ndarray] = {}
    pending: Any = None

    def add(sums: Any) -> None:
        for name, pair in jax.device_get(sums or {}).items():
            totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)

    read = read or (lambda i: par.put(heldout.batch(i)))
    for batch in data.prefetch(read, chosen):
        check()
        sums = par.evaluate(state, batch)
        add(pending)
        pending = sums
    add(pending)
    means = {name: float(total / weight) for name, (total, weight) in totals.items()}
    return {**means, "targets": float(totals["loss"][1])}
