"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

PATIENCE = 2.0
"""Seconds before anything is shown: what is quick needs no report."""

_EVERY = 10.0
"""Seconds between lines."""

MB = 1e6


@contextlib.contextmanager
def shown(what: str, size: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes that were done since the last call.

    Args:
        what: the work, as the start of a line.
        size: bytes of all of it, about.
        say: prints a line, where there is no terminal.
    """
    start = told = time.monotonic()
    done = 0
    bar: rich.progress.Progress | None = None
    console = rich.console.Console(stderr=True)

    def advance(more: int) -> None:
        nonlocal done, told, bar
        done = min(done + more, size)
        now = time.monotonic()
        if now - start < PATIENCE:
            return
        if console.is_terminal:
            if bar is None:
                bar = _bar(console)
                bar.add_task(what, total=size)
                bar.start()
            bar.update(bar.task_ids[0], completed=done)
        elif told == start or now - told > _EVERY:
            told = now
            say(f"{what}: {_megabytes(done)} of {_megabytes(size)} MB, {_rate(done, now - start)}")

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()
    if (taken := time.monotonic() - start) >= PATIENCE:
        say(f"{what}: {_megabytes(size)} MB in {taken:.0f} s, {_rate(size, taken)}")


def _bar(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _megabytes(size: int) -> str:
    return f"{size / MB:,.0f}"


def _rate(size: int, seconds: float) -> str:
    return f"{size / MB / max(seconds, 1e-9):,.1f} MB/s"
