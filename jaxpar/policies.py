"""Names of the rematerialisation policies (pure Python: the command line checks one before JAX is imported)."""

from __future__ import annotations

import difflib
from collections.abc import Collection

NAMES = ("none", "dots", "block_inputs", "full")
"""Policies without arguments; `jaxpar.remat` says what each keeps."""


def parse(name: str, activations: Collection[str] | None = None) -> tuple[str, tuple[str, ...]]:
    """``save:a,b`` -> ("save", ("a", "b")); ``full`` -> ("full", ()).

    Args:
        activations: names that the model gives its activations; None leaves them unchecked.

    Raises:
        ValueError: no such policy or activation; says the nearest, or those that there are.

    >>> parse("offload:query, key")
    ('offload', ('query', 'key'))
    """
    kind, colon, rest = name.partition(":")
    names = tuple(n.strip() for n in rest.split(",")) if colon else ()
    if kind not in (("save", "offload") if colon else NAMES) or (colon and not rest.strip()):
        known = (*NAMES, "save:NAME,NAME", "offload:NAME,NAME")
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"remat {name} is not one of {', '.join(known)}{hint}")
    for activation in names:
        if not activation or (activations is not None and activation not in activations):
            there = f"; there are {', '.join(activations)}" if activations else ""
            raise ValueError(f"remat {name}: no activation is called {activation!r}{there}")
    return kind, names
