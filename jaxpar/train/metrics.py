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
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and the same numbers to ``tensorboard/`` in a run folder.

    A step's row holds step, loss, grad_norm, learning_rate, step_seconds, tokens_per_second,
    skipped (0 or 1) and what the loss function adds; an evaluation's row holds step and eval_loss.
    Values are host numbers: writing never waits for a device. A value that is not finite is written
    as null, because JSON has no NaN.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, "metrics.jsonl")
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self._board = FileWriter(os.path.join(folder, "tensorboard"), flush_secs=10)

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
    """Rows of a ``metrics.jsonl``, in order."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _plain(value: Any) -> Any:
    """A Python number from a NumPy or Python one, None where it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _tag(name: str) -> str:
    """TensorBoard groups by the part before the slash: evaluation apart from training."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
