"""What the small commands share: a parser whose every error is one line and exit code 2, naming the nearest flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxpar.config import ConfigError, nearest

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong on one line; abbreviations of flags are unknown flags."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags of a command line.

        Exits 2, with one line on stderr, on an unknown flag or a wrong value.
        """
        try:
            for arg in argv:
                if arg == "--":
                    break
                flag = arg.partition("=")[0]
                if arg.startswith("--") and flag not in self._option_string_actions:
                    known = [f for f in self._option_string_actions if f.startswith("--")]
                    raise ConfigError(f"unknown flag {flag}{nearest(flag, known)}")
            return self.parse_args(argv)
        except ConfigError as error:
            refuse(error)


def refuse(error: Exception, code: int = USAGE_ERROR) -> NoReturn:
    """Say on one line of stderr what is wrong, and exit."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code)
