"""Mixtures: which source serves a place, and which of its rows, at any place at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.data.mixture import CYCLE, Order, shares
from jaxpar.data.order import shuffled

weights_of = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights=weights_of)
@settings(max_examples=60, deadline=None)
def test_shares_are_the_largest_remainder(weights: list[float]) -> None:
    counts = shares(weights, CYCLE)
    exact = np.array(weights) / sum(weights) * CYCLE
    assert sum(counts) == CYCLE
    off = np.abs(np.array(counts) - exact)
    # What the lightest are given above their share, the heaviest gives.
    lifted = (exact < 1).sum()
    assert off.max() < 1 + lifted
    assert np.delete(off, np.argmax(exact)).max(initial=0) < 1
    assert min(counts) >= 1


def test_a_source_of_any_weight_is_read() -> None:
    assert shares([1e9, 1, 1e-300], 4096) == (4094, 1, 1)
    with pytest.raises(ValueError, match="5 sources; at most 4"):
        shares([1] * 5, 4)


@pytest.mark.core
@given(weights=weights_of, seed=st.integers(0, 2**63), begin=st.integers(0, 10**9), data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_cycle_has_the_exact_shares(weights, seed: int, begin: int, data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=len(weights), max_size=len(weights)))
    order = Order(sizes, weights=weights, seed=seed)
    source, row = order.at(np.arange(begin * CYCLE, (begin + 1) * CYCLE)).T
    assert np.bincount(source, minlength=len(sizes)).tolist() == list(shares(weights, CYCLE))
    assert (row < np.array(sizes)[source]).all()
    assert row.min() >= 0


@pytest.mark.core
@given(weights=weights_of, seed=st.integers(0, 2**63), data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_source_goes_through_epochs_of_its_own(weights, seed: int, data) -> None:
    """Each time a source is read, in the order of time: its rows, every row once an epoch."""
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=len(weights), max_size=len(weights)))
    source, row = Order(sizes, weights=weights, seed=seed).at(np.arange(3 * CYCLE)).T
    for which, size in enumerate(sizes):
        read = row[source == which]
        for epoch in range(len(read) // size):
            part = read[epoch * size : (epoch + 1) * size]
            assert sorted(part.tolist()) == list(range(size))
        rest = read[len(read) // size * size :]
        assert len(set(rest.tolist())) == len(rest)


@given(
    weights=weights_of,
    batches=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    begin=st.integers(0, 10**12),
)
@settings(max_examples=30, deadline=None)
def test_the_order_does_not_know_batches(weights, batches: list[int], begin: int) -> None:
    """However a line of places is cut up, and in whatever order the parts are asked for."""
    order = Order([700] * len(weights), weights=weights, seed=3)
    ends = np.cumsum(batches)
    expected = Order([700] * len(weights), weights=weights, seed=3).at(
        np.arange(begin, begin + ends[-1])
    )
    cuts = np.split(np.arange(begin, begin + ends[-1]), ends[:-1])
    parts = {i: order.at(cuts[i]) for i in reversed(range(len(cuts)))}
    np.testing.assert_array_equal(np.concatenate([parts[i] for i in range(len(cuts))]), expected)


def test_one_source_is_shuffled_as_it_was_without_mixtures() -> None:
    places = np.arange(9000, 21000)
    source, row = Order([5000], weights=[0.3], seed=11).at(places).T
    assert not source.any()
    np.testing.assert_array_equal(row, shuffled(places, size=5000, seed=11))


def test_the_sources_are_spread_over_a_cycle() -> None:
    """And differently in each cycle and for each seed; equal sources are shuffled differently."""
    order = Order([4096, 4096], weights=[1, 1], seed=0)
    source, row = order.at(np.arange(2 * CYCLE)).T
    halves = source[:CYCLE].reshape(8, -1).mean(axis=1)
    assert np.abs(halves - 0.5).max() < 0.1  # four standard deviations of a fair draw of 512
    assert (source[:CYCLE] != source[CYCLE:]).mean() > 0.4
    assert (row[source == 0] != row[source == 1]).mean() > 0.99
    other = Order([4096, 4096], weights=[1, 1], seed=1).at(np.arange(CYCLE))
    assert (other[:, 0] != source[:CYCLE]).mean() > 0.4


def test_any_place_is_as_near_as_the_first() -> None:
    order = Order([10**9, 1000], weights=[3, 1], seed=0)
    begin = time.perf_counter()
    out = order.at(np.arange(10**15, 10**15 + 512))
    assert time.perf_counter() - begin < 0.5
    assert len(np.unique(out[out[:, 0] == 0], axis=0)) == (out[:, 0] == 0).sum()


def test_tables_are_not_shared_with_callers() -> None:
    order = Order([10], weights=[1], seed=0)
    first = order.at(np.arange(5))
    first[:] = -1
    assert (order.at(np.arange(5)) >= 0).all()
