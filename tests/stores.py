"""Token stores for tests, from lists of documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxpar.data.store import TokenStore


def store(
    documents: Sequence[Sequence[int]],
    *,
    mask: Sequence[Sequence[int]] | None = None,
    name: str = "documents",
) -> TokenStore:
    """A store of these documents; their tokens are taken as they are, end tokens included."""
    tokens = np.array([token for document in documents for token in document], np.uint16)
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    flat = None if mask is None else np.array([m for ms in mask for m in ms], np.uint8)
    digest = hashlib.sha256(tokens.tobytes() + offsets.tobytes())
    if flat is not None:
        digest.update(flat.tobytes())
    return TokenStore(
        tokens=tokens,
        offsets=offsets,
        mask=flat,
        name=name,
        fingerprint=digest.hexdigest(),
        files=(f"{name}.txt",),
        first=(0,),
    )


def numbered(lengths: Sequence[int], **more) -> TokenStore:
    """Documents of these lengths in which every token is its own place in the store."""
    ends = np.cumsum(lengths).tolist()
    documents = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return store([list(d) for d in documents], **more)
