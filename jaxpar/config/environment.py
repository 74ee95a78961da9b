"""Environment variables that would be ignored, or on which XLA would end the process: refused before JAX is imported.

In: the environment. Out: nothing, or an error that names the variable and the nearest thing that exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import mmap
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from jaxpar.config.hints import nearest
from jaxpar.config.schema import SECTIONS, ConfigError, RunConfig

_HARMLESS = re.compile(r"--xla_force_host_platform_device_count=[0-9]{1,6}")
"""What is set most, and need not be tried."""

# Making compile options reads the flags and starts nothing. Where a jaxlib has them elsewhere, the CPU backend reads them.
_TRY = """
try:
    from jaxlib import _jax
    _jax.CompileOptions()
except (ImportError, AttributeError):
    import jax
    jax.devices()
"""


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse environment variables that would be ignored or would abort the process.

    XLA flags other than the number of CPU devices are read by XLA itself, in a process of its own: about 0.3 s.

    Raises:
        ConfigError: a JAXPAR_ variable (there are none), or an XLA flag that is not known or has no readable value.
    """
    for name in environ:
        if name.startswith("JAXPAR_"):
            kinds = (RunConfig, *SECTIONS.values())
            flags = [f"--{f.name.replace('_', '-')}" for k in kinds for f in dataclasses.fields(k)]
            asked = "--" + name[len("JAXPAR_") :].lower().replace("_", "-")
            hint = nearest(asked, flags) or "; settings are flags, see --help"
            raise ConfigError(f"environment variable {name} means nothing to jaxpar{hint}")
    tokens = environ.get("XLA_FLAGS", "").split()
    for token in tokens:
        if not token.startswith("--") and not Path(token).is_file():
            raise ConfigError(
                f"XLA_FLAGS holds {token!r}, which is not a --flag; XLA would abort the process on it"
            )
    if not all(_HARMLESS.fullmatch(token) for token in tokens):
        _try(environ)


def _try(environ: Mapping[str, str]) -> None:
    """Let XLA read its flags where it may abort."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY],
            env={**environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:  # too busy a machine says nothing about the flags
        return
    if done.returncode == 0:
        return
    if value := re.search(r"Couldn't interpret value (.*) for flag (\w+)", done.stderr):
        raise ConfigError(
            f"XLA_FLAGS holds --{value[2]}={value[1]}, a value that XLA cannot read and would abort the process on"
        )
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: *(\S+)", done.stderr):
        raise ConfigError(
            f"XLA_FLAGS holds {unknown[1]}, which XLA does not know and would abort the process on"
            f"{_remedy(unknown[1])}"
        )
    lines = done.stderr.strip().splitlines()
    raise ConfigError(
        f"XLA_FLAGS is refused by XLA, which would abort the process: {lines[0] if lines else 'it gives no reason'}"
    )


def _remedy(flag: str) -> str:
    """What to write instead of a flag that XLA does not know."""
    name, equals, _ = flag.lstrip("-").partition("=")
    if name.startswith("xla_tpu_"):
        return "; flags of the TPU compiler belong in LIBTPU_INIT_ARGS"
    known = _names()
    if name in known and not equals:
        return f"; it takes a value, --{name}=VALUE"
    close = difflib.get_close_matches(name, known, 1, 0.8)
    return f"; did you mean --{close[0]}?" if close else ""


def _names() -> set[str]:
    """Names of XLA's flags: jaxlib has no list of them, but they stand in its library as texts."""
    found: set[str] = set()
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("*.so"):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
                at = m.find(b"\0xla_")
                while at >= 0:
                    end = m.find(b"\0", at + 1)
                    text = m[at + 1 : end].decode(errors="replace")
                    if re.fullmatch(r"[a-z0-9_]+", text):
                        found.add(text)
                    at = m.find(b"\0xla_", end) if end >= 0 else -1
    return found
