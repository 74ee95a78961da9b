"""Tokenizers: text to token ids and back, behind one small protocol.

```
load("bytes")                      a token a byte, vocabulary 256
load("gpt2/tokenizer.json")        Hugging Face
load("llama/tokenizer.model")      SentencePiece (extra `hf`)
```

Nothing is ever downloaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from jaxpar.data import files
from jaxpar.data.errors import DataError

LONGEST = 1 << 18
"""Characters that a library gets at once; longer texts are cut at line ends (`cut`)."""

ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Tokens that end a document where no tokenizer_config.json names another, in this order."""

_LOST = "\N{REPLACEMENT CHARACTER}"

Ids = Int32[np.ndarray, " tokens"]


class Tokenizer(Protocol):
    """What a tokenizer has to offer; any object that does may be given to `sources.read`."""

    @property
    def name(self) -> str:
        """As the user wrote it."""
        ...

    @property
    def vocab(self) -> int:
        """Ids run from 0 to vocab - 1."""
        ...

    @property
    def end(self) -> int:
        """Id that ends every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex; another one means that texts may become other ids."""
        ...

    def encode(self, text: str) -> Ids:
        """Ids of a text, without an end token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; ids outside the vocabulary show as the replacement character."""
        ...


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A token is one byte of the UTF-8 text; byte 0, which text does not contain, ends a document.

    >>> Bytes().encode("aé").tolist()
    [97, 195, 169]
    >>> Bytes().decode([97, 195, 169, 999])
    'aé\ufffd'
    """

    name: str = "bytes"
    vocab: int = 256
    end: int = 0
    fingerprint: str = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, text: str) -> Ids:
        """The bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of bytes; what is not UTF-8 shows as the replacement character."""
        return _decode_known(ids, self.vocab, lambda part: bytes(part).decode(errors="replace"))


class HuggingFace:
    """A tokenizer.json, through the `tokenizers` library, without the special tokens it would add.

    Special tokens that stand in a text become their ids, as they do in the library. Texts longer
    than `LONGEST` characters are encoded in pieces cut at line ends, which bounds memory; a merge
    over such a cut is lost. Truncation and padding, which some files ask for, are off.

    Args:
        definition: content of tokenizer.json.
        name: as the user wrote it.
        end: token that ends a document; by default the first of `ENDS` that is there.

    Raises:
        DataError: not a tokenizer, or no token that ends a document.
    """

    def __init__(self, definition: bytes, *, name: str, end: str | None = None) -> None:
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_str(definition.decode())
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"tokenizer {name} is not a Hugging Face tokenizer.json: {error}"
            ) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        known = self._inner.get_vocab(with_added_tokens=True)
        self.name = name
        self.vocab = max(known.values(), default=-1) + 1
        wanted = ENDS if end is None else (end,)
        found = next((known[token] for token in wanted if token in known), None)
        if found is None:
            asked = "none of " + ", ".join(ENDS) if end is None else f"no token {end!r}"
            raise DataError(
                f"tokenizer {name} has {asked} to end documents with; name one of its tokens as "
                "eos_token in a tokenizer_config.json beside it"
            )
        self.end: int = found
        digest = hashlib.sha256(b"tokenizer.json")
        digest.update(hashlib.sha256(definition).digest() + str(self.end).encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> Ids:
        """Ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text, in threads of the library's own."""

        def ids(pieces: list[str]) -> list[Ids]:
            out = self._inner.encode_batch_fast(pieces, add_special_tokens=False)
            return [np.array(piece.ids, np.int32) for piece in out]

        return _in_pieces(texts, ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens shown."""
        return _decode_known(
            ids, self.vocab, lambda part: self._inner.decode(part, skip_special_tokens=False)
        )


class SentencePiece:
    """A SentencePiece model; its end-of-sentence piece ends a document.

    Texts longer than `LONGEST` characters are encoded in pieces cut at line ends; a model that
    adds a space in front of a text adds one in front of each piece.

    Args:
        model: content of the .model file.
        name: as the user wrote it.

    Raises:
        DataError: the extra `hf` is not installed, not a model, or one that has no end token.
    """

    def __init__(self, model: bytes, *, name: str) -> None:
        library = optional("sentencepiece", f"tokenizer {name} is a SentencePiece model")
        try:
            self._inner: Any = library.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"tokenizer {name} is not a SentencePiece model: {error}") from error
        self.name = name
        self.vocab: int = self._inner.get_piece_size()
        self.end: int = self._inner.eos_id()
        if self.end < 0:
            raise DataError(
                f"tokenizer {name} has no end-of-sentence piece to end documents with; "
                "train it with --eos_id=2 or another place"
            )
        self.fingerprint = hashlib.sha256(b"sentencepiece" + model).hexdigest()

    def encode(self, text: str) -> Ids:
        """Ids of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""

        def ids(pieces: list[str]) -> list[Ids]:
            # One thread: the processes of the cache are parallel already.
            return [np.array(x, np.int32) for x in self._inner.encode(pieces, num_threads=1)]

        return _in_pieces(texts, ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        return _decode_known(ids, self.vocab, self._inner.decode)


def load(name: str) -> Tokenizer:
    """The tokenizer called `name`: bytes, a tokenizer.json, a SentencePiece .model, or their folder.

    The end token of a tokenizer.json is the ``eos_token`` of a tokenizer_config.json beside it,
    else the first of `ENDS` that it knows.

    Raises:
        DataError: no such thing, a file that is no tokenizer, or one without an end token.
    """
    if name == "bytes":
        return Bytes()
    path = files.expand(name)
    for default in ("tokenizer.json", "tokenizer.model"):
        if files.exists(files.join(path, default)):
            path = files.join(path, default)
            break
    would = "give bytes, the path of a tokenizer.json, or of a SentencePiece .model file"
    if not path.endswith((".json", ".model")) or not files.exists(path):
        near = "; did you mean bytes?" if name.lower() in {"byte", "utf8", "utf-8"} else ""
        is_file = "is neither" if files.exists(path) else "is no file and not"
        raise DataError(
            f"tokenizer {name!r} {is_file} the name of a tokenizer{near}; {would} "
            "(nothing is downloaded)"
        )
    content = files.read(path)
    if path.endswith(".model"):
        return SentencePiece(content, name=name)
    return HuggingFace(content, name=name, end=_configured_end(path))


def cut(text: str, size: int) -> Iterator[str]:
    r"""A text in pieces of at most `size` characters, cut after line ends, else before spaces.

    Of line ends the last one between two lines of words is taken, where there is one.

    Where to cut depends on the next `size` characters alone, so that a reader who sees no more of
    the text than that cuts it at the same places.

    >>> list(cut("ab\ncd\nefgh", 5))
    ['ab\n', 'cd\n', 'efgh']
    """
    at = 0
    while len(text) - at > size:
        stop = piece_end(text, at, size)
        yield text[at:stop]
        at = stop
    yield text[at:]


def piece_end(text: str, at: int, size: int) -> int:
    """Where the piece that begins at `at` ends, of a text that has more than `size` from there."""
    # Between two lines of words no tokenizer in use joins anything; indentation and blank lines
    # some of them do join with the line end.
    newline = text.rfind("\n", at, at + size - 1)
    while newline > at:
        if not text[newline - 1].isspace() and not text[newline + 1].isspace():
            return newline + 1
        newline = text.rfind("\n", at, newline)
    if (newline := text.rfind("\n", at, at + size)) >= 0:
        return newline + 1
    # The space belongs to the word behind it in most vocabularies.
    return space if (space := text.rfind(" ", at + 1, at + size)) > 0 else at + size


def optional(module: str, what: str) -> Any:
    """A module of the extra `hf`.

    Raises:
        DataError: it is not installed: says `what` needs it, and how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{what}, which needs the package {module}: pip install 'jaxpar[hf]'"
        ) from error


def _configured_end(path: str) -> str | None:
    beside = files.join(os.path.dirname(path), "tokenizer_config.json")
    if not files.exists(beside):
        return None
    try:
        token = json.loads(files.read(beside)).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{beside} is not a JSON object: {error}") from error
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise DataError(f"{beside}: eos_token is {token!r}; give the token as text")
    return token


def _in_pieces(texts: Sequence[str], encode: Callable[[list[str]], list[Ids]]) -> list[Ids]:
    if all(len(text) <= LONGEST for text in texts):
        return encode(list(texts))
    pieces = [list(cut(text, LONGEST)) for text in texts]
    ids = iter(encode([piece for of_text in pieces for piece in of_text]))
    return [np.concatenate([next(ids) for _ in of_text]) for of_text in pieces]


def _decode_known(ids: Iterable[int], vocab: int, decode: Callable[[list[int]], str]) -> str:
    """Runs of ids inside the vocabulary by `decode`; each one outside becomes `_LOST`."""
    out = []
    for known, run in itertools.groupby(map(int, ids), lambda i: 0 <= i < vocab):
        part = list(run)
        out.append(decode(part) if known else _LOST * len(part))
    return "".join(out)
