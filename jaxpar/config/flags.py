"""The command line: defaults, then ``--config FILE``, then flags; every field of every config is a flag.

The standard library's parser, filled from the dataclasses: an unknown flag or a wrong value is one line that names the
nearest, and nothing heavier than YAML is imported before it is said.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import yaml

from jaxpar.config import yaml12
from jaxpar.config.environment import check_environment
from jaxpar.config.hints import choices, nearest
from jaxpar.config.schema import (
    ALIASES,
    SECTIONS,
    ConfigError,
    RunConfig,
    from_yaml,
    preset,
    takes_none,
)
from jaxpar.config.validation import validate


def parse(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "python -m jaxpar.train",
    description: str = "Train a decoder on any data x model mesh.",
) -> RunConfig:
    """The config of a command line: defaults, then ``--config FILE``, then flags.

    Exits 2, with one line on stderr, on an unknown flag (naming the nearest), a wrong value, a bad file or an invalid
    combination; exits 0 after ``--help``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        config = load(argv, prog=prog, description=description)
        check_environment(os.environ)
        validate(config)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


def load(argv: Sequence[str], *, prog: str = "jaxpar", description: str = "") -> RunConfig:
    """Like `parse`, raising `ConfigError` instead of exiting, and not yet validated."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=Help)
    homes = add_flags(parser)
    for arg in argv:
        flag = arg.partition("=")[0]
        if arg.startswith("--") and flag not in parser._option_string_actions:
            known = [f for f in parser._option_string_actions if f.startswith("--")]
            raise ConfigError(f"unknown flag {flag}{nearest(flag, known)}")
    given = vars(parser.parse_args(_joined(argv)))
    path = given.pop("config", None)
    if path == "":
        raise ConfigError("--config names no file; give one, or leave it out for the defaults")
    config = RunConfig() if path is None else from_yaml(path)
    changes: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        changes.setdefault(homes[name], {})[name] = value
    model = changes.get("model", {})
    if "preset" in model:
        changes["model"] = {**preset(model["preset"], "--preset"), **model}
    sections = {s: dataclasses.replace(getattr(config, s), **c) for s, c in changes.items() if s}
    return dataclasses.replace(config, **changes.get("", {}), **sections)


def add_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Give a parser ``--config`` and a flag for every field; returns the section of each field, ``""`` for a run's own."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with the keys below; flags win over it"
    )
    homes: dict[str, str] = {}
    groups = [("", "run", RunConfig), *((s, s, c) for s, c in SECTIONS.items())]
    for section, title, kind in groups:
        group = parser.add_argument_group(title, (kind.__doc__ or "").strip())
        docs, hints = _field_docs(kind), typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in SECTIONS and not section:
                continue
            homes[field.name] = section
            _add_flag(group, field, hints[field.name], docs[field.name])
    return homes


def _joined(argv: Sequence[str]) -> list[str]:
    """``--mesh -1x2`` as ``--mesh=-1x2``: argparse would take a value with a dash for a flag."""
    joined: list[str] = []
    for arg in argv:
        if (
            re.match(r"-(\.?[0-9]|inf$|nan$)", arg)
            and joined
            and re.fullmatch(r"--[^=]+", joined[-1])
        ):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


class Help(argparse.HelpFormatter):
    """Flags in one column and what they do beside them."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=100)


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any, doc: str) -> None:
    default = field.default
    shown = f"{doc} [{default}]" if default is not None else doc
    options: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": shown.replace("%", "%%"),
    }
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"], options["metavar"] = _reader(hint)
    short = [f"--{alias}" for alias, name in ALIASES.items() if name == field.name]
    group.add_argument(f"--{field.name.replace('_', '-')}", *short, **options)


def _reader(hint: Any) -> tuple[Callable[[str], Any], str]:
    """How the text of a flag becomes a value of the type `hint`, and what help calls it."""
    none = takes_none(hint)
    kind = next((k for k in typing.get_args(hint) if k is not type(None)), None)
    if typing.get_origin(hint) is typing.Literal or kind is None:
        kind = hint
    if typing.get_origin(kind) is typing.Literal:
        values = typing.get_args(kind)
        return _choice(values, none), f"{{{','.join(map(str, values))}}}"
    if any(typing.get_origin(k) is dict for k in typing.get_args(hint)):
        return _text_or_mapping, "TEXT"
    read, name = {int: (_int, "N"), float: (_float, "X"), str: (str, "TEXT")}[kind]
    return (_or_none(read) if none else read), name


# Named as argparse says them: "invalid int value". Python's own would also take 1_0 and digits of other scripts.
def _int(text: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _float(text: str) -> float:
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


_int.__name__, _float.__name__ = "int", "float"


def _choice(values: tuple[Any, ...], none: bool) -> Callable[[str], Any]:
    known = {str(value): value for value in values} | ({"none": None} if none else {})

    def convert(text: str) -> Any:
        if text not in known:
            there = choices([*values, "none"] if none else values, text)
            raise argparse.ArgumentTypeError(f"invalid choice: {text}; choose from {there}")
        return known[text]

    return convert


def _text_or_mapping(text: str) -> Any:
    """A value in braces is a YAML mapping, whose names may hold commas and spaces in quotes."""
    if not text.startswith("{"):
        return text
    try:
        return msgspec.convert(yaml12.read(text, "it"), dict[str, float])
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(
            f"{text} is not a mapping of sources to weights, such as {{a.txt: 3, b.txt: 1}}: {error}"
        ) from error


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    convert.__name__ = f"{kind.__name__} or none"
    return convert


def _field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
    docs = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            docs[field.target.id] = ast.literal_eval(after.value)  # pyright: ignore[reportAttributeAccessIssue]
    return docs
