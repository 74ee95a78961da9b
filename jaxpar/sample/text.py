"""Tokens become text as they come, in whole characters."""

from __future__ import annotations

from typing import Protocol

_LOST = "\N{REPLACEMENT CHARACTER}"

_WINDOW, _CONTEXT = 64, 16
"""Tokens that are decoded again for each new one, at most; and those that stay when older ones are let go."""


class Decodes(Protocol):
    """The part of a tokenizer that is needed."""

    def decode(self, ids: list[int]) -> str: ...


class TextStream:
    """Text of tokens that come one at a time.

    A token may hold a part of a character, or a word whose space depends on what stands before it: the text is that of
    all tokens, and what may still change waits. An incomplete character at the end decodes to one replacement character,
    so that one character waits at most.

    >>> from jaxpar.data.tokenizers import Bytes
    >>> stream = TextStream(Bytes())
    >>> [stream.add(byte) for byte in "né".encode()], stream.rest()
    (['n', '', 'é'], '')
    """

    def __init__(self, tokenizer: Decodes):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        certain = self._certain()
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(self._ids) >= _WINDOW:
            self._ids = self._ids[-_CONTEXT:]
            self._shown = len(self._certain())
        return new

    def _certain(self) -> str:
        text = self._tokenizer.decode(self._ids)
        return text[:-1] if text.endswith(_LOST) else text

    def rest(self) -> str:
        """What waited, at the end of the text."""
        text = self._tokenizer.decode(self._ids)
        new, self._shown = text[self._shown :], len(text)
        return new


def printable(text: str) -> str:
    """A text without the control characters that steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else _LOST for c in text)
