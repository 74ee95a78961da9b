"""How many devices a run sees: what is simulated, and what an open size of a mesh takes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from jaxpar.axes import MeshError
from jaxpar.devices import simulate

ROOT = pathlib.Path(__file__).parent.parent
FLAG = "--xla_force_host_platform_device_count"


def layout(
    *args: str, environ: dict[str, str], platforms: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    """The command line that shows a layout, in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "jaxpar.train", "--show", "layout", *args],
        cwd=ROOT,
        env={**env, "JAX_PLATFORMS": platforms, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("mesh", "devices", "count"),
    [("4x2", None, 8), ("-1x2", 8, 8), ("4x-1", 12, 12), ("data=-1,model=2", 6, 6)],
)
def test_as_many_devices_are_simulated_as_the_mesh_needs(monkeypatch, mesh, devices, count) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {FLAG}=3")
    simulate(mesh, devices)
    assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=x {FLAG}={count}"


@pytest.mark.core
@pytest.mark.parametrize("mesh", ["-1", "-1x2", "model=2,data=-1"])
def test_an_open_mesh_takes_what_is_visible(monkeypatch, mesh) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=4")
    simulate(mesh, None)
    assert os.environ["XLA_FLAGS"] == f"{FLAG}=4"


@pytest.mark.core
def test_an_open_mesh_on_one_cpu_is_refused_before_jax_is_asked(monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS")
    simulate("-1", None)
    with pytest.raises(MeshError, match="1 device that is visible; 1x1 fits; or simulate some"):
        simulate("-1x2", None)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    simulate("-1x2", None)


@pytest.mark.core
@pytest.mark.parametrize("mesh", ["2-1", "-1x-1", "-1,2"])
def test_a_mesh_that_is_none_simulates_nothing(monkeypatch, mesh) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(MeshError, match=f"mesh '?{mesh}"):
        simulate(mesh, None)
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.core
def test_a_run_with_an_open_mesh_lies_on_every_visible_device() -> None:
    """M3."""
    done = layout("--mesh", "-1x2", environ={"XLA_FLAGS": f"{FLAG}=8"})
    assert done.returncode == 0, done.stderr
    assert "mesh data=4 x model=2 on 8 x cpu" in done.stdout


def test_a_run_with_an_open_mesh_simulates_the_devices_asked_for() -> None:
    done = layout("--mesh", "-1x2", "--devices", "6", "--batch", "6", environ={})
    assert done.returncode == 0, done.stderr
    assert "mesh data=3 x model=2 on 6 x cpu" in done.stdout


@pytest.mark.parametrize(
    ("platforms", "words"),
    [
        ("foo", "JAX_PLATFORMS=foo: Unable to initialize backend 'foo'"),
        ("CPU", "did you mean cpu?"),
        ("rocm", "JAX_PLATFORMS=cpu simulates devices"),
    ],
)
def test_a_platform_that_is_not_here_is_refused_in_one_line(platforms, words) -> None:
    done = layout(environ={}, platforms=platforms)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_topology_on_a_platform_that_is_not_here_is_refused_too() -> None:
    pytest.importorskip("libtpu")
    done = layout("--topology", "v5p:2x2x1", environ={}, platforms="foo")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs 8 devices and topology v5p:2x2x1 has 4" in done.stderr
    # Other processes may be using the compiler.
    several = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = layout("--topology", "v5p:2x2x1", "--mesh", "2x2", environ=several, platforms="foo")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Unable to initialize backend 'foo'" in done.stderr


def test_a_refusal_stands_alone() -> None:
    """What is simulated is said when a run starts, not before an error."""
    done = layout("--mesh", "4x-1", environ={"XLA_FLAGS": f"{FLAG}=6"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "4 does not divide the 6 devices that are visible; 3x2, 6x1, " in done.stderr
