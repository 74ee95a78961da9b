"""The covering matrix of the equality tests: every pair of values of two factors in some row.

In: the factors and the combinations that do not exist. Out: tests/pairs.csv, by

    python tests/pairs.py --write

Why: all combinations are thousands of compilations; nearly all defects need one or two factors to
show (Kuhn, Wallace and Gallo 2004), and a few dozen rows hold every pair. The generator is greedy
and has no randomness, so the same factors always give the same file.
"""

import csv
import itertools
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

CSV = Path(__file__).with_name("pairs.csv")

# Largest first: the greedy rows then waste the fewest pairs.
FACTORS: Mapping[str, tuple[str, ...]] = {
    "mesh": ("1", "8x1", "4x2", "2x4", "1x8", "replica=2,data=2,model=2"),
    "zero": ("0", "1", "2", "3"),
    "microbatches": ("1", "4"),
    "remat": ("none", "full"),
    "tied": ("True", "False"),
    "style": ("llama", "gpt2"),
    "kv_heads": ("8", "2"),
    "vocab": ("64", "65"),
    "loss_chunks": ("1", "4"),
    "z_loss": ("0.0", "0.001"),
    "sequence_parallel": ("True", "False"),
    # Bytes up to which a leaf moves once a step: 0 moves every leaf at its use, as in large models.
    "small": ("0", "1000000"),
}

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def allowed(row: Row) -> bool:
    """Whether the (perhaps partial) row exists: GPT-2 has as many kv heads as heads."""
    return (row.get("style"), row.get("kv_heads")) != ("gpt2", "2")


def pairs_of(row: Row) -> set[Pair]:
    """Every pair of (factor, value) in the row, in the order of FACTORS."""
    items = [(factor, row[factor]) for factor in FACTORS if factor in row]
    return set(itertools.combinations(items, 2))


def every_pair() -> set[Pair]:
    """Every pair of values of two factors that can exist."""
    return {
        ((a, value_a), (b, value_b))
        for a, b in itertools.combinations(FACTORS, 2)
        for value_a, value_b in itertools.product(FACTORS[a], FACTORS[b])
        if allowed({a: value_a, b: value_b})
    }


def generate() -> list[Row]:
    """Rows that hold every pair.

    Each row starts from the first missing pair and grows factor by factor, by the value that adds
    the most missing pairs; on a tie, by the one whose pairs were used least, which mixes the rows
    so that they also hold many triples.
    """
    rank = {(f, v): (i, j) for i, f in enumerate(FACTORS) for j, v in enumerate(FACTORS[f])}
    missing, used, rows = every_pair(), Counter(), []

    def gain(row: Row) -> tuple[int, int]:
        return len(pairs_of(row) & missing), -sum(used[pair] for pair in pairs_of(row))

    while missing:
        row: Row = dict(min(missing, key=lambda pair: [rank[item] for item in pair]))
        for factor, values in FACTORS.items():
            if factor not in row:
                row = max(filter(allowed, [row | {factor: v} for v in values]), key=gain)
        rows.append({factor: row[factor] for factor in FACTORS})
        used.update(pairs_of(row))
        missing -= pairs_of(row)
    return rows


def text(rows: list[Row]) -> str:
    """The rows as CSV with a header."""
    lines = [list(FACTORS)] + [list(row.values()) for row in rows]
    return "".join(
        ",".join(f'"{cell}"' if "," in cell else cell for cell in line) + "\n" for line in lines
    )


def read(path: Path = CSV) -> list[Row]:
    """The committed rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(arguments: list[str]) -> int:
    """Print the matrix, or write it with --write. Returns the exit code."""
    if arguments not in ([], ["--write"]):
        print("usage: python tests/pairs.py [--write]", file=sys.stderr)
        return 2
    table = text(generate())
    if arguments:
        CSV.write_text(table)
    else:
        print(table, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
