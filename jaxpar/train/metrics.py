"""What a run measures, one row a step, written as JSON lines and as TensorBoard scalars.

A row that is already in the file stays there whatever happens later: every line is flushed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tensorboardX import FileWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and the same numbers to ``tensorboard/`` in a run folder.

    A step's row holds step, loss, grad_norm, learning_rate, step_seconds, tokens_per_second,
    skipped (0 or 1) and what the loss function adds; an evaluation's row holds step and eval_loss.
    Values are host numbers: writing never waits for a device. A value that is not finite is written
    as null, because JSON has no NaN.

    Args:
        folder: run folder.
        first_step: the first step that will be written: rows of it and of later ones, from before the run was cut
            short, go to ``dropped.jsonl``, and TensorBoard is told to forget them.
    """

    def __init__(self, folder: str | os.PathLike[str], first_step: int = 0):
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, "metrics.jsonl")
        self.dropped = drop_rows(folder, first_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self._board = FileWriter(os.path.join(folder, "tensorboard"), flush_secs=10)
        if first_step:
            start = SessionLog(status=SessionLog.START)
            self._board.add_event(Event(session_log=start), first_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; it must have a step.

        Raises:
            KeyError: no step in the row.
        """
        step = int(row["step"])
        clean = {name: _plain(value) for name, value in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()
        # One event with every value: one a scalar would cost several times as much.
        values = [
            Summary.Value(tag=_tag(name), simple_value=value)
            for name, value in clean.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._board.add_summary(Summary(value=values), step)

    def drop(self, first_step: int) -> None:
        """Forget the rows of `first_step` and later ones, which will be written again: the run goes back."""
        self._file.close()
        self.dropped += drop_rows(os.path.dirname(self.path), first_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._board.add_event(Event(session_log=SessionLog(status=SessionLog.START)), first_step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``, in order; a last line that a killed process left unfinished is not one."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def drop_rows(folder: str | os.PathLike[str], first_step: int) -> int:
    """Move the rows of steps that will be taken again to ``dropped.jsonl``; returns how many there were.

    The row of an evaluation counts steps done, that of a step is its index: after a checkpoint of 40, evaluation 40 and
    step 39 stay.
    """
    path = os.path.join(folder, "metrics.jsonl")
    if not os.path.exists(path):
        return 0
    rows = read(path)
    kept = [r for r in rows if r["step"] < first_step + ("eval_loss" in r)]
    gone = [r for r in rows if r["step"] >= first_step + ("eval_loss" in r)]
    if gone:
        with open(os.path.join(folder, "dropped.jsonl"), "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in gone)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
    os.replace(f"{path}.tmp", path)
    return len(gone)


def _plain(value: Any) -> Any:
    """A Python number from a NumPy or Python one, None where it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _tag(name: str) -> str:
    """TensorBoard groups by the part before the slash: evaluation apart from training."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
