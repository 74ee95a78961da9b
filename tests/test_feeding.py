"""Rows of a batch and who reads them: in this process, and in two that talk over Gloo on this machine."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxpar import feeding, make_mesh

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.core
@pytest.mark.parametrize("mesh", ["8x1", "4x2", "1x8", "replica=2,data=2,model=2"])
def test_one_process_reads_all_rows_and_puts_each_where_it_belongs(mesh) -> None:
    made = make_mesh(mesh)
    rows = feeding.own_rows(made, 16)
    np.testing.assert_array_equal(rows, np.arange(16))
    tokens = np.arange(48, dtype=np.int32).reshape(16, 3)
    array = feeding.put_rows(made, {"tokens": tokens}, 16)["tokens"]
    np.testing.assert_array_equal(np.asarray(array), tokens)
    parts = made.size(*made.batch_axes)
    assert {s.data.shape for s in array.addressable_shards} == {(16 // parts, 3)}


def test_rows_that_do_not_divide_and_rows_that_are_not_there() -> None:
    made = make_mesh("4x2")
    with pytest.raises(ValueError, match="batch 10 does not divide over the 4 parts"):
        feeding.own_rows(made, 10)
    with pytest.raises(ValueError, match="4 rows were read; this process holds 8"):
        feeding.put_rows(made, {"x": np.zeros((4, 1))}, 8)


WORKER = """
import json, sys
import jax
port, me, mesh = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
import numpy as np
from jaxpar import config, data, feeding
from jaxpar.train.job import prepare
flags = sys.argv[4:]
job = prepare(config.load([*flags, "--mesh", mesh]), lambda line: None)
rows = feeding.own_rows(job.par.mesh, 16)
state, losses, ids = job.par.init(0), [], []
for step in range(3):
    local = job.dataset.train.batch(step, rows)
    ids.append(job.dataset.train.ids(step, rows).tolist())
    state, metrics = job.par.step(state, feeding.put_rows(job.par.mesh, local, 16))
    losses.append(float(metrics["loss"]))
print(json.dumps({"rows": rows.tolist(), "ids": ids, "losses": losses}))
"""

FLAGS = [
    *("--layers", "2", "--embed", "32", "--heads", "8", "--kv-heads", "4", "--head-dim", "8"),
    *("--mlp", "64", "--sequence", "32", "--batch", "16", "--learning-rate", "0.01", "--warmup-steps", "0"),
]  # fmt: skip


def two_processes(mesh: str, flags: list[str]) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(me), mesh, *flags],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in (0, 1)
    ]
    outs = [p.communicate(timeout=240) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outs
    return [json.loads(out.splitlines()[-1]) for out, _ in outs]


@pytest.mark.parametrize("mesh", ["8x1", "1x8"])
def test_two_processes_read_their_own_rows_and_learn_as_one(mesh, tmp_path) -> None:
    """Case L4: disjoint where the batch is split over processes, equal where `model` spans them."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} to learn from\n" for i in range(3000)))
    flags = [*FLAGS, "--source", str(text), "--cache", str(tmp_path / "cache")]
    first, second = two_processes(mesh, flags)
    if mesh == "8x1":
        assert first["rows"] == list(range(8))
        assert second["rows"] == list(range(8, 16))
    else:
        assert first["rows"] == second["rows"] == list(range(16))
    assert first["losses"] == second["losses"]
    losses, ids = alone(mesh, flags)
    np.testing.assert_allclose(first["losses"], losses, rtol=1e-5)
    for step in range(3):
        both = dict(zip(first["rows"], first["ids"][step], strict=True))
        both |= dict(zip(second["rows"], second["ids"][step], strict=True))
        assert [both[row] for row in range(16)] == ids[step]


def alone(mesh: str, flags: list[str]) -> tuple[list[float], list]:
    """(losses, ids) of the same three steps in this process."""
    from jaxpar import config
    from jaxpar.train.job import prepare

    job = prepare(config.load([*flags, "--mesh", mesh]), lambda line: None)
    state, losses = job.par.init(0), []
    for step in range(3):
        state, metrics = job.par.step(state, job.dataset.train.batch(step))
        losses.append(float(metrics["loss"]))
    return losses, [job.dataset.train.ids(step).tolist() for step in range(3)]
