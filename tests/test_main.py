"""The console script: a command gets the rest of the line, an unknown one names the nearest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxpar import __main__ as console

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(monkeypatch):
    """The exit code of ``jaxpar ARGS``."""

    def run(*args: str) -> int | str | None:
        monkeypatch.setattr("sys.argv", ["jaxpar", *args])
        try:
            return console.main()
        except SystemExit as error:
            return error.code

    return run


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("trai", "unknown command trai; did you mean train?"),
        ("benhc", "unknown command benhc; did you mean bench?"),
        ("zzz", f"unknown command zzz; there are {', '.join(console.COMMANDS)}"),
    ],
)
def test_an_unknown_command_names_the_nearest(command, expected, run, capsys) -> None:
    assert run(command, "step") == 2
    assert capsys.readouterr().err == f"error: {expected}\n"


@pytest.mark.parametrize("args", [("train",), ("bench", "step")], ids=lambda a: a[0])
# runpy says so where a test has imported the command before; a process of its own has not.
@pytest.mark.filterwarnings("ignore:'jaxpar.*' found in sys.modules:RuntimeWarning")
def test_a_command_gets_the_rest_of_the_line_and_its_code_comes_back(args, run, capsys) -> None:
    assert run(*args, "--mesh", "4x3", "--devices", "8") == 2
    assert capsys.readouterr().err.startswith("error: mesh 4x3 needs 12 devices")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)], ids=str)
def test_help_lists_every_command(args, run, capsys) -> None:
    assert run(*args) == 0
    text = capsys.readouterr().out
    for name in console.COMMANDS:
        assert re.search(rf"^ +{name} ", text, re.MULTILINE)
        assert (ROOT / "jaxpar" / name / "__main__.py").is_file()
