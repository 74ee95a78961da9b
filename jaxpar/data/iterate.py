"""Reading ahead: items are made by Grain's threads while the caller is busy, and come in order."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

Item = TypeVar("Item")


def prefetch(
    make: Callable[[int], Item], steps: Iterable[int], *, threads: int = 2, ahead: int = 2
) -> Iterator[Item]:
    """``make(step)`` for every step in order, made in threads while the caller is busy.

    What `make` raises is raised here as it is, at its own step. Nothing begins before the first item
    is asked for; closing the iterator, or an error in the loop over it, ends the threads.

    Args:
        make: called once a step, by several threads at once.
        steps: finite; any steps in any order.
        threads: how many items are made at the same time.
        ahead: how many are made before they are asked for.
    """
    # Grain imports JAX, which the processes that tokenise must not wait for.
    import grain

    options = grain.ReadOptions(num_threads=min(threads, ahead), prefetch_buffer_size=ahead)
    source = _Source(make, steps if isinstance(steps, Sequence) else tuple(steps))
    items = iter(grain.MapDataset.source(source).to_iter_dataset(options))
    try:
        for made in items:
            if made.error is not None:
                raise made.error
            yield cast(Item, made.item)
    finally:
        items.close()


def prefetch_groups(
    make: Callable[[Sequence[int]], Iterable[Item]],
    steps: Sequence[int],
    *,
    group: int,
    threads: int = 1,
    ahead: int = 2,
) -> Iterator[Item]:
    """`prefetch` where items are made several at a time, and still come one by one.

    Grain takes about a tenth of a millisecond to hand an element over, whatever is in it: here an
    element is the items of `group` steps.

    Args:
        make: the items of these steps, in order.
        steps: finite; any steps in any order.
        group: steps an element, the last one may have fewer.
        threads: how many elements are made at the same time; one does for what only copies memory.
        ahead: how many are made before they are asked for.
    """

    def element(n: int) -> Iterable[Item]:
        return make(steps[n * group : (n + 1) * group])

    count = math.ceil(len(steps) / group)
    made = prefetch(element, range(count), threads=threads, ahead=ahead)
    with contextlib.closing(cast(Generator, made)):
        for items in made:
            yield from items


@dataclasses.dataclass(slots=True)
class _Made(Generic[Item]):
    """An item, or the error that came instead of it.

    Errors that Grain carries itself it writes notes on, and a StopIteration would end the loop early
    without a word. Items are boxed so that it does not walk through their arrays to count bytes.
    """

    item: Item | None
    error: BaseException | None


class _Source(Generic[Item]):
    """What Grain asks of a data source: a length, and an item for each index."""

    def __init__(self, make: Callable[[int], Item], steps: Sequence[int]):
        self._make, self._steps = make, steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> _Made[Item]:
        try:
            return _Made(self._make(self._steps[index]), None)
        except BaseException as error:
            return _Made(None, error)
