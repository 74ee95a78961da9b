"""Run folders: new, gone on with, refused, and held by one process at a time."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from jaxpar.config import DataConfig, OptimizerConfig, RunConfig, from_yaml
from jaxpar.train.run_folder import RunFolderError, choose, claim, write_config

ROOT = pathlib.Path(__file__).parent.parent


def begun(path: pathlib.Path, **changes) -> RunConfig:
    """A folder in which a run was started, and its config."""
    config = RunConfig(run_dir=str(path), **changes)
    with claim(choose(config), config) as folder:
        write_config(folder, config, 0)
        (path / "metrics.jsonl").write_text("{}\n")
    return config


@pytest.mark.core
def test_choosing_touches_nothing(tmp_path) -> None:
    folder = choose(RunConfig(run_dir=str(tmp_path / "runs" / "a")))
    assert (folder.resumes, folder.path.exists()) == (False, False)


@pytest.mark.core
def test_a_run_is_gone_on_with_refused_or_replaced_as_asked(tmp_path) -> None:
    """Case C5: a rerun into a used folder is never silent."""
    path = tmp_path / "a"
    config = begun(path)
    assert choose(config).resumes
    with pytest.raises(RunFolderError, match=r"--resume.*--overwrite"):
        choose(dataclasses.replace(config, resume=False))
    over = dataclasses.replace(config, overwrite=True)
    assert not choose(over).resumes
    assert (path / "metrics.jsonl").exists()  # it goes when the run starts, not before
    with claim(choose(over), over):
        assert not (path / "metrics.jsonl").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_run_folder_is_left_alone(tmp_path, overwrite) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="does not look like a run folder"):
        choose(RunConfig(run_dir=str(tmp_path), overwrite=overwrite))
    with pytest.raises(RunFolderError, match="is a file"):
        choose(RunConfig(run_dir=str(tmp_path / "thesis.tex"), overwrite=overwrite))


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 1}, "seed 0 -> 1"),
        ({"data": DataConfig(batch=64)}, "data.batch 32 -> 64"),
        ({"data": DataConfig(source="other.txt")}, "data.source 'stdlib' -> 'other.txt'"),
        ({"init_from": "runs/b"}, "init_from None -> 'runs/b'"),
    ],
)
def test_another_model_or_another_order_of_data_is_another_run(tmp_path, changes, names) -> None:
    config = begun(tmp_path / "a")
    with pytest.raises(RunFolderError, match=names):
        choose(dataclasses.replace(config, **changes))


def test_a_changed_rate_is_said_and_a_changed_mesh_is_not(tmp_path) -> None:
    config = begun(tmp_path / "a")
    optimizer = OptimizerConfig(learning_rate=1e-4)
    folder = choose(dataclasses.replace(config, mesh="2x4", zero=3, optimizer=optimizer))
    assert folder.notes == ("zero: 1 -> 3", "optimizer.learning_rate: 0.003 -> 0.0001")


def test_the_config_of_an_earlier_start_stays(tmp_path) -> None:
    config = begun(tmp_path / "a", steps=10)
    longer = dataclasses.replace(config, steps=20)
    with claim(choose(longer), longer) as folder:
        write_config(folder, longer, 7)
    assert from_yaml(tmp_path / "a" / "config.yaml") == longer
    assert from_yaml(tmp_path / "a" / "config-until-7.yaml") == config


HOLD = """
import sys, time
from jaxpar.config import RunConfig
from jaxpar.train.run_folder import choose, claim
config = RunConfig(run_dir=sys.argv[1])
with claim(choose(config), config):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_never_write_to_one_folder(tmp_path) -> None:
    path = tmp_path / "a"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    config = RunConfig(run_dir=str(path))
    with pytest.raises(RunFolderError, match=f"in use by process {other.pid} on"):
        claim(choose(config), config).__enter__()
    other.kill()  # as a scheduler would: nothing can be cleaned up
    other.wait()
    with claim(choose(config), config) as folder:
        assert folder.path == path


def test_a_folder_that_became_a_run_meanwhile_is_not_emptied(tmp_path) -> None:
    config = RunConfig(run_dir=str(tmp_path / "a"))
    chosen = choose(config)
    begun(tmp_path / "a")
    with pytest.raises(RunFolderError, match="changed by another process"):
        claim(chosen, config).__enter__()
    assert (tmp_path / "a" / "metrics.jsonl").exists()
