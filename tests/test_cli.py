"""The small commands' parser: every error is one line, exit code 2, and names the nearest flag."""

from __future__ import annotations

import pytest

from jaxpar.cli import Parser, refuse


def parser() -> Parser:
    p = Parser(prog="x")
    p.add_argument("run")
    p.add_argument("--step", type=int)
    return p


@pytest.mark.core
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["a", "--stpe", "4"], "unknown flag --stpe; did you mean --step?"),
        (["a", "--ste", "4"], "unknown flag --ste; did you mean --step?"),
        (["a", "--step=four"], "invalid int value: 'four'"),
        ([], "required: run"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_one_line_and_exit_code_2(argv, words, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        parser().parse(argv)
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert words in err
    assert err.count("\n") == 1


def test_after_two_dashes_nothing_is_a_flag() -> None:
    assert parser().parse(["--step", "4", "--", "--stpe"]).run == "--stpe"


def test_an_error_of_several_lines_is_said_on_one(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        refuse(ValueError("a\n  b"), 1)
    assert (stopped.value.code, capsys.readouterr().err) == (1, "error: a b\n")
