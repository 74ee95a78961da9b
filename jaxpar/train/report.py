"""What a person sees of a run: its progress, and its results at the end.

On a terminal a bar with the loss, tokens/s and step time; elsewhere a plain line every so often, so
that a log stays readable.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINES = 20
"""Plain lines in a whole run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Results of a run.

    Attributes:
        steps: steps taken, over all its starts.
        of: steps that the run has in all.
        skipped: steps among them that changed nothing.
        loss: training loss of the last step, nats a token.
        eval_loss: mean loss over every held-out token, nats a token; None of a run that has more steps to go.
        step_seconds: median after the first step.
        tokens_per_second: at that median.
        prompt: held-out text that the sample continues.
        sample: what the model wrote after it.
        folder: run folder.
        checkpoint: folder of the last checkpoint.
    """

    steps: int
    of: int
    skipped: int
    loss: float
    eval_loss: float | None
    step_seconds: float
    tokens_per_second: float
    prompt: str
    sample: str
    folder: str
    checkpoint: str

    def __str__(self) -> str:
        skipped = f", {self.skipped} of them skipped" if self.skipped else ""
        more = f" of {self.of}, stopped on request" if self.steps < self.of else ""
        lines = [f"{self.steps} steps{more}{skipped}: training loss {self.loss:.4f}"]
        if self.eval_loss is not None:
            bits = self.eval_loss / math.log(2)
            lines.append(f"evaluation loss {self.eval_loss:.4f} nats ({bits:.3f} bits) a token")
        if math.isfinite(self.step_seconds):
            lines.append(
                f"step {self.step_seconds:.3f} s, {self.tokens_per_second:,.0f} tokens/s (median)"
            )
        if self.sample:
            lines.append("a held-out text, and how the model goes on (after the mark >>>):")
            lines += [f"  | {line}" for line in _shown(f"{self.prompt}>>>{self.sample}")]
        return "\n".join([*lines, f"run folder {self.folder}", f"checkpoint {self.checkpoint}"])


def _shown(text: str) -> list[str]:
    """Lines of a text that a model wrote: without the control characters that steer a terminal."""
    clean = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    return clean.split("\n")


class Reporter:
    """Shows rows of metrics as they come; a context manager around the steps of a run."""

    def __init__(self, steps: int, *, out: TextIO | None = None):
        self._out = out or sys.stdout
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._bar: Progress | None = None
        if self._out.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=Console(file=self._out),
            )
            self._task = self._bar.add_task("train", total=steps, numbers="compiling")

    def row(self, row: Mapping[str, Any]) -> None:
        """Show the row of one step."""
        step = row["step"]
        numbers = (
            f"loss {row['loss']:.4f}{' skipped' if row.get('skipped') else ''}  {row['tokens_per_second']:,.0f} tokens/s  "
            f"{row['step_seconds']:.3f} s/step"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, numbers=numbers)
        elif step % self._every == 0 or step + 1 == self._steps:
            self.say(f"step {step + 1}/{self._steps}  {numbers}")

    def say(self, line: str) -> None:
        """Print a line; above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._out, flush=True)

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
