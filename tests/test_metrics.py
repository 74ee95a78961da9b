"""Rows of metrics: strict JSON, flushed at once, and the same numbers in TensorBoard's files."""

from __future__ import annotations

import glob
import json
import pathlib
import struct
import time

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxpar.train import metrics


def scalars(folder) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every scalar; a record is its length, a check, the event, a check."""
    out = []
    for path in glob.glob(str(folder / "tensorboard" / "*tfevents*")):
        data = pathlib.Path(path).read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            out += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return out


def test_a_row_is_one_json_object_a_line_and_is_there_at_once(tmp_path) -> None:
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write({"step": 0, "loss": np.float32(2.5), "skipped": np.int32(0)})
        assert metrics.read(writer.path) == [{"step": 0, "loss": 2.5, "skipped": 0}]
        writer.write({"step": 1, "eval_loss": 2.25})
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert rows[1] == {"step": 1, "eval_loss": 2.25}


def test_tensorboard_holds_the_same_numbers(tmp_path) -> None:
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write({"step": 3, "loss": 2.5, "learning_rate": 0.25})
        writer.write({"step": 4, "eval_loss": 1.5})
    assert sorted(scalars(tmp_path)) == [
        ("eval/loss", 4, 1.5),
        ("train/learning_rate", 3, 0.25),
        ("train/loss", 3, 2.5),
    ]


def test_not_finite_is_null_not_broken_json(tmp_path) -> None:
    with metrics.MetricsWriter(tmp_path) as writer:
        writer.write(
            {"step": 0, "loss": float("nan"), "grad_norm": np.float32("inf"), "skipped": 1}
        )
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row == {"step": 0, "loss": None, "grad_norm": None, "skipped": 1}
    assert [tag for tag, *_ in scalars(tmp_path)] == ["train/skipped"]


def test_a_row_needs_a_step(tmp_path) -> None:
    with metrics.MetricsWriter(tmp_path) as writer, pytest.raises(KeyError, match="step"):
        writer.write({"loss": 1.0})


def test_writing_a_row_costs_well_under_a_millisecond(tmp_path) -> None:
    row = dict.fromkeys(("loss", "grad_norm", "learning_rate", "step_seconds", "skipped"), 1.0)
    with metrics.MetricsWriter(tmp_path) as writer:
        seconds = []
        for step in range(50):
            begin = time.perf_counter()
            writer.write({"step": step, **row})
            seconds.append(time.perf_counter() - begin)
    assert sorted(seconds)[25] < 1e-3
