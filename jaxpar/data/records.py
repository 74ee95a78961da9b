"""Records as documents: which fields hold the text, what is trained on, and tokens of it all.

```
{"text": str}                          all of it is trained on
{"prompt": str, "completion": str}     only the completion is
{"tokens": [int]}  {"input_ids": [int]}    no tokenizer; with "loss_mask": [0 or 1], or
                                           "labels": [int], where -100 is ignored
```
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxpar.config.schema import nearest
from jaxpar.data.errors import DataError
from jaxpar.data.formats.pieces import Encoded, Rows
from jaxpar.data.tokenizers import Tokenizer

IGNORED = -100
"""Label that the loss leaves out."""

_IDS = ("tokens", "input_ids")
_MASKS = ("loss_mask", "labels")

# Part of a document: a text or ids, and which of its tokens are trained on.
_Part = tuple[str | np.ndarray, bool | np.ndarray]


def fields(keys: Collection[str], text_key: str, where: str) -> tuple[str, ...]:
    """The fields to read of a record that has `keys`; the first form that fits is taken.

    Raises:
        DataError: none fits: names what is there, and the nearest.
    """
    if text_key in keys:
        return (text_key,)
    if "prompt" in keys and "completion" in keys:
        return ("prompt", "completion")
    if ids := next((key for key in _IDS if key in keys), None):
        return (ids, *[key for key in _MASKS if key in keys][:1])
    there = ", ".join(map(repr, keys)) or "none"
    raise DataError(
        f"{where}: no field {text_key!r}{nearest(text_key, keys)}; the record has {there}; name "
        "the one that holds the text in data.text_key, or give prompt and completion, or tokens"
    )


class Encoder:
    """Turns rows into documents of token ids.

    Args:
        tokenizer: of the texts; ids that a record brings must be in its vocabulary.
        text_key: field of a record that holds the text.
        dtype: of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, text_key: str, dtype: np.dtype) -> None:
        self.tokenizer, self.text_key, self.dtype = tokenizer, text_key, dtype
        self._end = np.array([tokenizer.end]).astype(dtype)

    def __call__(self, rows: Rows) -> Encoded:
        """The documents of some rows, each with its end token.

        Raises:
            DataError: names file and row of a record that cannot be used.
        """
        documents = [self._parts(value, rows.where, i) for i, value in enumerate(rows.values)]
        ids = iter(self._ids(documents, rows.where))
        tokens: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        lengths = np.empty(len(documents), np.int64)
        for i, parts in enumerate(documents):
            length = 0
            trained: Any = True
            for value, trained in parts:
                some = next(ids) if isinstance(value, str) else value
                tokens.append(some.astype(self.dtype, copy=False))
                masks.append(np.broadcast_to(np.asarray(trained, np.uint8), some.shape))
                length += len(some)
            unfinished = rows.unfinished and i == len(documents) - 1
            # Ids that somebody else made often have their end token already.
            ready = not isinstance(parts[-1][0], str) and len(tokens[-1]) > 0
            ended = ready and tokens[-1][-1] == self.tokenizer.end
            if not unfinished and not ended:
                tokens.append(self._end)
                masks.append(masks[-1][-1:] if len(masks[-1]) else np.ones(1, np.uint8))
                length += 1
            lengths[i] = length
        mask = np.concatenate(masks) if any(not m.all() for m in masks) else None
        return Encoded(np.concatenate(tokens), lengths, mask, rows.unfinished)

    def _ids(self, documents: list[list[_Part]], where: Callable[[int], str]) -> list[np.ndarray]:
        texts = [value for parts in documents for value, _ in parts if isinstance(value, str)]
        try:
            return list(self.tokenizer.encode_batch(texts)) if texts else []
        except UnicodeEncodeError as error:
            for i, parts in enumerate(documents):
                for value, _ in parts:
                    if isinstance(value, str) and (lone := _surrogate(value)):
                        raise DataError(
                            f"{where(i)}: the text holds half of a surrogate pair ({lone}), which "
                            "is no character; write it again as UTF-8"
                        ) from error
            raise

    def _parts(self, value: Any, where: Callable[[int], str], i: int) -> list[_Part]:
        if isinstance(value, str):
            return [(value, True)]
        if not isinstance(value, Mapping):
            raise DataError(
                f"{where(i)}: a record is an object such as {{{self.text_key!r}: '...'}}, "
                f"not {_kind(value)}"
            )
        names = fields(value, self.text_key, where(i) if self._unfit(value) else "")
        if names[0] in _IDS and names[0] != self.text_key:
            return [self._given(value, names, lambda: where(i))]
        for name in names:
            if not isinstance(value[name], str):
                raise DataError(
                    f"{where(i)}: field {name!r} is {_kind(value[name])}; it must be text"
                )
        if len(names) == 2:
            return [(value["prompt"], False), (value["completion"], True)]
        return [(value[names[0]], True)]

    def _unfit(self, value: Mapping[str, Any]) -> bool:
        """Whether `fields` will need a place for its error: to find one can mean to count lines."""
        pair = "prompt" in value and "completion" in value
        return not (self.text_key in value or pair or any(key in value for key in _IDS))

    def _given(
        self, value: Mapping[str, Any], names: tuple[str, ...], where: Callable[[], str]
    ) -> _Part:
        ids = _integers(value[names[0]], names[0], where)
        vocab = self.tokenizer.vocab
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            at = int(np.argmax((ids < 0) | (ids >= vocab)))
            raise DataError(
                f"{where()}: {names[0]}[{at}] is {int(ids[at])}, outside the vocabulary of the "
                f"tokenizer {self.tokenizer.name} (0 to {vocab - 1}); set data.tokenizer to the "
                "one that made these tokens"
            )
        if len(names) == 1:
            return ids, True
        other = _integers(value[names[1]], names[1], where)
        if len(other) != len(ids):
            raise DataError(
                f"{where()}: {len(ids)} {names[0]} and {len(other)} {names[1]}; give one of each "
                "for every token"
            )
        if names[1] == "loss_mask":
            bad = (other != 0) & (other != 1)
            allowed = "0 (ignored) or 1"
        else:
            bad = (other != IGNORED) & (other != ids)
            allowed = f"{IGNORED} (ignored) or the token in its own place"
        if bad.any():
            at = int(np.argmax(bad))
            raise DataError(
                f"{where()}: {names[1]}[{at}] is {int(other[at])}; it must be {allowed}"
            )
        return ids, (other != (0 if names[1] == "loss_mask" else IGNORED)).astype(np.uint8)


def _integers(value: Any, name: str, where: Callable[[], str]) -> np.ndarray:
    try:
        out = np.asarray(value)
    except (ValueError, OverflowError):
        out = np.empty((0, 0))
    if out.size == 0 and out.ndim == 1:
        return np.empty(0, np.int64)
    if out.ndim != 1 or out.dtype.kind not in "iub":
        raise DataError(f"{where()}: field {name!r} is {_kind(value)}; it must be a list of ints")
    return out


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 40 else text[:36] + ' ...'}"


def _surrogate(text: str) -> str | None:
    return next((f"U+{ord(c):04X}" for c in text if 0xD800 <= ord(c) < 0xE000), None)
