"""Words of a config's errors: the nearest name, and why a value does not fit its field and what would."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` or nothing."""
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def explain(key: str, value: Any, hint: Any) -> str:
    """What is wrong with `value` under `key`.

    Args:
        key: with its section, such as ``optimizer.eps``.
        value: as the file has it.
        hint: type of the field.

    >>> explain("steps", "0100", int)
    "steps is '0100'; a whole number in plain digits"
    >>> explain("mesh", [4, 2], str)
    'mesh is [4, 2]; text: write it in quotes, "4x2"'
    """
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    kinds = [hint] if get_origin(hint) is Literal else kinds
    wanted = ", or ".join(_wanted(kind, key, value) for kind in kinds)
    null = ", or null" if type(None) in get_args(hint) else ""
    return f"{key} is {'empty' if value is None else shown}; {wanted}{null}"


def choices(values: Iterable[Any], given: Any) -> str:
    """The values that there are, and which of the words among them `given` is near to."""
    values = list(values)
    words = [value for value in values if isinstance(value, str)]
    return f"{', '.join(map(str, values))}{nearest(str(given), words)}"


def _wanted(kind: Any, key: str, value: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {choices(get_args(kind), value)}"
    if get_origin(kind) is dict:
        return "a mapping of names to numbers"
    if kind is str:
        quoted = _as_text(key, value)
        if isinstance(value, bool):
            return "text, in quotes where it is yes, no, on, off, true or false"
        return "text" if quoted is None else f'text: write it in quotes, "{quoted}"'
    return {bool: "true or false", int: "a whole number in plain digits", float: "a number"}[kind]


def _as_text(key: str, value: Any) -> str | None:
    """What was probably meant, as text."""
    if isinstance(value, int | float):
        return str(value)
    if key == "mesh" and isinstance(value, list):
        return "x".join(map(str, value))
    if key == "mesh" and isinstance(value, Mapping):
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    return None
