"""Sources: what the user names becomes documents to train on and documents to evaluate on.

```
"stdlib"  "texts/**/*.txt"  "gs://bucket/*.parquet"  "corpus.bin"
   ─► files, each of a format   jaxpar.data.files, jaxpar.data.formats
   ─► token cache               jaxpar.data.building, jaxpar.data.cache; one token file needs none
   ─► TokenStore, cut in two    train, held out
```
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxpar.data import building, contents, files, progress, splits, streams
from jaxpar.data import cache as caches
from jaxpar.data.errors import DataError
from jaxpar.data.files import File
from jaxpar.data.formats import huggingface, megatron, nanogpt
from jaxpar.data.formats.pieces import Piece, format_of
from jaxpar.data.formats.tokenfile import TokenFile
from jaxpar.data.records import Encoder
from jaxpar.data.stdlib import stdlib_files
from jaxpar.data.store import TokenStore
from jaxpar.data.tokenizers import Bytes, Tokenizer

VERSION = 1
"""Of what is made of equal input: another one makes every cache anew."""

_KINDS = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "parquet": "parquet",
    "pq": "parquet",
    "arrayrecord": "arrayrecord",
    "array_record": "arrayrecord",
    "bin": "nanogpt",
    "idx": "megatron",
}
"""Format of a suffix; what has no other is text."""

_READY = ("megatron", "nanogpt")
"""Formats of token ids, which need no tokenizer."""

_FIELDLESS = (*_READY, "text")
"""Formats whose rows have no fields."""


@dataclasses.dataclass(frozen=True)
class _Input:
    """A file and the name of its format."""

    kind: str
    file: File


def read(
    source: str,
    tokenizer: Tokenizer,
    *,
    text_key: str = "text",
    cache: str | None = None,
    workers: int | None = None,
    heldout: bool = True,
    say: Callable[[str], None] = print,
) -> tuple[TokenStore, TokenStore | None]:
    """The documents of a source, to train on and held out.

    With several files, about one in twenty is held out whole (of the standard library, one in 30),
    chosen by its name; else the last twentieth of the documents of the last file, or of its tokens
    when it has one document.

    Args:
        source: ``stdlib``, a path, a folder, a glob, or any of them behind fsspec.
        tokenizer: of the texts.
        text_key: field of a record that holds the text.
        cache: folder of token caches; by default jaxpar in $XDG_CACHE_HOME or ~/.cache.
        workers: processes that tokenise; by default one a core.
        heldout: whether to hold out anything; if not, everything is in the first part.
        say: told of progress, of waiting, and of damaged caches.

    Returns:
        (train, held out); None in place of the second where nothing is held out.

    Raises:
        DataError: names the file and row of what cannot be used.
    """
    folder = caches.root(cache)
    found = inputs(source)
    one_in = 30 if source == "stdlib" else 20
    kept, held = splits.by_name([one.file.name for one in found], one_in=one_in)
    # Held-out files stand at the end, so that both parts are one run of documents each.
    ordered = [found[i] for i in (*kept, *held)]
    if len(ordered) == 1 and ordered[0].kind in _READY and not files.is_remote(source):
        store = _mapped(source, ordered[0], tokenizer, folder)
    else:
        store = _cached(source, ordered, tokenizer, text_key, folder, workers, say)
    if not heldout:
        return store, None
    if held:
        cut = store.first[len(kept)]
        return store.part(0, cut), store.part(cut, len(store))
    return splits.end_of_last_file(store, one_in=one_in)


def inputs(source: str) -> list[_Input]:
    """The files of a source, each with its format.

    Raises:
        DataError: no such file, or files that do not go together.
    """
    if source == "stdlib":
        return [_Input("text", file) for file in stdlib_files()]
    path = files.expand(source)
    if files.is_folder(path) and huggingface.is_saved(path):
        return [_Input("huggingface", huggingface.saved(path))]
    out: dict[str, _Input] = {}
    for file in files.find(source):
        kind = kind_of(file.path)
        if kind in _READY:
            pair = megatron.pair(file.path)
            if pair is not None:
                name = file.name.removesuffix(".idx").removesuffix(".bin") + ".bin"
                out[pair.path] = _Input("megatron", dataclasses.replace(pair, name=name))
                continue
        out[file.path] = _Input(kind, file)
    ready = [one for one in out.values() if one.kind in _READY]
    if ready and len(ready) < len(out):
        other = next(one for one in out.values() if one.kind not in _READY)
        raise DataError(
            f"{source} holds token files ({ready[0].file.name}) and text to tokenise "
            f"({other.file.name}); give them as two sources: data.source takes several with weights"
        )
    return list(out.values())


def kind_of(path: str) -> str:
    """Format of a file, by the end of its name.

    >>> kind_of("a/c4-train.00000-of-01024.json.gz"), kind_of("x.array_record-00003-of-00010")
    ('jsonl', 'arrayrecord')
    """
    name = path.rpartition("/")[2].lower()
    packed = streams.compression(name)
    if packed:
        name = name.rpartition(".")[0]
    if (shard := files.shards(name)) and "." not in shard["tail"]:
        name = shard["head"].rstrip("-._")
    kind = _KINDS.get(name.rpartition(".")[2], "text") if "." in name else "text"
    if packed and kind not in ("text", "jsonl"):
        raise DataError(f"{path}: {kind} files are read without another compression; unpack it")
    return kind


def _cached(
    source: str,
    found: Sequence[_Input],
    tokenizer: Tokenizer,
    text_key: str,
    folder: Path,
    workers: int | None,
    say: Callable[[str], None],
) -> TokenStore:
    """Documents from the token cache, which is built if it is not there."""
    stamps = _stamps(found)
    content = _contents(found, folder)
    ready = all(one.kind in _READY for one in found)
    end = _end(tokenizer)
    options = {
        "version": VERSION,
        "content": [[one.kind, *some] for one, some in zip(found, content, strict=True)],
        "tokenizer": end if ready else tokenizer.fingerprint,
        "text_key": text_key if any(one.kind not in _FIELDLESS for one in found) else None,
    }
    fingerprint = _hash(options)
    # Names decide nothing, but errors name them: a renamed file is another cache.
    key = _hash([fingerprint, [[one.file.name, one.file.path] for one in found]])
    dtype = _dtype(found, tokenizer)

    def write(temporary: Path) -> dict[str, object]:
        pieces: list[Piece] = []
        for one in found:
            pieces += format_of(one.kind).plan(one.file, text_key)
        size = sum(piece.size for piece in pieces)
        verb = "copying" if ready else "tokenising"
        with progress.shown(f"{verb} {source}", size, say) as advance:
            made = building.build(
                temporary,
                pieces,
                Encoder(tokenizer, text_key, dtype),
                end=end,
                workers=workers,
                advance=advance,
            )
        if _stamps(found) != stamps:
            raise DataError(
                f"files of {source} changed while they were read; start again when they are whole"
            )
        return {
            **dataclasses.asdict(made),
            "dtype": dtype.str,
            "fingerprint": fingerprint,
            "names": [one.file.name for one in found],
            "version": VERSION,
        }

    place, meta = caches.made(folder / "tokens" / key[:32], write, say)
    try:
        return TokenStore(
            tokens=_map(place / building.TOKENS, dtype),
            offsets=_map(place / building.OFFSETS, np.dtype("<i8")),
            mask=_map(place / building.MASK, np.dtype("u1")) if meta["masked"] else None,
            name=source,
            fingerprint=fingerprint,
            files=tuple(meta["names"]),
            first=tuple(meta["first"]),
            largest=int(meta["largest"]),
        )
    except (OSError, ValueError) as error:
        raise DataError(f"cannot map the token cache {place} into memory: {error}") from error


def _mapped(source: str, one: _Input, tokenizer: Tokenizer, folder: Path) -> TokenStore:
    """The ids of a token file where they lie."""
    end = _end(tokenizer)
    tokens = _opened(one)
    offsets, largest = tokens.offsets, None
    if offsets is None:
        offsets, largest = tokens.document_ends(end)
    return TokenStore(
        tokens=tokens.mapped(),
        offsets=offsets,
        mask=None,
        name=source,
        fingerprint=_hash([one.kind, *_contents([one], folder)[0], end]),
        files=(one.file.name,),
        first=(0,),
        largest=largest,
    )


def _opened(one: _Input) -> TokenFile:
    return (megatron if one.kind == "megatron" else nanogpt).open_tokens(one.file)


def _dtype(found: Sequence[_Input], tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds every id."""
    if all(one.kind in _READY for one in found):
        return np.result_type(*(_opened(one).dtype for one in found)).newbyteorder("<")
    return np.min_scalar_type(max(tokenizer.vocab - 1, tokenizer.end)).newbyteorder("<")


def _contents(found: Sequence[_Input], folder: Path) -> list[list[str]]:
    digests = iter(contents.digests([p for one in found for p in one.file.parts], folder))
    return [[next(digests) for _ in one.file.parts] for one in found]


def _end(tokenizer: Tokenizer) -> int:
    """The id that ends documents in files of ready tokens, or -1: `bytes` made none of them."""
    return -1 if isinstance(tokenizer, Bytes) else tokenizer.end


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _stamps(found: Sequence[_Input]) -> list[files.Stamp]:
    return [files.stamp(part) for one in found for part in one.file.parts]


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # A plain array on the map: slices of numpy's own subclass cost several times as much.
    return np.memmap(path, dtype, "r").view(np.ndarray)
