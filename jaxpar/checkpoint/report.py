"""What a person asks of checkpoints that are there: what they are, whether they are whole, how two differ.

In: a folder and a step. Out: lines and rows of text; nothing is written, no device is needed, and a run may be writing
to the folder meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from rich.filesize import decimal

from jaxpar.checkpoint import files, forms, restoring
from jaxpar.checkpoint.files import CheckpointError, Damaged
from jaxpar.checkpoint.restoring import Source

HIGHLIGHTS = (
    "mesh", "zero", "precision", "steps", "seed",
    "model.preset", "model.style", "model.layers", "model.embed", "model.vocab",
    "optimizer.optimizer", "optimizer.learning_rate", "data.source", "data.batch", "data.sequence",
)  # fmt: skip
"""Fields of the config that `show` prints."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A checkpoint whose metadata are read and its arrays not."""

    path: pathlib.Path
    meta: dict[str, Any]
    sources: dict[str, Source]

    def read(self, name: str) -> np.ndarray:
        """A leaf, verified.

        Raises:
            Damaged: it cannot be read, or is not what was saved.
        """
        return forms.read(self.path, self.sources[name], self.meta["fingerprints"])


def opened(folder: pathlib.Path, step: int | None) -> Opened:
    """The checkpoint of a step, by default the newest that is complete.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    there = files.steps(folder)
    if step is None and not there:
        raise CheckpointError(f"no complete checkpoint under {folder}")
    if step is not None and step not in files.numbered(folder):
        raise CheckpointError(f"no checkpoint of step {step} under {folder}: there are {there}")
    path = folder / str(there[-1] if step is None else step)
    meta = files.read_meta(path)
    return Opened(path, meta, restoring.sources(path, meta))


def rows(folder: pathlib.Path, step: int | None = None) -> list[tuple[str, ...]]:
    """(step, size, saved at, metric, complete or why not) of everything in a folder."""
    out = []
    for n in files.numbered(folder):
        path = folder / str(n)
        if step not in (None, n):
            continue
        try:
            meta, size = files.read_meta(path), decimal(files.nbytes(path))
        except Damaged as error:
            out.append((str(n), "", "", "", f"no: {str(error).removeprefix(f'{path}: ')}"))
            continue
        except FileNotFoundError:  # deleted by its run just now
            continue
        metric = "" if meta["metric"] is None else f"{meta['metric']:.4f}"
        out.append((str(n), size, meta["saved_at"], metric, "yes"))
    whole = {str(n) for n in files.numbered(folder)}
    lines = [line.split(": ", 1) for line in files.incomplete(folder)] if step is None else []
    return out + [(name, "", "", "", f"no: {why}") for name, why in lines if name not in whole]


def described(checkpoint: Opened, *, leaves: bool = False) -> list[str]:
    """Lines about one checkpoint."""
    meta, sources = checkpoint.meta, checkpoint.sources
    form = meta["form"]["name"] + (", weights only" if meta["form"]["weights"] else "")
    arrays = sum(_nbytes(s) for s in sources.values())
    lines = [
        f"{checkpoint.path}",
        f"step        {meta['step']}, saved {meta['saved_at']}",
        f"leaves      {len(sources)} ({form}), {arrays:,} bytes; {decimal(files.nbytes(checkpoint.path))} on disk",
    ]
    if meta["metric"] is not None:
        lines.append(f"metric      {meta['metric']:.6g}")
    lines += [f"{name:11} {value}" for name, value in _facts(meta)]
    if leaves:
        prints = meta["fingerprints"]
        width = max(map(len, sources), default=0)
        lines += [
            f"{name:{width}}  {source.whole}  {prints[source.names[0]] if not source.stacked else 'one a layer'}"
            for name, source in sources.items()
        ]
    return lines


def _facts(meta: dict[str, Any]) -> Iterable[tuple[str, str]]:
    config = meta.get("config") or {}
    flat = {k: v for k, v in config.items() if not isinstance(v, dict)}
    for section, inner in config.items():
        if isinstance(inner, dict):
            flat |= {f"{section}.{k}": v for k, v in inner.items()}
    shown = ", ".join(f"{k} {flat[k]}" for k in HIGHLIGHTS if k in flat)
    if shown:
        yield "config", shown
    if meta.get("data"):
        yield "data", ", ".join(f"{k} {v}" for k, v in meta["data"].items())
    if meta.get("skipped"):
        yield "skipped", f"{len(meta['skipped'])} steps: {meta['skipped'][:10]}"
    yield "versions", ", ".join(f"{k} {v}" for k, v in meta["versions"].items())


def wrong_leaves(
    folder: pathlib.Path, step: int, over: Callable[[list[str]], Iterable[str]] = iter
) -> tuple[int, dict[str, str]]:
    """(number of leaves, path of each that is damaged -> why); "" stands for the checkpoint as a whole.

    Args:
        over: walks through the leaves, and may show how far it is.
    """
    try:
        checkpoint = opened(folder, step)
    except Damaged as error:
        return 0, error.leaves or {"": str(error)}
    wrong: dict[str, str] = {}
    for name in over(list(checkpoint.sources)):
        try:
            checkpoint.read(name)
        except Damaged as error:
            reason = str(error).removeprefix(f"{checkpoint.path}: ")
            wrong |= error.leaves or {name: reason}
    return len(checkpoint.sources), wrong


def differences(a: Opened, b: Opened) -> list[str]:
    """One line for each leaf that is not the same in both; values that are equal by fingerprint are not read.

    Raises:
        Damaged: a leaf whose values had to be read is damaged.
    """
    lines = [f"{name}: only in {a.path}" for name in a.sources if name not in b.sources]
    lines += [f"{name}: only in {b.path}" for name in b.sources if name not in a.sources]
    for name, one in a.sources.items():
        other = b.sources.get(name)
        if other is None:
            continue
        if one.whole != other.whole:
            lines.append(f"{name}: {one.whole} and {other.whole}")
            if one.whole.shape != other.whole.shape:
                continue
        elif one.names == other.names and all(
            a.meta["fingerprints"][n] == b.meta["fingerprints"][n] for n in one.names
        ):
            continue
        x, y = a.read(name), b.read(name)
        if one.whole.dtype != other.whole.dtype or x.tobytes() != y.tobytes():
            lines.append(f"{name}: {_difference(x, y)}")
    return lines


def _difference(x: np.ndarray, y: np.ndarray) -> str:
    x, y = x.astype(np.float64), y.astype(np.float64)
    unequal = ~((x == y) | (np.isnan(x) & np.isnan(y)))
    with np.errstate(invalid="ignore"):
        gaps = np.abs(x - y)[unequal]
    largest = np.max(gaps, initial=0.0)
    if math.isnan(largest):
        return f"values differ in {unequal.sum():,} of {x.size:,}, some of them not numbers"
    return f"values differ in {unequal.sum():,} of {x.size:,}, by at most {largest:.6g}"


def _nbytes(source: Source) -> int:
    return math.prod(source.whole.shape) * source.whole.dtype.itemsize
