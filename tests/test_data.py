"""Batches: every window once an epoch, a pure function of (seed, step), and errors by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import numbered, store

from jaxpar import data
from jaxpar.data.batches import TrainBatches
from jaxpar.data.heldout import HeldOutBatches
from jaxpar.data.order import permute
from jaxpar.data.packing import IGNORED, Concatenated, Stream


def windows(count: int = 10, seq: int = 4, rows: int = 3, seed: int = 0) -> TrainBatches:
    source = numbered([count * seq + 1])
    return TrainBatches([Stream(source, seq)], rows=rows, seed=seed, vocab=len(source.tokens))


# ---- order --------------------------------------------------------------------------------------


@pytest.mark.core
@given(
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert sorted(images.tolist()) == list(range(size))


def test_permute_shuffles_like_a_random_order() -> None:
    """Neighbours end up far apart: mean distance n/3, correlation near 0."""
    n = 10_000
    images = permute(np.arange(n), size=n, seed=1, epoch=0)
    assert abs(np.abs(np.diff(images)).mean() / n - 1 / 3) < 0.02
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.05
    assert len(np.unique(np.diff(images))) > n / 2  # an affine order would have a handful


def test_other_seeds_and_epochs_are_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(50), size=50, seed=seed, epoch=epoch).tolist())
        for seed in (0, 1, 2**40)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 9


def test_the_order_of_version_1_stays() -> None:
    """Recorded: whoever resumes a run reads on in the order in which it began."""
    images = permute(np.arange(12), size=1000, seed=7, epoch=3).tolist()
    assert images == [202, 490, 988, 407, 545, 964, 907, 622, 427, 425, 194, 422]


@given(count=st.integers(1, 40), rows=st.integers(1, 50), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_window_once_an_epoch(count: int, rows: int, seed: int) -> None:
    """Also where batches straddle epochs, or one batch holds several."""
    source = windows(count, rows=rows, seed=seed)
    epochs = 3
    steps = -(-epochs * count // rows)
    ids = np.concatenate([source.ids(step)[:, 1] for step in range(steps)])[: epochs * count]
    for epoch in ids.reshape(epochs, count):
        assert sorted(epoch.tolist()) == list(range(count))


@pytest.mark.core
def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first, second = windows(), windows()
    late = second.batch(7)
    for step in range(8):
        batch = first.batch(step)
    for name in ("tokens", "targets", "row_id"):
        np.testing.assert_array_equal(batch[name], late[name])
    assert not np.array_equal(windows(seed=1).batch(7)["tokens"], late["tokens"])


def test_step_a_million_million_is_as_near_as_step_zero() -> None:
    source = windows(1000)
    begin = time.perf_counter()
    batch = source.batch(10**12)
    assert time.perf_counter() - begin < 0.1
    assert batch["row_id"].dtype == np.int32
    assert len(set(batch["row_id"].tolist())) == source.rows


def test_targets_are_the_tokens_one_later() -> None:
    batch = windows().batch(0)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 4)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(batch["tokens"][:, 0] % 4, 0)


@pytest.mark.core
@pytest.mark.parametrize("rows", [slice(0, 2), slice(3, 5), slice(1, 5, 2), np.array([4, 0, 4])])
def test_some_rows_are_those_of_the_whole_batch(rows) -> None:
    source = windows(17, rows=5)
    for step in (0, 3, 10**9):
        whole, part = source.batch(step), source.batch(step, rows)
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][rows])
        np.testing.assert_array_equal(source.ids(step, rows), source.ids(step)[rows])


# ---- held-out tokens ----------------------------------------------------------------------------


@given(tokens=st.integers(2, 100), seq=st.integers(1, 9), rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_heldout_covers_every_target_once(tokens: int, seq: int, rows: int) -> None:
    source = HeldOutBatches([Stream(numbered([tokens]), seq, tail=True)], rows=rows, vocab=tokens)
    batches = [source.batch(i) for i in range(len(source))]
    targets = np.concatenate([b["targets"].ravel() for b in batches])
    inputs = np.concatenate([b["tokens"].ravel() for b in batches])
    valid = targets != IGNORED
    assert targets[valid].tolist() == list(range(1, tokens))
    assert inputs[valid].tolist() == list(range(tokens - 1))
    assert {b["tokens"].shape for b in batches} == {(rows, seq)}
    assert all((b["targets"] != IGNORED).any() for b in batches)
    row_ids = np.concatenate([b["row_id"] for b in batches])
    assert row_ids.tolist() == list(range(len(row_ids)))


@pytest.mark.core
@pytest.mark.parametrize("kind", [Stream, Concatenated])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("rows", [4, 8, 12])
def test_the_mean_over_held_out_targets_is_numpys(kind, shards: int, rows: int) -> None:
    """Case L3: several sources, none of which fills its last row, over data shards."""
    sources = [numbered([9, 5, 2]), numbered([31]), numbered([3] * 9)]
    batches = HeldOutBatches([kind(s, 4, tail=True) for s in sources], rows=rows, vocab=99)
    total = count = 0
    for index in range(len(batches)):
        for shard in range(shards):
            part = slice(shard * rows // shards, (shard + 1) * rows // shards)
            targets = batches.batch(index, part)["targets"]
            total += targets[targets != IGNORED].sum()
            count += (targets != IGNORED).sum()
    if kind is Stream:
        expected = np.concatenate([s.tokens[1:] for s in sources])
    else:
        expected = np.concatenate(
            [np.delete(s.tokens, s.offsets[:-1]) for s in sources]  # all but the first of each
        )
    assert count == len(expected)
    assert total / count == expected.mean()


def test_some_held_out_rows_are_those_of_the_whole_batch() -> None:
    sources = [numbered([9, 5, 2]), numbered([31])]
    batches = HeldOutBatches([Concatenated(s, 4, tail=True) for s in sources], rows=5, vocab=99)
    for index in range(len(batches)):
        whole = batches.batch(index)
        for part in (slice(0, 2), slice(2, 5), slice(4, 5)):
            for name, array in batches.batch(index, part).items():
                np.testing.assert_array_equal(array, whole[name][part])
    with pytest.raises(IndexError, match=f"batch {len(batches)}; there are {len(batches)}"):
        batches.batch(len(batches))


# ---- ids outside the vocabulary (case T11) ------------------------------------------------------


@pytest.mark.core
def test_ids_are_checked_before_the_first_batch_and_named_by_file_and_row() -> None:
    source = store([[1, 2, 3], [4, 70, 0]], name="notes")
    with pytest.raises(data.DataError, match=r"notes\.txt, row 2: token 1 has id 70.*at least 71"):
        TrainBatches([Stream(source, 4)], rows=1, seed=0, vocab=64)
    with pytest.raises(data.DataError, match=r"notes\.txt, row 2: token 1 has id 70"):
        HeldOutBatches([Stream(source, 4, tail=True)], rows=1, vocab=64)


# ---- prefetch -----------------------------------------------------------------------------------


def alive() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "prefetch" in thread.name}


def ended(within: float = 5) -> bool:
    """Whether all threads of iterators end soon."""
    until = time.monotonic() + within
    while alive() and time.monotonic() < until:
        time.sleep(0.01)
    return not alive()


def test_prefetch_keeps_order_and_runs_ahead() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 1:
            ahead.set()
        return step * 10

    stream = data.prefetch(make, range(6))
    assert next(stream) == 0
    assert ahead.wait(5)  # batch 1 is made though nobody asked for it yet
    assert not {3, 4, 5} & set(made)  # and no more than two are
    assert list(stream) == [10, 20, 30, 40, 50]
    assert sorted(made) == list(range(6))
    assert ended()


def test_prefetch_makes_two_at_a_time() -> None:
    both = threading.Barrier(2, timeout=5)

    def make(step: int) -> int:
        both.wait()  # breaks where the other is not under way
        return step

    assert list(data.prefetch(make, range(6))) == list(range(6))


def test_prefetch_of_one_thread_makes_in_order() -> None:
    made: list[int] = []
    steps = [5, 3, 9, 0, 7]
    assert list(data.prefetch(lambda s: made.append(s) or s, steps, threads=1)) == steps
    assert made == steps


@given(steps=st.lists(st.integers(0, 10**12), max_size=12))
@settings(max_examples=15, deadline=None)
def test_prefetch_of_any_steps(steps: list[int]) -> None:
    """A run may leave out some steps, and go back."""
    assert list(data.prefetch(lambda step: step, steps)) == steps
    assert list(data.prefetch(lambda step: -step, iter(steps))) == [-step for step in steps]


@pytest.mark.core
def test_prefetch_raises_at_its_own_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise data.DataError("batch 2 is bad")
        return step

    stream = data.prefetch(make, range(4))
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(data.DataError, match=r"^batch 2 is bad$") as caught:
        next(stream)
    assert type(caught.value) is data.DataError
    assert next(stream, "over") == "over"
    assert ended()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError, SystemExit])
def test_prefetch_raises_what_was_raised(error: type[BaseException]) -> None:
    def make(step: int) -> int:
        raise error("here")

    with pytest.raises(error):
        next(data.prefetch(make, range(4)))
    assert ended()


def test_prefetch_is_not_ended_by_a_stray_stop_iteration() -> None:
    def make(step: int) -> int:
        return next(iter(())) if step == 1 else step

    stream = data.prefetch(make, range(3))
    assert next(stream) == 0
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(stream)


def test_prefetch_passes_none_on() -> None:
    assert list(data.prefetch(lambda step: None, range(20))) == [None] * 20


@given(steps=st.lists(st.integers(0, 10**12), max_size=12), group=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_prefetch_of_groups_gives_items_one_by_one(steps: list[int], group: int) -> None:
    sizes: list[int] = []

    def make(some: Sequence[int]) -> list[int]:
        sizes.append(len(some))
        return [-step for step in some]

    items = data.prefetch_groups(make, steps, group=group)
    assert list(items) == [-step for step in steps]
    assert sorted(sizes, reverse=True)[:-1] == [group] * (len(sizes) - 1)
    assert sum(sizes) == len(steps)


def test_prefetch_of_groups_left_early_or_failing_leaves_no_thread() -> None:
    items = data.prefetch_groups(list, range(1000), group=3)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    items.close()
    assert ended()

    def make(some: Sequence[int]) -> list[int]:
        if 4 in some:
            raise data.DataError("batch 4 is bad")
        return list(some)

    items = data.prefetch_groups(make, range(1000), group=3)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(data.DataError, match=r"^batch 4 is bad$"):
        next(items)
    assert ended()


def test_prefetch_of_nothing() -> None:
    assert list(data.prefetch(lambda step: step, [])) == []
    assert list(data.prefetch_groups(list, [], group=4)) == []


@pytest.mark.core
@pytest.mark.parametrize("how", ["break", "error", "interrupt", "dropped"])
def test_prefetch_left_early_leaves_no_thread(how: str) -> None:
    def leave() -> None:
        for step in data.prefetch(lambda step: time.sleep(0.01) or step, range(1000)):
            if step == 2:
                if how == "break":
                    break
                raise KeyboardInterrupt if how == "interrupt" else ValueError

    begin = time.monotonic()
    if how == "dropped":
        stream = data.prefetch(lambda step: step, range(1000))
        next(stream)
        del stream
    elif how == "break":
        leave()
    else:
        with pytest.raises((KeyboardInterrupt, ValueError)):
            leave()
    assert ended()
    assert time.monotonic() - begin < 5


def test_prefetch_never_begun_does_nothing() -> None:
    data.prefetch(lambda step: pytest.fail("made"), range(3))
    assert not alive()
