"""Step time of two programs that train the same model, taking turns on one machine, as a ratio.

    python benchmarks/against.py --rounds 5 --steps 2 \
        --ours '.venv-newer/bin/python -m jaxpar.bench step --each --config configs/peer.yaml ...' \
        --theirs 'COMMAND that prints "completed step: N, seconds: S"'

Both are started once; then one runs while the other is stopped (SIGSTOP), A B B A a round, so that neither pays its
start-up in the measurement and the machine's drift falls on both. A step that was under way when its program was stopped
does not count. Prints a row of a Markdown table: medians, the ratio of each round and their geometric mean.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

PATTERN = re.compile(r"completed step: \d+, seconds: ([\d.]+)")


class Program:
    """A process that prints the seconds of each step to a file, and runs only while it is its turn."""

    def __init__(self, command: str):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        self.process = subprocess.Popen(
            shlex.split(command),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def seconds(self) -> list[float]:
        """Seconds of every step so far."""
        return [float(s) for s in PATTERN.findall(self.log.read_text(errors="replace"))]

    def run(self, steps: int) -> list[float]:
        """Let the program complete `steps` steps, after the one that it was stopped in."""
        before = len(self.seconds())
        os.killpg(self.process.pid, signal.SIGCONT)
        while len(self.seconds()) < before + steps + 1:
            if self.process.poll() is not None:
                raise SystemExit(f"ended early; its output is in {self.log}")
            time.sleep(0.02)
        os.killpg(self.process.pid, signal.SIGSTOP)
        return self.seconds()[before + 1 : before + 1 + steps]

    def end(self) -> None:
        """Kill the program."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> None:
    """Compare, and print one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--theirs", required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    args = parser.parse_args()
    programs = [Program(args.ours)]
    programs[0].run(2)
    programs.append(Program(args.theirs))
    programs[1].run(3)  # its first reported steps are dispatch alone
    try:
        ratios, times = [], ([], [])
        for _ in range(args.rounds):
            turn: tuple[list[float], list[float]] = ([], [])
            for which in (0, 1, 1, 0):
                turn[which].extend(programs[which].run(args.steps))
            ratios.append(statistics.median(turn[0]) / statistics.median(turn[1]))
            for which in (0, 1):
                times[which].extend(turn[which])
    finally:
        for program in programs:
            program.end()
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    each = " ".join(f"{r:.3f}" for r in ratios)
    ours, theirs = (statistics.median(t) for t in times)
    print(f"| {args.name} | {ours:.3f} | {theirs:.3f} | {each} | {mean:.3f} |", flush=True)


if __name__ == "__main__":
    main()
