"""Steps one after the other, each read while the next one runs.

```
device   | step 0      | step 1      | step 2      |     the host hands over step k, and only then
host     0 1 ........... row 0, 2 .... row 1, 3 ....     waits for step k - 1 and writes its row:
                                                         the device always has its next step
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax


def run_steps(
    par: Any,
    state: Any,
    batches: Iterable[tuple[int, Mapping[str, Any], Mapping[str, Any]]],
    *,
    tokens: int,
    rate: Callable[[int], float],
    record: Callable[[dict[str, Any]], None],
    pauses: Callable[[int], bool],
    pause: Callable[[int, Any], None],
    applied: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Any, int | None]:
    """Take one step a batch, one ahead of what is read back.

    Args:
        par: its ``step(state, batch) -> (state, metrics)`` returns before the device is done.
        batches: (index, batch, what its row says of it).
        tokens: tokens a batch.
        rate: count of applied updates -> learning rate.
        record: takes the row of each step, in order. step_seconds is the time from the end of one
            step on the device to the end of the next; the first holds the compilation.
        pauses: whether to stop for `pause` after so many steps.
        pause: takes the number of steps done and the state; its time counts for no step.
        applied: updates applied before.
        stop: asked after every step; once true, no other is taken.

    Returns:
        (the last state, number of steps done or None where there was no batch).
    """
    pending: tuple[int, Mapping[str, Any], Mapping[str, Any]] | None = None
    since = time.perf_counter()
    done: int | None = None

    def read() -> None:
        nonlocal applied, since
        if pending is None:
            return
        step, metrics, note = pending
        values = jax.device_get(metrics)  # waits for this step and no other
        now = time.perf_counter()
        seconds, since = now - since, now
        record(
            {
                "step": step,
                **{name: value.item() for name, value in values.items()},
                "learning_rate": rate(applied),
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds,
                **note,
            }
        )
        applied += 1 - int(values["skipped"])

    for step, batch, note in batches:
        state, metrics = par.step(state, batch)
        read()
        pending = (step, metrics, note)
        done = step + 1
        if pauses(done):
            read()
            pending = None
            pause(done, state)
            since = time.perf_counter()
        if stop():
            break
    read()
    return state, done
