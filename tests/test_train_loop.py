"""The training loop around a step: what is read when, what a row holds, what is refused."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import numbered

from jaxpar.data.heldout import HeldOutBatches
from jaxpar.data.packing import Stream
from jaxpar.train import loop
from jaxpar.train.evaluation import evaluate
from jaxpar.train.interrupt import Interrupted
from jaxpar.train.report import Reporter, Result
from jaxpar.train.steps import run_steps


class Value:
    """A metric on a device: logs when it is read. JAX fetches anything with `__array__`."""

    def __init__(self, log: list[str], name: str, value: float):
        self.log, self.name, self.value = log, name, value

    def __array__(self, dtype=None, copy=None):
        self.log.append(self.name)
        return np.asarray(self.value, dtype)


class Fake:
    """A step whose loss is 10 - step and which skips what it is told to."""

    def __init__(self, skip: tuple[int, ...] = (), seconds: float = 0.0):
        self.log: list[str] = []
        self.skip, self.seconds = skip, seconds

    def step(self, state: int, batch: int):
        assert state == batch
        self.log.append(f"step {state}")
        time.sleep(self.seconds)
        return state + 1, {
            "loss": Value(self.log, f"read {state}", 10.0 - state),
            "skipped": np.int32(state in self.skip),
        }


def run(par: Fake, steps: int, every: int = 0, pause_seconds: float = 0.0):
    rows: list[dict] = []

    def pause(done: int, state: int) -> None:
        assert state == done
        par.log.append(f"pause {done}")
        time.sleep(pause_seconds)

    last, done = run_steps(
        par,
        0,
        ((i, i, {"data_crc": i}) for i in range(steps)),
        tokens=100,
        rate=lambda count: 1.0 / (1 + count),
        record=rows.append,
        pauses=lambda done: bool(every) and done % every == 0,
        pause=pause,
    )
    assert last == done == steps
    return rows


def test_a_step_is_read_after_the_next_one_is_handed_over() -> None:
    par = Fake()
    run(par, 3)
    assert par.log == ["step 0", "step 1", "read 0", "step 2", "read 1", "read 2"]


def test_a_pause_comes_after_its_own_row_and_before_the_next_step() -> None:
    par = Fake()
    rows = run(par, 4, every=2)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert par.log[:6] == ["step 0", "step 1", "read 0", "read 1", "pause 2", "step 2"]
    assert par.log[-2:] == ["read 3", "pause 4"]


def test_a_row_holds_every_number() -> None:
    rows = run(Fake(seconds=0.01), 3)
    assert set(rows[1]) == {
        "step",
        "loss",
        "skipped",
        "learning_rate",
        "step_seconds",
        "tokens_per_second",
        "data_crc",
    }
    assert rows[1]["loss"] == 9.0
    for row in rows:
        assert type(row["loss"]) is float
        assert row["step_seconds"] * row["tokens_per_second"] == pytest.approx(100)
    assert sum(row["step_seconds"] for row in rows) >= 0.03


def test_the_rate_logged_counts_applied_updates_alone() -> None:
    """Case G8: a skipped step moves no schedule, so the step after it has the same rate."""
    rows = run(Fake(skip=(1, 2)), 5)
    assert [row["learning_rate"] for row in rows] == [1, 1 / 2, 1 / 2, 1 / 2, 1 / 3]
    assert [row["skipped"] for row in rows] == [0, 1, 1, 0, 0]


def test_the_time_of_a_pause_counts_for_no_step() -> None:
    rows = run(Fake(), 4, every=2, pause_seconds=0.3)
    assert max(row["step_seconds"] for row in rows) < 0.2


def test_the_loop_costs_well_under_a_millisecond_a_step() -> None:
    ends: list[float] = []

    class Quick:
        def step(self, state, batch):
            return state, {"loss": np.float32(1), "skipped": np.int32(0)}

    run_steps(
        Quick(),
        0,
        ((i, i, {}) for i in range(200)),
        tokens=1,
        rate=lambda count: 0.1,
        record=lambda row: ends.append(time.perf_counter()),
        pauses=lambda done: False,
        pause=lambda done, state: None,
    )
    assert np.median(np.diff(ends)) < 5e-4


def heldout_of(tokens: int) -> HeldOutBatches:
    return HeldOutBatches([Stream(numbered([tokens]), 4, tail=True)], rows=2, vocab=64)


class Halves:
    """An evaluation whose loss is the sum of valid targets, so that its mean is known."""

    def put(self, batch):
        return batch

    def evaluate(self, state, batch):
        valid = batch["targets"][batch["targets"] >= 0]
        return {"loss": (valid.sum(), valid.size), "accuracy": (valid.size, 2 * valid.size)}


@pytest.mark.parametrize("tokens", [2, 9, 10, 33, 64])
def test_evaluation_is_the_mean_over_targets_and_not_over_batches(tokens) -> None:
    """Case L3: the last batch is padded, and weighs what it holds."""
    heldout = heldout_of(tokens)
    got = evaluate(Halves(), None, heldout)
    assert got["loss"] == pytest.approx(np.arange(1, tokens).mean())
    assert got["accuracy"] == 0.5


def test_a_request_to_stop_ends_after_the_step_under_way() -> None:
    par, rows = Fake(), []
    state, done = run_steps(
        par,
        0,
        ((i, i, {}) for i in range(9)),
        tokens=1,
        rate=lambda count: 0.1,
        record=rows.append,
        pauses=lambda done: False,
        pause=lambda done, state: None,
        stop=lambda: "step 3" in par.log,
    )
    assert (state, done) == (4, 4)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_an_evaluation_can_be_given_up() -> None:
    heldout = heldout_of(33)
    calls = iter([None, None, Interrupted("SIGTERM")])

    def check() -> None:
        if error := next(calls):
            raise error

    with pytest.raises(Interrupted):
        evaluate(Halves(), None, heldout, check=check)


@given(st.integers(0, 9), st.integers(0, 12), st.sets(st.integers(0, 12)))
def test_stretches_are_the_steps_that_are_not_left_out(first, last, gaps) -> None:
    ranges = loop._stretches(first, last, tuple(sorted(gaps)))
    taken = [step for a, b in ranges for step in range(a, b)]
    assert taken == [s for s in range(first, last) if s not in gaps]
    assert all(a < b for a, b in ranges)


# ---- what a person sees -------------------------------------------------------------------------


def row(step: int) -> dict:
    return {"step": step, "loss": 2.5, "tokens_per_second": 12345.6, "step_seconds": 0.25}


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Reporter(100, out=out) as reporter:
        for step in range(100):
            reporter.row(row(step))
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1/100  loss 2.5000  12,346 tokens/s  0.250 s/step"
    assert lines[-1].startswith("step 100/100")
    assert 15 < len(lines) < 25


def test_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Reporter(2, out=out) as reporter:
        reporter.row(row(0))
        reporter.say("evaluation [of] something")
        reporter.row(row(1))
    assert "evaluation [of] something" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert "0.250" in out.getvalue()


def test_a_result_shows_no_control_characters() -> None:
    result = Result(
        steps=2,
        of=2,
        skipped=1,
        loss=1.0,
        eval_loss=np.log(4.0),
        step_seconds=0.5,
        tokens_per_second=200.0,
        prompt="def f():\n",
        sample="\tpass\x1b[2J\x00",
        folder="runs/a",
        checkpoint="runs/a/checkpoints/2",
    )
    text = str(result)
    assert "(2.000 bits)" in text
    assert "1 of them skipped" in text
    assert "\x1b" not in text
    assert "  | def f():\n  | >>>\tpass�[2J�" in text
    assert "runs/a/checkpoints/2" in text
