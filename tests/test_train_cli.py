"""The command line end to end: a small run on 8 simulated devices, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxpar import checkpoint, config
from jaxpar.layout import Layout
from jaxpar.train import loop, metrics, run_folder
from jaxpar.train.evaluation import evaluate
from jaxpar.train.interrupt import Interrupts
from jaxpar.train.job import build, prepare
from jaxpar.train.report import Reporter

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 7
FLAGS = [
    *("--layers", "2", "--embed", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8"),
    *("--mlp", "64", "--vocab", "257", "--sequence", "32", "--batch", "16", "--dropout", "0.1"),
    *("--steps", str(STEPS), "--warmup-steps", "2", "--learning-rate", "0.01"),
    *("--eval-every", "3", "--eval-batches", "1", "--checkpoint-every", "5"),
    *("--sample-tokens", "9", "--microbatches", "2", "--zero", "3", "--mesh", "4x2"),
]


def command(*args: str, module: str = "train") -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    return subprocess.run(
        [sys.executable, "-m", f"jaxpar.{module}", *args],
        cwd=ROOT,
        env={**env, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text to learn from\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, text) -> tuple[pathlib.Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("runs") / "a"
    done = command(*FLAGS, "--source", str(text), "--run-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done


def test_output_says_what_was_done(run) -> None:
    folder, done = run
    out = done.stdout
    assert "simulating 8 devices on this CPU" in out
    assert "257 -> 258 for model=2" in out  # the layout table
    assert f"step {STEPS}/{STEPS}  loss " in out
    assert "tokens/s" in out
    assert "evaluation after 3 steps" in out
    assert "evaluation loss" in out
    assert ">>>" in out
    assert f"run folder {folder}" in out


def test_the_run_folder_holds_what_scripts_rely_on(run) -> None:
    folder, _ = run
    names = {p.name for p in folder.iterdir()}
    contract = {"config.yaml", "layout.json", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert names - {".lock"} == contract
    assert checkpoint.Checkpoints(folder / "checkpoints").steps() == [5, STEPS]
    assert list((folder / "tensorboard").glob("*tfevents*"))
    kept = config.from_yaml(folder / "config.yaml")
    assert kept == config.load([*FLAGS, "--source", kept.data.source, "--run-dir", str(folder)])


def test_metrics_have_one_row_a_step_and_learn(run) -> None:
    folder, _ = run
    rows = metrics.read(folder / "metrics.jsonl")
    steps = [r for r in rows if "loss" in r]
    assert [r["step"] for r in steps] == list(range(STEPS))
    wanted = ("grad_norm", "learning_rate", "step_seconds", "tokens_per_second", "skipped")
    assert all(isinstance(r[name], int | float) for r in steps for name in wanted)
    np.testing.assert_allclose([r["learning_rate"] for r in steps[:2]], [0.005, 0.01])
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    evaluations = [r for r in rows if "eval_loss" in r]
    assert [r["step"] for r in evaluations] == [3, 6, STEPS]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]


def test_the_layout_in_the_folder_is_the_one_that_ran(run) -> None:
    folder, _ = run
    kept = Layout.from_json((folder / "layout.json").read_text())
    built = build(config.from_yaml(folder / "config.yaml")).layout
    assert kept.rows == tuple(sorted(built.rows, key=kept.rows.index))
    assert kept.bytes_per_device() == built.bytes_per_device()


def test_its_checkpoint_gives_the_same_evaluation_on_another_mesh(run) -> None:
    """Cases T1 and C1: 257 tokens padded to 258 over 2, and to 260 over 4; no dropout in either."""
    folder, _ = run
    kept = config.from_yaml(folder / "config.yaml")
    kept = dataclasses.replace(kept, mesh="2x4", zero=1)
    job = prepare(kept)
    restored = checkpoint.Checkpoints(folder / "checkpoints").restore(job.par)
    assert (restored.step, restored.meta["skipped"]) == (STEPS, [])
    assert job.par.unpad(restored.state).params["embed"]["tokens"].shape == (257, 32)
    assert int(restored.state.step) == STEPS
    got = evaluate(job.par, restored.state, job.dataset.heldout)["loss"]
    rows = metrics.read(folder / "metrics.jsonl")
    assert got == pytest.approx(rows[-1]["eval_loss"], rel=1e-5)


def test_eval_gives_the_loss_of_the_run_on_another_mesh(run) -> None:
    folder, _ = run
    done = command(str(folder), "--mesh", "2x1", "--json", module="eval")
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    wanted = metrics.read(folder / "metrics.jsonl")[-1]["eval_loss"]
    assert got["step"] == STEPS
    assert got["loss"] == pytest.approx(wanted, rel=1e-5)
    assert got["perplexity"] == pytest.approx(np.exp(wanted), rel=1e-4)
    earlier = command(str(folder), "--mesh", "1", "--step", "5", module="eval")
    assert "step 5: loss" in earlier.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--step", "4"], "step 4"), (["--stepp", "4"], "--step"), (["--mesh", "3x1"], "divide")],
)
def test_eval_refuses_in_one_line(run, flags, words) -> None:
    done = command(str(run[0]), *flags, module="eval")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_eval_where_no_run_is(tmp_path) -> None:
    done = command(str(tmp_path), module="eval")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no run at" in done.stderr


def test_a_used_run_folder_is_refused_and_left_alone(run, text) -> None:
    folder, _ = run
    before = (folder / "metrics.jsonl").read_bytes()
    done = command(*FLAGS, "--source", str(text), "--run-dir", str(folder), "--no-resume")
    assert done.returncode == 2
    assert "has a run in it" in done.stderr
    assert "--overwrite" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_overwriting_keeps_the_old_run_where_the_new_one_cannot_start(run) -> None:
    folder, _ = run
    flags = [*FLAGS, "--run-dir", str(folder), "--overwrite", "--source", "absent.txt"]
    done = command(*flags)
    assert done.returncode == 2
    assert "absent.txt" in done.stderr
    assert checkpoint.Checkpoints(folder / "checkpoints").steps() == [5, STEPS]


@pytest.mark.parametrize("module", ["train", "bench"])
def test_an_unknown_flag_exits_2_and_names_the_nearest(module) -> None:
    first = ["step"] if module == "bench" else []
    done = command(*first, "--meshh", "4x2", module=module)
    assert done.returncode == 2
    assert "--meshh" in done.stderr
    assert "did you mean --mesh?" in done.stderr
    assert done.stderr.count("\n") == 1


def test_show_layout_prints_it_without_compiling_or_a_folder(tmp_path) -> None:
    done = command("--preset", "llama3-8b", "--show", "layout", "--run-dir", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert "8,030,261,248 parameters on data=4 x model=2" in done.stdout
    assert "blocks/attention/query" in done.stdout
    assert not (tmp_path / "r").exists()


def test_one_compilation_in_a_run_with_pauses(tmp_path, text) -> None:
    flags = ["--source", str(text), "--sample-tokens", "0", "--run-dir", str(tmp_path / "run")]
    kept = config.load([*FLAGS, *flags])
    job = prepare(kept)
    folder = run_folder.choose(kept)
    with Interrupts() as interrupts, run_folder.claim(folder, kept) as held:
        result = loop.train(job, held, Reporter(STEPS, out=io.StringIO()), interrupts)
    assert job.par.cache_size() == 1
    assert result.steps == STEPS
    assert result.sample == ""


def test_a_token_outside_the_vocabulary_is_refused_by_name_before_anything_is_compiled(
    tmp_path,
) -> None:
    """Case T11."""
    tokens = np.full(2000, 7, np.uint16)
    tokens[33] = 300
    tokens.tofile(tmp_path / "tokens.bin")
    flags = ["--source", str(tmp_path / "tokens.bin"), "--run-dir", str(tmp_path / "run")]
    done = command(*FLAGS, *flags)
    assert done.returncode == 2
    assert "tokens.bin" in done.stderr
    assert "300" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_signal_among_the_steps_saves_and_the_same_command_goes_on(tmp_path, text) -> None:
    """Case C9."""
    flags = [*FLAGS, "--source", str(text), "--run-dir", str(tmp_path / "run"), "--steps", "40"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpar.train", *flags],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rows = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (rows.exists() and rows.read_text().count("\n") > 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "SIGTERM while" in err
    taken = [r["step"] for r in metrics.read(rows) if "loss" in r]
    assert checkpoint.Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == len(taken) < 40
    done = command(*flags)
    assert done.returncode == 0, done.stderr
    assert f"going on from checkpoint {len(taken)} of 40" in done.stdout
    assert [r["step"] for r in metrics.read(rows) if "loss" in r] == list(range(40))


def test_bench_measures_a_step(text) -> None:
    done = command("step", *FLAGS, "--repeats", "3", "--warmup", "1", module="bench")
    assert done.returncode == 0, done.stderr
    for part in ("mesh", "s median", "tokens", "MFU", "not known", "ms a step", "resident"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--source", "absent.txt"], "no file is there at 'absent.txt'"),
        (["--source", "absent/**/*.txt"], "no file matches 'absent/**/*.txt'"),
        (["--source", "{README.md: 1, absent.txt: 2}"], "no file is there at 'absent.txt'"),
        (["--source", "README.md", "--heldout", "absent.txt"], "no file is there at 'absent.txt'"),
    ],
)
def test_a_source_that_is_not_there_is_refused_before_jax_is_imported(flags, words) -> None:
    code = (
        "import sys\n"
        "from jaxpar.train.__main__ import main\n"
        f"code = main({flags!r})\n"
        "print(sorted({'jax', 'jaxlib'} & set(sys.modules)))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_sources_that_are_elsewhere_or_there_are_not_refused_early(text) -> None:
    from jaxpar.train.__main__ import find_data

    for source in ("stdlib", str(text), str(text.parent), "memory://nowhere/a.txt"):
        find_data(config.load(["--source", source, "--heldout", str(text)]))


def test_the_help_of_bench_has_its_own_flags_and_those_of_a_run() -> None:
    done = command("--help", module="bench")
    assert done.returncode == 0, done.stderr
    for flag in ("--repeats", "--json", "--mesh", "--learning-rate", "--source", "--config"):
        assert f"  {flag}" in done.stdout
    assert done.stdout.count("usage: ") == 1
    assert command("step", "--help", module="bench").stdout == done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["stepp"], "invalid choice: 'stepp'"),
        ([], "arguments are required: what"),
        (["step", "--repeats", "x"], "--repeats: invalid int value"),
        (["step", "--mesh", "4x2", "--show", "layout"], "are of jaxpar.train"),
    ],
)
def test_bench_refuses_in_one_line(args, words) -> None:
    done = command(*args, module="bench")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


@pytest.mark.parametrize("module", ["eval", "sample", "checkpoint"])
def test_other_commands_refuse_what_xla_would_abort_on_too(module, monkeypatch, capsys) -> None:
    """Case F4."""
    main = importlib.import_module(f"jaxpar.{module}.__main__").main
    monkeypatch.setenv("XLA_FLAGS", "--xla_bogus_flag=1")
    with pytest.raises(SystemExit) as caught:
        main(["list", "nowhere"] if module == "checkpoint" else ["nowhere"])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert "XLA_FLAGS holds --xla_bogus_flag=1, which XLA does not know" in err
