"""Every example runs as written, and fits what it sets out to fit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs_and_its_loss_falls_tenfold(path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 10


def test_there_is_one_for_each_kind_of_model():
    assert {p.stem for p in EXAMPLES} == {
        "plain_pytree",
        "flax_nnx",
        "flax_linen",
        "equinox_staged",
    }
