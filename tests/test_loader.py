"""The whole loader: from a config to batches, the same on every number of processes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from jaxpar import data
from jaxpar.config.schema import DataConfig
from jaxpar.data.packing import IGNORED

PACKINGS = ("stream", "concatenate", "best_fit")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> pathlib.Path:
    """Two folders of texts and a file: poems/, notes/, other.txt."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    for name, files in (("poems", 40), ("notes", 60)):
        (folder / name).mkdir()
        for i in range(files):
            length = int(generator.integers(1, 400))
            letters = generator.integers(97, 123, length).astype(np.uint8).tobytes().decode()
            (folder / name / f"{i}.txt").write_text(f"{name} {i} {letters}")
    (folder / "other.txt").write_text("something else to be evaluated on " * 20)
    return folder


def config(texts: pathlib.Path, **more) -> DataConfig:
    mixture = {str(texts / "poems"): 3.0, str(texts / "notes"): 1.0}
    return DataConfig(
        **{"source": mixture, "cache": str(texts / "cache"), "batch": 8, "sequence": 32} | more
    )


def build(texts: pathlib.Path, *, seed: int = 0, vocab: int = 256, **more) -> data.Dataset:
    return data.build(config(texts, **more), seed=seed, vocab=vocab, say=lambda _: None)


# ---- from a config ------------------------------------------------------------------------------


def segments(batch: dict[str, np.ndarray]) -> list[list[bytes]]:
    """Texts in each row, without padding."""
    if "segments" not in batch:
        return [[bytes(row)] for row in batch["tokens"].tolist()]
    return [
        [bytes(tokens[of == n].tolist()) for n in range(1, of.max() + 1)]
        for tokens, of in zip(batch["tokens"], batch["segments"], strict=True)
    ]


@pytest.mark.core
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_dataset_trains_on_every_row_and_evaluates_on_other_files(texts, packing: str) -> None:
    dataset = build(texts, packing=packing)
    stores = [rows.store for rows in dataset.train.sources]
    read = set()
    step = 0
    while len(read) < sum(map(len, dataset.train.sources)):
        batch, ids = dataset.train.batch(step), dataset.train.ids(step)
        for row, (source, index) in zip(segments(batch), ids.tolist(), strict=True):
            read.add((source, index))
            for text in row:
                assert text in stores[source].tokens.tobytes()
        step += 1
        assert step < 500
    held = [rows.store for rows in dataset.heldout.sources]
    batches = [dataset.heldout.batch(i) for i in range(len(dataset.heldout))]
    texts_held = [text for b in batches for row in segments(b) for text in row]
    both = b"".join(store.tokens.tobytes() for store in held)
    assert all(text.rstrip(b"\0") in both for text in texts_held)
    for kept, aside in zip(stores, held, strict=True):
        assert not set(kept.files) & set(aside.files)
        assert aside.files
    expected = {"tokens", "targets", "row_id"}
    if packing != "stream":
        expected |= {"positions", "segments"}
    assert set(batch) == set(batches[0]) == expected


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_dataset_is_the_same_when_built_again(texts, packing: str) -> None:
    one, two = build(texts, packing=packing), build(texts, packing=packing)
    assert one.fingerprint == two.fingerprint
    assert json.loads(json.dumps(one.fingerprint)) == one.fingerprint
    for step in (0, 5, 10**9):
        for name, array in one.train.batch(step).items():
            np.testing.assert_array_equal(two.train.batch(step)[name], array)


def test_the_fingerprint_tells_what_changes_the_order(texts) -> None:
    mixed = {str(texts / "poems"): 3.0, str(texts / "notes"): 1.0}
    variants = [
        build(texts),
        build(texts, seed=1),
        build(texts, batch=4),
        build(texts, sequence=16),
        build(texts, packing="best_fit"),
        build(texts, packing="concatenate"),
        build(texts, source=mixed | {str(texts / "notes"): 2.0}),
        build(texts, source=dict(reversed(mixed.items()))),
        build(texts, source=str(texts / "poems")),
        build(texts, heldout=str(texts / "other.txt")),
    ]
    prints = [json.dumps(v.fingerprint, sort_keys=True) for v in variants]
    assert len(set(prints)) == len(prints)
    same = build(texts, source={name: 7 * weight for name, weight in mixed.items()})
    assert json.dumps(same.fingerprint, sort_keys=True) == prints[0]


def test_a_source_to_evaluate_on(texts) -> None:
    dataset = build(texts, heldout=str(texts / "other.txt"), source=str(texts / "poems"))
    tokens = np.concatenate(
        [dataset.heldout.batch(i)["tokens"].ravel() for i in range(len(dataset.heldout))]
    )
    text = (texts / "other.txt").read_bytes()
    assert bytes(tokens.tolist()).rstrip(b"\0") == text
    # Nothing of the training source is held out then.
    files = dataset.train.sources[0].store.files
    assert len(files) == 40


def test_a_dataset_says_what_is_read(texts) -> None:
    line = str(build(texts))
    assert "\n" not in line
    assert "75.0%" in line
    assert "held out: " in line
    assert "documents of " in line
    assert "%" not in str(build(texts, source=str(texts / "poems")))


def test_errors_before_the_first_step(texts) -> None:
    with pytest.raises(data.DataError, match=r"txt, row 1: .*outside the vocabulary"):
        build(texts, vocab=100)
    with pytest.raises(data.DataError, match=r"do not fill one window of 100000 .*data\.sequence"):
        build(texts, sequence=100_000)
    with pytest.raises(data.DataError, match="do not fill one row of 100000"):
        build(texts, sequence=100_000, packing="best_fit")
    (texts / "short.txt").write_text("abc")
    with pytest.raises(data.DataError, match=r"nothing to evaluate on.*data\.heldout"):
        build(texts, source=str(texts / "short.txt"), sequence=1)


def test_a_plan_is_kept_beside_the_tokens(texts) -> None:
    build(texts, packing="best_fit")
    assert list((texts / "cache" / "plans").glob("*/start.npy"))


def test_batches_are_read_ahead_in_threads(texts) -> None:
    dataset = build(texts, packing="best_fit")
    names: set[str] = set()

    def make(step: int) -> dict[str, np.ndarray]:
        names.add(threading.current_thread().name)
        return dataset.train.batch(step)

    steps = [0, 1, 2, 5, 6, 10**9, 3]  # a run that leaves some out
    for step, batch in zip(steps, data.prefetch(make, steps), strict=True):
        np.testing.assert_array_equal(batch["row_id"], dataset.train.batch(step)["row_id"])
        np.testing.assert_array_equal(batch["tokens"], dataset.train.batch(step)["tokens"])
    assert threading.current_thread().name not in names


@pytest.mark.parametrize("packing", ["stream", "concatenate", "best_fit"])
def test_several_steps_read_together_are_the_same_batches(texts, packing: str) -> None:
    train = build(texts, packing=packing).train
    steps = [3, 4, 7, 10**9, 0]  # over the ends of epochs and of cycles of the order
    for rows in (None, np.array([1, 0]), slice(1, 2)):
        for step, batch in zip(steps, train.batches(steps, rows), strict=True):
            alone = train.batch(step, rows)
            assert set(batch) == set(alone)
            for name, values in alone.items():
                np.testing.assert_array_equal(batch[name], values)
                assert batch[name].dtype == values.dtype


def test_large_batches_are_read_one_at_a_time(texts) -> None:
    train = build(texts).train
    some = [train.together(rows) for rows in (1, 10, 10**3, 10**5, 10**7)]
    assert some == sorted(some, reverse=True)
    assert some[0] == 16
    assert some[-1] == 1


def test_step_a_thousand_million_costs_what_step_zero_does(texts) -> None:
    dataset = build(texts, packing="best_fit")
    dataset.train.batch(0)
    begin = time.perf_counter()
    dataset.train.batch(10**9)
    assert time.perf_counter() - begin < 0.5


def test_importing_starts_nothing() -> None:
    """Workers that tokenise import the package: no thread, no JAX, and a config no Grain."""
    code = """
        import sys, threading
        import jaxpar.config
        assert not {"numpy", "grain", "jax"} & set(sys.modules)
        import jaxpar.data
        assert not {"grain", "jax"} & set(sys.modules)
        assert threading.active_count() == 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


# ---- several processes --------------------------------------------------------------------------

PROCESS = textwrap.dedent(
    """
    import json, sys
    import numpy as np
    from jaxpar import data
    from jaxpar.config.schema import DataConfig

    given = json.loads(sys.argv[1])
    dataset = data.build(DataConfig(**given["config"]), seed=3, vocab=256, say=lambda _: None)
    size = dataset.train.rows // given["count"]
    mine = slice(given["rank"] * size, (given["rank"] + 1) * size)
    out = {"fingerprint": np.array(json.dumps(dataset.fingerprint)), "heldout": len(dataset.heldout)}
    for step in range(given["first"], given["last"]):
        out |= {f"{step} {name}": array for name, array in dataset.train.batch(step, mine).items()}
        out[f"{step} ids"] = dataset.train.ids(step, mine)
    for index in range(len(dataset.heldout)):
        out[f"heldout {index}"] = dataset.heldout.batch(index, mine)["targets"]
    np.savez(given["out"], **out)
    """
)


def run_processes(tmp_path: pathlib.Path, count: int, first: int, last: int, **given) -> list[dict]:
    """What each of `count` processes read of these steps, all running at the same time."""
    running = []
    for rank in range(count):
        out = tmp_path / f"{count}-{rank}.npz"
        more = {"rank": rank, "count": count, "first": first, "last": last, "out": str(out)}
        arguments = [sys.executable, "-c", PROCESS, json.dumps(given | more)]
        running.append((out, subprocess.Popen(arguments)))
    results = []
    for out, process in running:
        assert process.wait(timeout=120) == 0
        with np.load(out) as arrays:
            results.append(dict(arrays))
    return results


def test_four_processes_then_two_read_what_one_would(texts, tmp_path) -> None:
    """Cases C12, C13, L2, L4: no id is lost or repeated, and all agree on the counts.

    The caches are not there yet: the processes also make them at the same time.
    """
    given = {
        "source": {str(texts / "poems"): 3.0, str(texts / "notes"): 1.0},
        "cache": str(tmp_path / "cache"),
        "batch": 8,
        "sequence": 32,
        "packing": "best_fit",
    }
    parts = {
        range(3): run_processes(tmp_path, 4, 0, 3, config=given),
        range(3, 7): run_processes(tmp_path, 2, 3, 7, config=given),
    }
    alone = data.build(DataConfig(**given), seed=3, vocab=256, say=lambda _: None)
    every_id: list[tuple[int, int]] = []
    for steps, processes in parts.items():
        for process in processes:
            assert json.loads(str(process["fingerprint"])) == alone.fingerprint
            assert int(process["heldout"]) == len(alone.heldout)
        for step in steps:
            for name, array in alone.train.batch(step).items():
                together = np.concatenate([process[f"{step} {name}"] for process in processes])
                np.testing.assert_array_equal(together, array)
            ids = np.concatenate([process[f"{step} ids"] for process in processes])
            np.testing.assert_array_equal(ids, alone.train.ids(step))
            every_id += map(tuple, ids.tolist())
        for index in range(len(alone.heldout)):
            together = np.concatenate([process[f"heldout {index}"] for process in processes])
            np.testing.assert_array_equal(together, alone.heldout.batch(index)["targets"])
    # Of each source, as many rows as were read are all different until its first epoch is over.
    for source, rows in enumerate(alone.train.sources):
        read = [row for which, row in every_id if which == source][: len(rows)]
        assert len(set(read)) == len(read)


def test_held_out_rows_are_evaluated_once_by_any_number_of_processes(texts) -> None:
    dataset = build(texts, packing="concatenate", batch=6)
    everything = [dataset.heldout.batch(i)["targets"] for i in range(len(dataset.heldout))]
    expected = np.concatenate(everything)
    expected = expected[expected != IGNORED]
    for count in (1, 2, 3):
        size = 6 // count
        parts = [
            dataset.heldout.batch(i, slice(rank * size, (rank + 1) * size))["targets"]
            for i in range(len(dataset.heldout))
            for rank in range(count)
        ]
        found = np.concatenate([part.ravel() for part in parts])
        np.testing.assert_array_equal(found[found != IGNORED], expected)
    stores = [rows.store for rows in dataset.heldout.sources]
    assert len(expected) == sum(len(store.tokens) - len(store) for store in stores)
