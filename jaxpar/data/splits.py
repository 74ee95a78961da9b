"""What is held out of a source: whole files by their names, or the end of the last one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from jaxpar.data.errors import DataError
from jaxpar.data.store import TokenStore


def by_name(names: Sequence[str], *, one_in: int) -> tuple[list[int], list[int]]:
    """Places of the files to train on and of those held out, about one in `one_in`.

    A hash of the name decides, so that adding a file moves no other one. Where it would hold out
    nothing or everything, nothing is: the end of the last file has to do.
    """
    held = [i for i, name in enumerate(names) if _hash(name) % one_in == 0]
    if not held or len(held) == len(names):
        return list(range(len(names))), []
    out = set(held)
    return [i for i in range(len(names)) if i not in out], held


def end_of_last_file(store: TokenStore, *, one_in: int) -> tuple[TokenStore, TokenStore]:
    """All but the last documents of the last file, and those; of a single document, its end.

    Raises:
        DataError: the source is too small to be cut.
    """
    documents = len(store) - store.first[-1]
    if documents > 1:
        cut = len(store) - max(1, documents // one_in)
        return store.part(0, cut), store.part(cut, len(store))
    tokens = len(store.tokens)
    cut = tokens - max(1, int(store.offsets[-1] - store.offsets[-2]) // one_in)
    if cut < 1:
        raise DataError(
            f"{store.name} has {tokens} token and nothing of it can be held out; give more text, "
            "or another source to evaluate on in data.heldout"
        )
    return store.cut(cut)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
