"""Inject faults into real runs, start them again, and compare what they end with with a run that nothing happened to.

    python benchmarks/faults.py [--seed 0] [--only NAME ...] [--out docs/faults.md]

Every fault: a run of 24 steps with a checkpoint every 4 is hurt at a random moment of a chosen phase, then the same
command is started again until it is done. A row of the table holds

    lost        steps taken before and taken again although a complete checkpoint held them (must be 0)
    ids         steps whose batch is not, exactly once, the batch of the undisturbed run (must be 0)
    end         same: parameters, moments and random key are bitwise those of the undisturbed run;
                refused: the run ended with an error that says why, and nothing was taken for good that is not

Read-only and full disks are small file systems in memory, which takes root; without it these rows say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from jaxpar.checkpoint.files import read_meta

ROOT = pathlib.Path(__file__).parent.parent
STEPS, EVERY = 24, 4
FLAGS = [
    *(
        "--layers",
        "2",
        "--embed",
        "64",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "16",
        "--mlp",
        "128",
    ),
    *(
        "--batch",
        "64",
        "--sequence",
        "128",
        "--steps",
        str(STEPS),
        "--warmup-steps",
        "2",
        "--zero",
        "1",
    ),
    *(
        "--checkpoint-every",
        str(EVERY),
        "--eval-every",
        "10",
        "--eval-batches",
        "20",
        "--sample-tokens",
        "0",
    ),
    *("--mesh", "2x1", "--dropout", "0.1", "--packing", "best_fit", "--keep-checkpoints", "4"),
]
PHASES = ("starting", "compiling", "stepping", "evaluating", "saving")


class Lab:
    """A folder with a corpus, a reference run and one run under test."""

    def __init__(self, home: pathlib.Path, seed: int):
        self.home, self.random = home, random.Random(seed)
        self.corpus = home / "corpus.jsonl"
        text = (ROOT / "README.md").read_text() + (ROOT / "jaxpar" / "layout.py").read_text()
        lines = [line for line in text.splitlines() if line.strip()] * 60
        with self.corpus.open("w") as file:
            for i in range(0, len(lines), 7):
                file.write(json.dumps({"text": "\n".join(lines[i : i + 7])}) + "\n")
        self.cache = home / "cache"
        self.compiled = home / "compiled"
        self.run = home / "run"

    def start(
        self, *flags: str, run: pathlib.Path | None = None, compiled: bool = True
    ) -> subprocess.Popen[str]:
        """The training command."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("JAX")}
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        if compiled:
            env |= {
                "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        command = [sys.executable, "-m", "jaxpar.train", *FLAGS, "--source", str(self.corpus)]
        command += ["--cache", str(self.cache), "--run-dir", str(run or self.run), *flags]
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *flags: str, run: pathlib.Path | None = None) -> tuple[int, str]:
        """(exit code, output) of a whole run."""
        process = self.start(*flags, run=run)
        out, _ = process.communicate(timeout=300)
        return process.returncode, out

    def rows(self, run: pathlib.Path | None = None) -> list[dict]:
        """Rows of steps so far."""
        path = (run or self.run) / "metrics.jsonl"
        if not path.exists():
            return []
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in map(json.loads, lines) if "loss" in row]

    def complete(self) -> int:
        """The newest checkpoint that Orbax finished, by its files alone; 0 for none."""
        folder = self.run / "checkpoints"
        names = [p.parent.name for p in folder.glob("*/_CHECKPOINT_METADATA")]
        return max((int(n) for n in names if n.isdigit()), default=0)

    def saving(self) -> bool:
        """Whether something unfinished lies among the checkpoints."""
        folder = self.run / "checkpoints"
        return folder.is_dir() and any("tmp" in p.name for p in folder.iterdir())

    def fingerprints(self, run: pathlib.Path) -> dict[str, str]:
        """Checksums of every leaf of the last checkpoint, once its files have been found to agree with them."""
        command = [
            sys.executable,
            "-m",
            "jaxpar.checkpoint",
            "verify",
            str(run),
            "--step",
            str(STEPS),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, cwd=self.home, env=env, capture_output=True, check=True)
        return read_meta(run / "checkpoints" / str(STEPS))["fingerprints"]


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120
) -> bool:
    """Poll until `condition`; False if the process ends first."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    raise TimeoutError


def reach(lab: Lab, phase: str, process: subprocess.Popen[str]) -> None:
    """Return at a random moment of a phase of the run."""
    rows = lambda: len(lab.rows())  # noqa: E731
    jitter = lab.random.random()
    if phase == "starting":
        time.sleep(0.05 + 2.0 * jitter)
    elif phase == "compiling":  # config.yaml is written just before
        wait_for((lab.run / "config.yaml").exists, process)
        time.sleep(1.5 * jitter)
    elif phase == "stepping":
        count = lab.random.randrange(1, STEPS - 2)
        wait_for(lambda: rows() >= count, process)
    elif phase == "evaluating":
        count = lab.random.choice((10, 20))
        wait_for(lambda: rows() >= count, process)
        time.sleep(0.05 * jitter)
    else:
        after = lab.random.choice((4, 8, 12, 16, 20))
        wait_for(lambda: rows() >= after and lab.saving(), process)
        time.sleep(0.03 * jitter)


def kill(number: signal.Signals, phase: str) -> Callable[[Lab], list[str]]:
    """A signal in a phase."""

    def fault(lab: Lab) -> list[str]:
        process = lab.start(compiled=phase != "compiling")
        reach(lab, phase, process)
        sent = time.monotonic()
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
        said = [line for line in out.splitlines() if line.startswith(number.name)]
        took = f"{time.monotonic() - sent:.1f} s"
        return [f"exit {process.returncode} after {took}", said[0] if said else ""]

    return fault


def full_disk(lab: Lab) -> list[str]:
    """The disk of the run folder, a small file system in memory, is filled up while the run writes to it."""
    lab.run.mkdir()
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(lab.run))
    kept = lab.home / "kept"
    try:
        process = lab.start()
        reach(lab, lab.random.choice(("stepping", "saving")), process)
        with contextlib.suppress(OSError), open(lab.run / "filler", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        out, _ = process.communicate(timeout=120)
        (lab.run / "filler").unlink()
        shutil.copytree(lab.run, kept)
    finally:
        subprocess.run(["umount", "-l", str(lab.run)], check=True)
        lab.run.rmdir()
    kept.rename(lab.run)
    return ended(process, out)


def read_only_disk(lab: Lab) -> list[str]:
    """The run folder becomes read-only, as file systems do after an error of the disk."""
    process = lab.start()
    reach(lab, lab.random.choice(("stepping", "saving")), process)
    mount("--bind", str(lab.run), str(lab.run))
    try:
        mount("-o", "remount,bind,ro", str(lab.run))
        out, _ = process.communicate(timeout=120)
    finally:
        subprocess.run(["umount", "-l", str(lab.run)], check=True)
    return ended(process, out)


def mount(*arguments: str) -> None:
    """Mount a file system.

    Raises:
        PermissionError: not root, or not allowed here.
    """
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"needs root, to mount a small file system: {done.stderr.strip()}")


def ended(process: subprocess.Popen[str], out: str) -> list[str]:
    """Exit code and error of a run."""
    said = [line for line in out.splitlines() if line.startswith("error:")]
    return [f"exit {process.returncode}", said[0] if said else ""]


def damage(path: pathlib.Path, how: str, rng: random.Random) -> None:
    """Truncate, delete or flip one bit of a file."""
    if how == "deleted":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: rng.randrange(len(data))]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def checkpoint_file(how: str) -> Callable[[Lab], list[str]]:
    """One file of the newest checkpoint is damaged."""

    def fault(lab: Lab) -> list[str]:
        code, out = lab.finish("--stop-after", "16")
        assert code == 0, out
        newest = lab.run / "checkpoints" / "16"
        files = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
        chosen = lab.random.choice(files)
        damage(chosen, how, lab.random)
        return [f"{chosen.relative_to(newest)} {how}", ""]

    return fault


def cache_file(how: str) -> Callable[[Lab], list[str]]:
    """One file of the token cache is damaged between two starts."""

    def fault(lab: Lab) -> list[str]:
        code, out = lab.finish("--stop-after", "10")
        assert code == 0, out
        files = sorted(p for p in lab.cache.rglob("*") if p.is_file() and p.stat().st_size)
        chosen = lab.random.choice(files)
        damage(chosen, how, lab.random)
        return [f"{chosen.name} {how}", ""]

    return fault


def empty_checkpoint(lab: Lab) -> list[str]:
    """An empty folder with the name of a later step."""
    code, out = lab.finish("--stop-after", "12")
    assert code == 0, out
    (lab.run / "checkpoints" / "20").mkdir()
    return ["empty folder 20", ""]


def all_damaged(lab: Lab) -> list[str]:
    """Every checkpoint is damaged: nothing is left to go on from."""
    code, out = lab.finish("--stop-after", "8")
    assert code == 0, out
    for path in (lab.run / "checkpoints").glob("*/state"):
        for file in [p for p in path.rglob("*") if p.is_file()]:
            file.write_bytes(b"")
    return ["all arrays emptied", ""]


def two_writers(lab: Lab) -> list[str]:
    """Two processes start on one run folder at once."""
    first, second = lab.start(), lab.start()
    outs = [p.communicate(timeout=200)[0] for p in (first, second)]
    codes = sorted(p.returncode for p in (first, second))
    said = [line for out in outs for line in out.splitlines() if line.startswith("error:")]
    return [f"exits {codes}", said[0] if said else ""]


def two_builders(lab: Lab) -> list[str]:
    """Two processes build one token cache at once, for runs of their own."""
    shutil.rmtree(lab.cache, ignore_errors=True)
    other = lab.home / "other"
    first, second = lab.start(), lab.start(run=other)
    codes = [p.communicate(timeout=200) and p.returncode for p in (first, second)]
    shutil.rmtree(other)
    return [f"exits {codes}", ""]


def faults() -> Iterator[tuple[str, Callable[[Lab], list[str]]]]:
    """(name, fault) of the whole table."""
    for number, times in ((signal.SIGTERM, 2), (signal.SIGINT, 1), (signal.SIGKILL, 2)):
        for phase in PHASES:
            more = 8 if number == signal.SIGKILL and phase == "saving" else 0
            for _ in range(times + more):
                yield f"{number.name} while {phase}", kill(number, phase)
    for _ in range(3):
        yield "disk full", full_disk
        yield "disk read-only", read_only_disk
    for how in ("truncated", "deleted", "bit flipped"):
        for _ in range(4):
            yield f"checkpoint file {how}", checkpoint_file(how)
        for _ in range(2):
            yield f"token cache file {how}", cache_file(how)
    yield "empty checkpoint folder", empty_checkpoint
    yield "all checkpoints damaged", all_damaged
    for _ in range(2):
        yield "two writers", two_writers
        yield "two cache builders", two_builders


def outcome(lab: Lab, wanted: dict[int, int], marks: dict) -> tuple[str, int, int, int, str]:
    """Start again until done: (end, starts, lost steps, wrong ids, what was said)."""
    starts, lost, said = 0, 0, ""
    while True:
        newest = lab.complete()
        code, out = lab.finish()
        starts += 1
        notes = [line for line in out.splitlines() if "damaged" in line or "set aside" in line]
        said = said or (notes[0] if notes else "")
        resumed = next(
            (line for line in out.splitlines() if line.startswith("going on from checkpoint")), ""
        )
        at = int(resumed.split()[4]) if resumed else 0
        if not notes:
            lost += max(0, newest - at)
        if code == 0:
            break
        if code in (1, 2):
            errors = [line for line in out.splitlines() if line.startswith("error:")]
            return "refused", starts, lost, 0, errors[0] if errors else out[-200:]
        if starts > 3:
            return "never done", starts, lost, 0, out[-200:]
    rows = lab.rows()
    got = {row["step"]: row["data_crc"] for row in rows}
    wrong = sum(got.get(s) != crc for s, crc in wanted.items()) + len(rows) - len(got)
    end = "same" if lab.fingerprints(lab.run) == marks else "DIFFERENT"
    return end, starts, lost, wrong, said


def main() -> None:
    """Run all faults and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(pathlib.Path(folder), args.seed)
        reference = lab.home / "reference"
        code, out = lab.finish(run=reference)
        assert code == 0, out
        wanted = {row["step"]: row["data_crc"] for row in lab.rows(reference)}
        marks = lab.fingerprints(reference)
        chosen = [(n, f) for n, f in faults() if not args.only or any(o in n for o in args.only)]
        for i, (name, fault) in enumerate(chosen):
            shutil.rmtree(lab.run, ignore_errors=True)
            since = time.monotonic()
            try:
                what, said = fault(lab)
                end, starts, lost, wrong, more = outcome(lab, wanted, marks)
            except PermissionError as error:
                what, said, end, starts, lost, wrong, more = "not run", str(error), "-", 0, 0, 0, ""
            cells = [
                str(i + 1),
                name,
                what,
                end,
                str(starts),
                str(lost),
                str(wrong),
                _short(said or more),
            ]
            table.append("| " + " | ".join(cells) + " |")
            print(table[-1], f"({time.monotonic() - since:.0f} s)", flush=True)
    head = [
        "| # | fault | at once | end | starts | lost | ids | said |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if args.out:
        ends = [row.split(" | ")[3] for row in table]
        counts = ", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends), reverse=True))
        intro = f"# Faults and what became of them\n\n`python benchmarks/faults.py --seed {args.seed} --out {args.out}`\n\n"
        doc = "\n".join(line.strip() for line in (__doc__ or "").splitlines()[4:]).strip()
        summary = f"{len(table)} faults: {counts}.\n\n"
        args.out.write_text(intro + doc + "\n\n" + summary + "\n".join(head + table) + "\n")


def _short(text: str) -> str:
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", text).replace(str(ROOT), "")
    text = text.replace("|", "/")
    return text if len(text) <= 160 else text[:160].rsplit(" ", 1)[0] + " ..."


if __name__ == "__main__":
    main()
