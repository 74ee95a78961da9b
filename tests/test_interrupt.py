"""Signals in a process of their own: what it says, when it leaves, and with which code."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxpar.train.interrupt import Interrupted, Interrupts

ROOT = pathlib.Path(__file__).parent.parent

# A main thread that is deaf, as in a compilation: a C call that comes back after seconds.
DEAF = """
import hashlib, sys, time
from jaxpar.train.interrupt import Interrupts
with Interrupts() as interrupts, interrupts.during("compiling"):
    {hold}
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 12_000_000)
    end = time.monotonic() + 5
    while not interrupts.requested and time.monotonic() < end:
        time.sleep(0.01)
    print("saved", interrupts.requested, flush=True)
    sys.exit(75)
"""


def deaf(hold: str, *signals: signal.Signals) -> tuple[int, str, str, float]:
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF.format(hold=hold)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    since = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err, time.monotonic() - since


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_unsaved_leaves_at_once_though_the_main_thread_is_in_c(number) -> None:
    """Case C9: the flag was polled at step boundaries alone, and a compilation outlived the grace."""
    code, _, err, seconds = deaf("interrupts.holds_saved('checkpoint 8 is complete')", number)
    assert code == 75
    assert seconds < 4
    assert f"{number.name} while compiling: nothing to save, checkpoint 8 is complete" in err


def test_what_is_unsaved_is_saved_once_however_often_the_signal_comes() -> None:
    code, out, err, _ = deaf("interrupts.holds_unsaved()", signal.SIGTERM, signal.SIGTERM)
    assert (code, out) == (75, "saved SIGTERM\n")
    assert err.count("saving, then stopping") == 1


def test_three_times_from_the_keyboard_leaves_without_saving() -> None:
    code, out, err, seconds = deaf("interrupts.holds_unsaved()", *[signal.SIGINT] * 3)
    assert (code, out) == (1, "")
    assert seconds < 4
    assert "leaving without saving" in err


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        interrupts.holds_unsaved()
        signal.raise_signal(signal.SIGINT)
        end = time.monotonic() + 5
        while interrupts.requested is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(Interrupted, match="SIGINT"):
            interrupts.check()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
