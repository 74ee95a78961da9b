"""Text files as byte tokens: a path or a glob becomes a `Corpus` of training and held-out tokens.

A token is one byte of the UTF-8 text (vocabulary 256); byte 0, which text does not contain, ends
every file.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
from collections.abc import Iterable
from os.path import commonpath

import numpy as np
from jaxtyping import Int, UInt8

END = 0
"""Token after the last byte of every file."""

VOCAB = 256


class DataError(ValueError):
    """Input that cannot be used: says which file or which row of which batch, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens to train on and tokens to evaluate on.

    Attributes:
        train: tokens of the training files, one after the other.
        heldout: tokens that are never trained on.
        train_files: names, in order.
        heldout_files: names, in order; a name in both lists is one file cut in two.
    """

    train: UInt8[np.ndarray, " tokens"]
    heldout: UInt8[np.ndarray, " tokens"]
    train_files: tuple[str, ...]
    heldout_files: tuple[str, ...]

    def __str__(self) -> str:
        def part(tokens: np.ndarray, files: tuple[str, ...]) -> str:
            plural = "" if len(files) == 1 else "s"
            return f"{len(tokens):,} byte tokens of {len(files)} file{plural}"

        heldout = part(self.heldout, self.heldout_files)
        return f"{part(self.train, self.train_files)}; held out: {heldout}"


def encode(text: str) -> Int[np.ndarray, " tokens"]:
    """Byte tokens of a text.

    >>> encode("aé").tolist()
    [97, 195, 169]
    """
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: Iterable[int]) -> str:
    """Text of byte tokens; what is not UTF-8, or no byte, shows as the replacement character.

    >>> decode([97, 195, 169, 999])
    'aé\ufffd'
    """
    lost = "\N{REPLACEMENT CHARACTER}".encode()
    return b"".join(bytes([t]) if t < VOCAB else lost for t in map(int, tokens)).decode(
        errors="replace"
    )


def read_files(pattern: str) -> Corpus:
    """The corpus of a file, of the files under a folder, or of those that match a glob.

    ``**`` in a glob goes into folders. With several files, about one in twenty is held out whole,
    chosen by its name; of a single file, the last twentieth.

    Raises:
        DataError: no such file; a file that is empty, unreadable or not UTF-8.
    """
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        found = glob.glob(os.path.join(glob.escape(pattern), "**"), recursive=True)
    elif os.path.exists(pattern):
        found = [pattern]
    else:
        found = glob.glob(pattern, recursive=True)
    names = sorted(name for name in found if not os.path.isdir(name))
    if not names:
        kind = "matches" if glob.has_magic(pattern) else "is there at"
        raise DataError(
            f"no file {kind} {pattern!r}; give a path, a folder, a glob such as 'texts/*.txt', "
            "or stdlib"
        )
    root = commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
    texts = {os.path.relpath(name, root): read_text(name) for name in names}
    return split(texts, one_in=20)


def read_text(path: str) -> bytes:
    """The bytes of a file of UTF-8 text.

    Raises:
        DataError: names the file, and what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not data:
        raise DataError(f"{path} is empty")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it, or leave it out"
        ) from error
    return data


def split(texts: dict[str, bytes], *, one_in: int) -> Corpus:
    """Hold out about one file in `one_in`, by a hash of its name: adding a file moves no other one.

    Where the hash would hold out nothing or everything, the end of the last file is held out.
    """
    held = [name for name in texts if _hash(name) % one_in == 0]
    kept = [name for name in texts if name not in set(held)]
    if held and kept:
        parts = [_tokens(texts[n] for n in names) for names in (kept, held)]
        return Corpus(
            train=parts[0], heldout=parts[1], train_files=tuple(kept), heldout_files=tuple(held)
        )
    whole = _tokens(texts.values())
    last = list(texts)[-1]
    cut = len(whole) - max(1, (len(texts[last]) + 1) // one_in)
    return Corpus(
        train=whole[:cut], heldout=whole[cut:], train_files=tuple(texts), heldout_files=(last,)
    )


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _tokens(texts: Iterable[bytes]) -> UInt8[np.ndarray, " tokens"]:
    end = bytes([END])
    return np.frombuffer(b"".join(text + end for text in texts), np.uint8)
