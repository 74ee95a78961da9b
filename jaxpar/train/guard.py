"""When a run stops being finite: after so many skipped steps in a row it goes back, and leaves their data out.

A step whose loss or gradient is not finite changes nothing by itself (`jaxpar.step`), so single bad batches pass. A long
row of them means that the parameters are bad: then the run goes back to the last checkpoint from before the row and
takes other data (PaLM, arXiv:2204.02311 section 5.1).

```
steps      0 ... 40 ........ 47 x x x x x          max_bad_steps = 5
                 │           first bad   └ back to 40, without 47..51
                 checkpoint
again      40 ... 46 ....... 52 x x x x x          not their data, then: what led up to them
                                         └ back to 40, without 40..56
```
"""

from __future__ import annotations

import dataclasses


class DivergedError(RuntimeError):
    """A run whose losses stay not finite, however often it went back."""


class GoBack(Exception):
    """A row of skipped steps is long enough.

    Attributes:
        first: the first step of the row.
        last: the last step seen.
    """

    def __init__(self, first: int, last: int):
        super().__init__(f"steps {first} to {last} were not finite")
        self.first, self.last = first, last


class Guard:
    """Counts skipped steps in a row.

    Args:
        max_bad_steps: length of a row that is too long; 0 never is.
    """

    def __init__(self, max_bad_steps: int):
        self._limit = max_bad_steps
        self._first: int | None = None
        self._count = 0

    def see(self, step: int, skipped: bool) -> None:
        """Take the outcome of one step, in order.

        Raises:
            GoBack: the row of skipped steps that ends with this one is too long.
        """
        if not skipped:
            self._first, self._count = None, 0
            return
        self._first = step if self._first is None else self._first
        self._count += 1
        if self._limit and self._count >= self._limit:
            first, self._first, self._count = self._first, None, 0
            raise GoBack(first, step)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Batches that a run does not train on, and how often it went back; part of every checkpoint.

    Attributes:
        steps: batch indices, in order.
        rollbacks: number of times.
        target: the step that it last went back to.
    """

    steps: tuple[int, ...] = ()
    rollbacks: int = 0
    target: int | None = None

    def after(self, row: GoBack, target: int, limit: int) -> LeftOut:
        """What is left out once the run has gone back from `row` to the checkpoint of step `target`.

        The bad batches alone, at first; if the run was sent back to the same checkpoint before, all since that one,
        since what leads up to a bad row may be what causes it.

        Raises:
            DivergedError: more than `limit` times.
        """
        if self.rollbacks >= limit:
            raise DivergedError(
                f"losses are not finite from step {row.first} to {row.last}, after going back {self.rollbacks} times "
                f"(max_rollbacks); lower the learning rate, clip gradients, or look at the data of these steps"
            )
        first = target if target == self.target else row.first
        steps = sorted({*self.steps, *range(first, row.last + 1)})
        return LeftOut(tuple(steps), self.rollbacks + 1, target)
