"""Tokens a second of packed batches, against plain slicing of the same token file, taking turns in one process.

    python benchmarks/loader.py [--megabytes 256] [--rounds 5] [--seconds 1.5] [--rows 32 128]

The file is made on the spot: random ids of 16 bits in documents of log-normal lengths (median 600 tokens, mean about
1200, as web text has). Ours is the whole loader: order, packing, positions, segments, and Grain's threads. Plain is what
nanoGPT does, in one thread: for each row a random offset, a slice of the memory-mapped file and the same slice one token
later, stacked; as int32, which is what a batch of ours holds, and as int64, which is what nanoGPT makes; but the file is
opened once, and not for every batch, and sliced as a plain array. They take turns A B A B. Prints a Markdown table of
medians, the median of the ratios of neighbouring turns, and the peak of this process's own memory (without the pages of
the file) while ours ran.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil

from jaxpar import data
from jaxpar.data import best_fit
from jaxpar.data.packing import BestFit, Concatenated


def make_store(folder: pathlib.Path, megabytes: int) -> data.TokenStore:
    """A token file of so many MB, opened as the loader opens one."""
    generator = np.random.default_rng(0)
    total = megabytes * 2**20 // 2
    path = folder / "tokens.bin"
    with path.open("wb") as file:
        for begin in range(0, total, 2**22):
            size = min(2**22, total - begin)
            file.write(generator.integers(1, 50_257, size, dtype=np.uint16).tobytes())
    lengths = np.exp(generator.normal(np.log(600), 1.18, total // 500)).astype(np.int64) + 2
    ends = np.cumsum(lengths)
    offsets = np.concatenate([[0], ends[: np.searchsorted(ends, total)], [total]])
    return data.TokenStore(
        tokens=np.memmap(path, np.uint16, "r"), offsets=offsets, mask=None, name=path.name,
        fingerprint="benchmark", files=(path.name,), first=(0,), largest=50_256,
    )  # fmt: skip


def plain(path: pathlib.Path, rows: int, seq: int, dtype: type) -> Iterator[int]:
    """Batches by slices at random places; yields their tokens."""
    generator = np.random.default_rng(1)
    # A slice of np.memmap itself costs ten times as much, which would flatter ours.
    tokens = np.asarray(np.memmap(path, np.uint16, "r"))
    while True:
        starts = generator.integers(0, len(tokens) - seq, rows)
        x = np.stack([tokens[i : i + seq].astype(dtype) for i in starts])
        y = np.stack([tokens[i + 1 : i + 1 + seq].astype(dtype) for i in starts])
        yield (x.size + y.size) // 2


def loader(rows: data.TrainBatches) -> Iterator[int]:
    """Batches of the loader; yields their tokens."""
    group = rows.together(rows.rows)
    for batch in data.prefetch_groups(rows.batches, range(10**9), group=group):
        yield batch["tokens"].size


def rate(batches: Iterator[int], seconds: float) -> float:
    """Tokens a second over about so many seconds."""
    next(batches)  # what was made while the other had its turn does not count
    begin, tokens = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        tokens += next(batches)
    return tokens / (now - begin)


class Memory:
    """Peak of the memory that is this process's own, over what it was: pages of files not counted."""

    def __init__(self) -> None:
        self._begin = self._peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, self._now())

    def peak(self) -> int:
        """Bytes."""
        return self._peak - self._begin

    def stop(self) -> None:
        """End the thread that watches."""
        self._done.set()
        self._thread.join()


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one turn")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128], help="rows a batch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(pathlib.Path(folder), args.megabytes)
        path = pathlib.Path(folder) / "tokens.bin"
        print(
            f"{len(store.tokens):,} tokens in {len(store):,} documents; millions of tokens a second, "
            f"medians of {args.rounds} rounds; load average {os.getloadavg()[0]:.1f}\n"
        )
        print(
            "| packing | batch | ours | plain int32 | ratio | plain int64 | ratio | plan | own memory |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for packing, seq in itertools.product(("best_fit", "concatenate"), (1024, 2048)):
            memory = Memory()
            plan = ""
            if packing == "best_fit":
                begin = time.perf_counter()
                source = BestFit(store, seq, best_fit.make(store, seq))
                plan = f"{time.perf_counter() - begin:.2f} s"
            else:
                source = Concatenated(store, seq)
            for rows in args.rows:
                batches = data.TrainBatches([source], rows=rows, seed=0, vocab=50_257)
                turns = {
                    "ours": loader(batches),
                    "int32": plain(path, rows, seq, np.int32),
                    "int64": plain(path, rows, seq, np.int64),
                }
                rates = take_turns(turns, args.rounds, args.seconds)
                turns["ours"].close()
                median = {name: statistics.median(values) / 1e6 for name, values in rates.items()}
                ratio = {
                    name: statistics.median(map(operator.truediv, rates["ours"], rates[name]))
                    for name in ("int32", "int64")
                }
                print(
                    f"| {packing} | {rows} x {seq} | {median['ours']:.0f} "
                    f"| {median['int32']:.0f} | {ratio['int32']:.2f} "
                    f"| {median['int64']:.0f} | {ratio['int64']:.2f} "
                    f"| {plan} | {memory.peak() / 2**20:.0f} MiB |",
                    flush=True,
                )
            memory.stop()


def take_turns(
    turns: dict[str, Iterator[int]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Tokens a second of each, in each round."""
    for turn in turns.values():
        rate(turn, seconds / 3)  # pages come in, threads start
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            rates[name].append(rate(turn, seconds))
    return rates


if __name__ == "__main__":
    main()
