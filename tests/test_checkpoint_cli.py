"""`python -m jaxpar.checkpoint`: what it prints, and what its exit code says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from test_checkpoint import flip, flip_a_value, tree

from jaxpar import checkpoint
from jaxpar.checkpoint.__main__ import COMMANDS, main


@pytest.fixture
def run(capsys):
    """(exit code, stdout, stderr) of a command line."""

    def run(*args: object) -> tuple[int, str, str]:
        try:
            code = main([str(a) for a in args])
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def folder(tmp_path):
    """A run folder with checkpoints 10 and 20."""
    meta = {
        "config": {
            "mesh": "4x2",
            "zero": 1,
            "model": {"preset": "toy"},
            "data": {"source": "stdlib"},
        },
        "data": {"position": 20},
        "skipped": [3],
    }
    for step in (10, 20):
        checkpoint.save(tmp_path / "run" / "checkpoints", step, tree(step), meta, metric=step / 8)
    return tmp_path / "run"


def forms_of(folder) -> list:
    return [(folder, ()), (folder / "checkpoints", ()), (folder / "checkpoints" / "20", ())]


@pytest.mark.core
def test_list(folder, run) -> None:
    (folder / "checkpoints" / "30").mkdir()
    (folder / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    code, out, err = run("list", folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["step", "size", "saved", "metric", "complete"]
    assert re.fullmatch(r"10 +[\d.]+ [kM]B +\d{4}-\S+\+00:00 +1\.2500 +yes", lines[1])
    assert re.fullmatch(r"20 +[\d.]+ [kM]B +\d{4}-\S+\+00:00 +2\.5000 +yes", lines[2])
    assert re.fullmatch(r"30 +no: an empty folder", lines[3])
    assert re.fullmatch(r"40\.orbax-checkpoint-tmp +no: a save under way, or cut short", lines[4])


def test_one_checkpoint_a_folder_of_them_and_a_run_are_all_taken(folder, run) -> None:
    shown = [run("show", path)[1] for path, _ in forms_of(folder)]
    assert shown[0] == shown[1] == shown[2]
    assert "step        20, saved" in shown[0]
    assert run("show", folder, "--step", 10)[1].count("step        10") == 1


def test_show(folder, run) -> None:
    code, out, _ = run("show", folder, "--leaves")
    assert code == 0
    assert "3 leaves" not in out
    assert "leaves      3 (stacked), 65,540 bytes" in out
    assert "metric      2.5" in out
    assert "config      mesh 4x2, zero 1, model.preset toy, data.source stdlib" in out
    assert "data        position 20" in out
    assert "skipped     1 steps: [3]" in out
    assert "jaxpar" in out
    assert re.search(r"params/w +float32\[64, 128\]  [0-9a-f]{16}\n", out)


@pytest.mark.core
def test_verify_of_what_is_whole(folder, run) -> None:
    assert run("verify", folder) == (0, "10: whole, 3 leaves read\n20: whole, 3 leaves read\n", "")
    assert run("verify", folder, "--step", 10)[1] == "10: whole, 3 leaves read\n"


@pytest.mark.core
def test_verify_names_every_damaged_leaf_and_checkpoint(folder, run) -> None:
    checkpoints = folder / "checkpoints"
    flip_a_value(checkpoints / "20")
    shutil.copytree(checkpoints / "10", checkpoints / "15")
    flip(checkpoints / "10" / "meta" / "metadata", 50)
    (checkpoints / "30").mkdir()
    code, out, _ = run("verify", folder)
    assert code == 1
    assert "10: DAMAGED" in out
    assert "15: DAMAGED" in out
    assert "holds step 10: the folder was renamed" in out
    assert "20: DAMAGED, 3 leaves read\n  params/w: its values are not those that were saved" in out
    assert "opt_state/mu:" not in out
    assert "30: DAMAGED" in out
    assert "an empty folder" in out
    assert run("verify", checkpoints / "20")[0] == 1


def test_verify_of_a_leaf_that_cannot_be_read(folder, run) -> None:
    path = folder / "checkpoints" / "20"
    for file in (path / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.unlink()
    code, out, _ = run("verify", path)
    assert code == 1
    assert "20: DAMAGED" in out


def test_diff(folder, run, tmp_path) -> None:
    checkpoints = folder / "checkpoints"
    same = run("diff", checkpoints / "20", folder)
    assert same[0] == 0
    assert same[1].startswith("equal: 3 leaves of ")
    code, out, _ = run("diff", checkpoints / "10", checkpoints / "20")
    assert code == 1
    gap = np.abs(tree(10)["params"]["w"].astype(np.float64) - tree(20)["params"]["w"]).max()
    assert f"params/w: values differ in 8,192 of 8,192, by at most {gap:.6g}" in out
    assert "step: values differ in 1 of 1, by at most 10" in out
    other = {
        "params": {"w": tree(20)["params"]["w"].astype(np.float16), "v": np.zeros(2)},
        "step": np.zeros(3),
    }
    checkpoint.save(tmp_path / "other", 1, other)
    code, out, _ = run("diff", checkpoints / "20", tmp_path / "other")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == f"opt_state/mu: only in {checkpoints / '20'}"
    assert lines[1] == f"params/v: only in {tmp_path / 'other' / '1'}"
    assert "params/w: float32[64, 128] and float16[64, 128]" in lines
    assert "step: int32[] and float64[3]" in lines


def test_diff_of_two_forms_of_one_checkpoint(folder, run, tmp_path) -> None:
    stacked = {"params": {"blocks": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}}}
    checkpoint.save(tmp_path / "a", 1, stacked)
    assert run("convert", tmp_path / "a", tmp_path / "b", "--form", "layers")[0] == 0
    assert run("diff", tmp_path / "a", tmp_path / "b")[0] == 0


def test_convert_says_where_it_wrote(folder, run, tmp_path) -> None:
    code, out, _ = run(
        "convert", folder, tmp_path / "w", "--form", "weights", "--dtype", "bfloat16"
    )
    assert (code, out) == (0, f"{tmp_path / 'w' / '20'}\n")
    assert "bfloat16[64, 128]" in run("show", tmp_path / "w", "--leaves")[1]
    file = tmp_path / "w.safetensors"
    assert run("convert", folder, file, "--form", "safetensors", "--step", 10)[1] == f"{file}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("lst", "x"), "unknown command lst; did you mean list?"),
        (("zzz",), "unknown command zzz; there are list, show, verify, diff, convert"),
        (
            ("list", "{}/absent"),
            "{}/absent is not a folder; give a run folder, its checkpoints or one of them",
        ),
        (("list", "{}/empty"), "no checkpoints under {}/empty"),
        (("show", "{}/run", "--stp", "1"), "unknown flag --stp; did you mean --step?"),
        (
            ("show", "{}/run", "--step", "11"),
            "no checkpoint of step 11 under {}/run/checkpoints: there are [10, 20]",
        ),
        (
            ("show", "{}/run/checkpoints/10", "--step", "20"),
            "is the checkpoint of step 10, not of 20",
        ),
        (
            ("convert", "{}/run", "{}/x", "--form", "layer"),
            "argument --form: invalid choice: 'layer'",
        ),
        (("convert", "{}/run", "{}/x"), "the following arguments are required: --form"),
        (("diff", "{}/run"), "the following arguments are required: B"),
    ],
    ids=lambda x: " ".join(x[:2]) if isinstance(x, tuple) else "",
)
def test_bad_usage_is_one_line(args, message, folder, run, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = run(*(a.replace("{}", str(tmp_path)) for a in args))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message.replace("{}", str(tmp_path)) in err
    assert err.count("\n") == 1


def test_help_lists_every_command(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)


def test_as_a_program_without_an_accelerator(folder) -> None:
    """A process of its own, with a platform asked for that is not here: it is not touched."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar.checkpoint", "verify", folder],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cuda", "PATH": "", "HOME": str(folder)},
    )
    assert (done.returncode, done.stdout.count("whole")) == (0, 2), done.stderr


def test_meta_is_plain_json(folder) -> None:
    meta = json.loads((folder / "checkpoints" / "20" / "meta" / "metadata").read_text())
    assert meta["config"]["model"]["preset"] == "toy"
    assert len(meta["fingerprints"]["params/w"]) == 16
