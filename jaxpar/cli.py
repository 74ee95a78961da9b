"""What the small commands share: a parser whose every error is one line and exit code 2, and the way to a run folder."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxpar.config import ConfigError, check_environment, nearest

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong on one line; abbreviations of flags are unknown flags."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags of a command line.

        Exits 2, with one line on stderr, on an unknown flag, a wrong value or an environment that XLA would abort on.
        """
        try:
            check_environment(os.environ)
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


def find_run(run: str) -> pathlib.Path:
    """The run folder of a run folder, of its ``checkpoints`` or of one checkpoint in it.

    Raises:
        ConfigError: none there.
    """
    path = pathlib.Path(run).absolute()
    if not path.exists():
        folder = path.parent
        beside = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
        raise ConfigError(f"no run at {run}{nearest(path.name, beside)}")
    home = next((p for p in (path, *path.parents[:2]) if (p / "config.yaml").is_file()), None)
    if home is None:
        raise ConfigError(
            f"no run at {run}: neither it nor the two folders above hold a config.yaml; give the folder of a run, "
            "such as runs/NAME, or a checkpoint in it"
        )
    if home == path and not (path / "checkpoints").is_dir():
        raise ConfigError(f"no complete checkpoint in {run}: the run has saved none yet")
    return home


def refuse(error: Exception, code: int = USAGE_ERROR) -> NoReturn:
    """Say on one line of stderr what is wrong, and exit."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code)
