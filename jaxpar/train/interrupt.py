"""SIGTERM and SIGINT in any phase of a run: the run is saved once and ends with exit code 75.

```
signal ─► C handler writes a byte to a socket ─► thread reads it, whatever the main thread is in
                                                   │
      nothing unsaved (reading data, compiling) ◄──┴──► a step, an evaluation or a save is under way
      says so and leaves at once                        the loop sees `requested` and saves
```

A handler in Python alone would run when the main thread is back from XLA: after a compilation of minutes, past
the grace that a scheduler gives.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

INTERRUPTED = 75
"""Exit code of a run that was told to stop and lost nothing: start it again (EX_TEMPFAIL of sysexits.h)."""

_FORCE = 3
"""This many SIGINTs end a run without saving: somebody is at the keyboard and means it."""


class Interrupted(Exception):
    """A phase that was given up because the run is to stop."""


class Interrupts:
    """Turns SIGTERM and SIGINT into a request that a run polls; a context manager around it.

    Must be entered in the main thread (`signal.signal`). Handlers and wake-up descriptor are as before afterwards.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.phase = "starting"
        self._unsaved = False
        self._lock = threading.Lock()
        self._count = 0
        self._saved = "no new step was taken"

    def __enter__(self) -> Interrupts:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = {s: signal.signal(s, _noted) for s in (signal.SIGTERM, signal.SIGINT)}
        self._before_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._before_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._write.close()
        self._thread.join(timeout=1)
        self._read.close()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name what the run is doing, for the line that a signal prints."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def holds_unsaved(self) -> None:
        """From here on a stop has to save first."""
        with self._lock:
            self._unsaved = True

    def holds_saved(self, what: str) -> None:
        """All there is has been saved (or nothing has been done): a stop may leave at once.

        Args:
            what: the line's end, such as ``checkpoint 40 is complete``.
        """
        with self._lock:
            self._unsaved, self._saved = False, what

    def check(self) -> None:
        """Raise `Interrupted` if the run is to stop: for phases that can be given up."""
        if self.requested:
            raise Interrupted(self.requested)

    def _watch(self) -> None:
        while number := self._read.recv(1):
            if number[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            name = signal.Signals(number[0]).name
            self._count += number[0] == signal.SIGINT
            with self._lock:
                first, self.requested = self.requested is None, self.requested or name
                if not self._unsaved:
                    _leave(
                        f"{name} while {self.phase}: nothing to save, {self._saved}", INTERRUPTED
                    )
            if self._count >= _FORCE:
                _leave(f"{name} for the third time: leaving without saving", 1)
            if first:
                _say(f"{name} while {self.phase}: saving, then stopping")
            else:
                _say(f"{name} again: already saving and stopping")


def _noted(number: int, frame: object) -> None:
    """A Python handler must exist for the wake-up byte to be written; the thread does the rest."""


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())  # the main thread may hold the lock of sys.stderr


def _leave(line: str, code: int) -> None:
    """End the process from any thread, at once: no clean-up may wait for a compiler."""
    _say(line)
    for child in multiprocessing.active_children():
        child.kill()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
