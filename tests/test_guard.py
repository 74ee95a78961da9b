"""Rows of steps that are not finite: when a run goes back, to what, and what it leaves out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.train.guard import DivergedError, GoBack, Guard, LeftOut


def rows(outcomes: str, limit: int) -> list[tuple[int, int]]:
    """(first, last) of every row that is too long among outcomes such as ``..x.xxx``."""
    guard, out = Guard(limit), []
    for step, outcome in enumerate(outcomes):
        try:
            guard.see(step, outcome == "x")
        except GoBack as row:
            out.append((row.first, row.last))
    return out


@pytest.mark.core
def test_only_a_row_in_a_row_counts() -> None:
    assert rows("..x.xx.x.", 3) == []
    assert rows("..x.xxx..", 3) == [(4, 6)]
    assert rows("xxxxxx", 3) == [(0, 2), (3, 5)]
    assert rows("xxxxxx", 0) == []


@given(st.text("x.", max_size=30), st.integers(1, 5))
def test_rows_are_those_that_a_search_finds(outcomes: str, limit: int) -> None:
    found, at = [], 0
    while (start := outcomes.find("x" * limit, at)) >= 0:
        found.append((start, start + limit - 1))
        at = start + limit
    # `find` starts a row at its first step, or right after one that was too long.
    assert rows(outcomes, limit) == found


@pytest.mark.core
def test_first_the_bad_batches_and_then_all_since_the_checkpoint() -> None:
    once = LeftOut().after(GoBack(7, 9), 4, 3)
    assert once == LeftOut((7, 8, 9), 1, 4)
    twice = once.after(GoBack(10, 12), 4, 3)
    assert twice == LeftOut(tuple(range(4, 13)), 2, 4)
    elsewhere = twice.after(GoBack(20, 22), 16, 3)
    assert elsewhere.steps == (*range(4, 13), 20, 21, 22)
    with pytest.raises(DivergedError, match=r"step 30 to 32.*3 times"):
        elsewhere.after(GoBack(30, 32), 28, 3)


def test_no_going_back_at_all() -> None:
    with pytest.raises(DivergedError):
        LeftOut().after(GoBack(0, 0), 0, 0)
