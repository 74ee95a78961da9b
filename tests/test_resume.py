"""A run that is stopped and goes on is the run that was never stopped: bitwise on the same mesh."""

from __future__ import annotations

import io
import pathlib
import time

import jax
import numpy as np
import pytest

from jaxpar import checkpoint
from jaxpar import config as configs
from jaxpar.train import loop, metrics, run_folder
from jaxpar.train.guard import DivergedError
from jaxpar.train.interrupt import Interrupted, Interrupts
from jaxpar.train.job import build, prepare
from jaxpar.train.report import Reporter

FLAGS = [
    *("--layers", "2", "--embed", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"),
    *("--mlp", "64", "--vocab", "257", "--sequence", "32", "--batch", "16", "--dropout", "0.2"),
    *("--warmup-steps", "2", "--learning-rate", "0.01", "--eval-every", "4", "--eval-batches", "2"),
    *("--sample-tokens", "0", "--microbatches", "2", "--packing", "best_fit", "--steps", "10"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(60):
        words = rng.choice(["ein", "two", "trois", "mesh\n", "axis", "é"], rng.integers(5, 60))
        (folder / f"{i}.txt").write_text(" ".join(words))
    return ["--source", str(folder), "--cache", str(folder.parent / f"{folder.name}-cache")]


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Twenty starts compile the same programs: keep them on disk, as a user may."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def start(path: pathlib.Path, *flags: str) -> tuple[loop.Result, str]:
    """One start of a run, in this process; its result and what it printed."""
    config = configs.load([*FLAGS, "--run-dir", str(path), *flags])
    configs.validate(config)
    out = io.StringIO()
    folder = run_folder.choose(config)
    job = prepare(config, lambda line: None)
    with Interrupts() as interrupts, run_folder.claim(folder, config) as held:
        return loop.train(job, held, Reporter(config.steps, out=out), interrupts), out.getvalue()


def state_of(path: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, whole, by path."""
    config = configs.from_yaml(path / "config.yaml")
    par = build(config)
    restored = checkpoint.Checkpoints(path / "checkpoints").restore(par, step=step)
    leaves, _ = jax.tree_util.tree_flatten_with_path(par.unpad(restored.state))
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in leaves}


def rows_of(path: pathlib.Path) -> list[dict]:
    return [r for r in metrics.read(path / "metrics.jsonl") if "loss" in r]


def numbers(row: dict) -> dict:
    return {k: v for k, v in row.items() if k not in ("step_seconds", "tokens_per_second")}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module", params=[["--mesh", "4x2", "--zero", "1"]], ids=lambda f: f[1])
def straight(request, tmp_path_factory, corpus) -> tuple[pathlib.Path, list[str]]:
    path = tmp_path_factory.mktemp("straight") / "run"
    start(path, *corpus, *request.param)
    return path, [*corpus, *request.param]


@pytest.mark.parametrize("stops", [[4], list(range(1, 10))], ids=["4+6", "ten of one"])
def test_straight_is_stopped_and_gone_on(straight, tmp_path, stops) -> None:
    """Cases C12, C18, O9: parameters, moments, key, rates and data ids, at every step."""
    reference, flags = straight
    for stop in stops:
        result, _ = start(tmp_path / "run", *flags, "--stop-after", str(stop))
        assert (result.steps, result.of) == (stop, 10)
    result, said = start(tmp_path / "run", *flags)
    assert f"going on from checkpoint {stops[-1]} of 10" in said
    assert result.steps == 10
    assert list(map(numbers, rows_of(tmp_path / "run"))) == list(map(numbers, rows_of(reference)))
    same(state_of(tmp_path / "run", 10), state_of(reference, 10))
    evaluations = [
        [(r["step"], r["eval_loss"]) for r in metrics.read(p / "metrics.jsonl") if "eval_loss" in r]
        for p in (tmp_path / "run", reference)
    ]
    assert evaluations[0] == evaluations[1]


def test_going_on_on_another_mesh_reads_the_same_data_and_learns_the_same(
    straight, tmp_path
) -> None:
    """Case C13."""
    reference, flags = straight
    start(tmp_path / "run", *flags, "--stop-after", "3")
    start(tmp_path / "run", *flags, "--mesh", "2x4", "--zero", "3", "--stop-after", "6")
    start(tmp_path / "run", *flags, "--mesh", "8x1", "--zero", "0", "--microbatches", "1")
    rows, wanted = rows_of(tmp_path / "run"), rows_of(reference)
    assert [r["data_crc"] for r in rows] == [r["data_crc"] for r in wanted]
    assert [r["learning_rate"] for r in rows] == [r["learning_rate"] for r in wanted]
    np.testing.assert_allclose([r["loss"] for r in rows], [r["loss"] for r in wanted], rtol=1e-5)


def test_a_finished_run_says_so_and_changes_nothing(straight) -> None:
    reference, flags = straight
    before = {p: p.stat().st_mtime_ns for p in (reference / "checkpoints").iterdir()}
    result, _ = start(reference, *flags)
    assert (result.steps, result.eval_loss is not None) == (10, True)
    assert before == {p: p.stat().st_mtime_ns for p in (reference / "checkpoints").iterdir()}


def test_a_stop_while_its_own_checkpoint_is_being_written_saves_once(
    tmp_path, corpus, monkeypatch
) -> None:
    """The checkpoint of this step is under way, and not there yet, when the run is told to stop."""
    config = configs.load(
        [*FLAGS, "--run-dir", str(tmp_path / "run"), *corpus, "--checkpoint-every", "3"]
    )
    job = prepare(config, lambda line: None)
    save = checkpoint.Checkpoints.save

    def slow(self, step, *args, **more):
        finish = self._finish

        def late(*args) -> None:
            time.sleep(1)
            finish(*args)

        self._finish = late
        save(self, step, *args, **more)
        interrupts.requested = "SIGTERM"

    monkeypatch.setattr(checkpoint.Checkpoints, "save", slow)
    with (
        pytest.raises(Interrupted, match="stopped after 3 of 10"),
        Interrupts() as interrupts,
        run_folder.claim(run_folder.choose(config), config) as held,
    ):
        loop.train(job, held, Reporter(config.steps, out=io.StringIO()), interrupts)
    assert checkpoint.Checkpoints(tmp_path / "run" / "checkpoints").steps() == [3]


def test_changed_data_are_refused(tmp_path, corpus) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one text to learn from\n" * 200)
    flags = [
        "--source",
        str(text),
        *corpus[2:],
        "--mesh",
        "8x1",
        "--microbatches",
        "1",
        "--stop-after",
        "2",
    ]
    start(tmp_path / "run", *flags)
    text.write_text("two text to learn from\n" * 200)
    with pytest.raises(run_folder.RunFolderError, match=r"data of .* are not those"):
        start(tmp_path / "run", *flags)


def test_the_rate_that_is_logged_after_a_new_optimizer_is_the_one_applied(tmp_path, corpus) -> None:
    """Case O9: a fresh optimizer counts from 0, and so does the schedule."""
    flags = [*corpus, "--mesh", "8x1", "--microbatches", "1"]
    start(tmp_path / "run", *flags, "--stop-after", "3")
    start(tmp_path / "run", *flags, "--stop-after", "5", "--reset-optimizer")
    start(tmp_path / "run", *flags, "--stop-after", "6")
    rates = [r["learning_rate"] for r in rows_of(tmp_path / "run")]
    assert rates[3:] == rates[:3]


def test_weights_of_another_run(straight, tmp_path) -> None:
    reference, flags = straight
    _, said = start(tmp_path / "run", *flags, "--init-from", str(reference), "--stop-after", "1")
    assert "weights of step 10" in said
    first, last = rows_of(tmp_path / "run")[0], rows_of(reference)[-1]
    assert first["step"] == 0
    assert first["loss"] < rows_of(reference)[0]["loss"] - 0.5
    assert first["loss"] == pytest.approx(last["loss"], abs=0.5)


def test_a_run_that_diverges_goes_back_leaves_data_out_and_gives_up(tmp_path, corpus) -> None:
    """A rate so large that the loss overflows: bad steps, then all since the checkpoint, then an error."""
    flags = [
        *corpus, "--mesh", "8x1", "--microbatches", "1", "--learning-rate", "1e30", "--clip-norm", "none",
        "--optimizer", "sgd", "--lr-schedule", "constant", "--warmup-steps", "0", "--checkpoint-every", "1",
        "--max-bad-steps", "2", "--max-rollbacks", "2", "--eval-every", "0", "--packing", "stream",
    ]  # fmt: skip
    out = io.StringIO()
    config = configs.load([*FLAGS, "--run-dir", str(tmp_path / "run"), *flags])
    job = prepare(config, lambda line: None)
    with (
        pytest.raises(DivergedError, match=r"going back 2 times"),
        Interrupts() as interrupts,
        run_folder.claim(run_folder.choose(config), config) as held,
    ):
        loop.train(job, held, Reporter(config.steps, out=out), interrupts)
    lines = [line for line in out.getvalue().splitlines() if "going back to" in line]
    assert len(lines) == 2
    assert "leaving out batches" in lines[0]
