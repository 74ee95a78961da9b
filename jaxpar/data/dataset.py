"""What a config trains on: sources become stores, stores become rows, rows become batches.

```
DataConfig ─► tokenizer
              sources.read ─► TokenStore ─► Stream | Concatenated | BestFit ─► TrainBatches
                              TokenStore ─► Stream | Concatenated ───────────► HeldOutBatches
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpar.config.schema import DataConfig
from jaxpar.data import best_fit, cache, sources, tokenizers
from jaxpar.data.batches import TrainBatches
from jaxpar.data.errors import DataError
from jaxpar.data.heldout import HeldOutBatches
from jaxpar.data.mixture import CYCLE
from jaxpar.data.order import ORDER
from jaxpar.data.packing import BestFit, Concatenated, Rows, Stream
from jaxpar.data.store import TokenStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Batches to train on and batches to evaluate on; `str` says in one line what is read.

    Attributes:
        train: ``batch(step)``, ``ids(step)``.
        heldout: ``len()`` batches, ``batch(index)``.
        tokenizer: text to ids and back.
        fingerprint: what decides content and order, as JSON; equal for two runs that read the same
            rows at the same steps. Under heldout, what is evaluated on, which decides no step.
    """

    train: TrainBatches
    heldout: HeldOutBatches
    tokenizer: tokenizers.Tokenizer
    fingerprint: Mapping[str, Any]

    def __str__(self) -> str:
        train = _amount([source.store for source in self.train.sources])
        heldout = _amount([source.store for source in self.heldout.sources])
        counts = self.train.order.counts
        mixed = ", ".join(
            f"{count / CYCLE:.1%} {source.store.name}"
            for count, source in zip(counts, self.train.sources, strict=True)
        )
        return f"{train}{f' ({mixed})' if len(counts) > 1 else ''}; held out: {heldout}"


def build(
    config: DataConfig, *, seed: int, vocab: int, say: Callable[[str], None] = print
) -> Dataset:
    """Everything that a run reads, checked as far as it can be before the first step.

    Args:
        seed: decides the order.
        vocab: of the model; ids run from 0 to vocab - 1.
        say: told of what takes time, and of caches that were damaged.

    Raises:
        DataError: a source, tokenizer or file that cannot be used, by name; a token id outside the
            vocabulary, by file and row; too little text for one row.
    """
    tokenizer = tokenizers.load(config.tokenizer)

    def read(source: str, *, heldout: bool) -> tuple[TokenStore, TokenStore | None]:
        return sources.read(
            source,
            tokenizer,
            text_key=config.text_key,
            cache=config.cache,
            workers=config.workers,
            heldout=heldout,
            say=say,
        )

    mixed = config.source if isinstance(config.source, dict) else {config.source: 1.0}
    read_all = [read(source, heldout=config.heldout is None) for source in mixed]
    stores = [train for train, _ in read_all]
    if config.heldout is None:
        held = [store for _, store in read_all if store is not None]
    else:
        held = [read(config.heldout, heldout=False)[0]]
    weights = list(mixed.values())
    train = TrainBatches(
        [_rows(store, config, say) for store in stores],
        weights=weights,
        rows=config.batch,
        seed=seed,
        vocab=vocab,
    )
    heldout = HeldOutBatches(_heldout_rows(held, config), rows=config.batch, vocab=vocab)
    fingerprint = {
        "order": ORDER,
        "seed": seed,
        "batch": config.batch,
        "sequence": config.sequence,
        "packing": config.packing,
        "tokenizer": tokenizer.fingerprint,
        "cycle": CYCLE,
        "sources": [
            {"fingerprint": source.store.fingerprint, "rows": len(source), "share": count}
            for source, count in zip(train.sources, train.order.counts, strict=True)
        ],
        "heldout": [source.store.fingerprint for source in heldout.sources],
    }
    return Dataset(train=train, heldout=heldout, tokenizer=tokenizer, fingerprint=fingerprint)


def _rows(store: TokenStore, config: DataConfig, say: Callable[[str], None]) -> Rows:
    if config.packing == "stream":
        return Stream(store, config.sequence)
    if config.packing == "concatenate":
        return Concatenated(store, config.sequence)
    plans = cache.root(config.cache) / "plans"
    plan = best_fit.load_or_make(store, config.sequence, folder=plans, say=say)
    return BestFit(store, config.sequence, plan)


def _heldout_rows(stores: Sequence[TokenStore], config: DataConfig) -> list[Rows]:
    kind = Stream if config.packing == "stream" else Concatenated
    rows: list[Rows] = []
    problems: list[str] = []
    for store in stores:
        try:
            rows.append(kind(store, config.sequence, tail=True))
        except DataError as error:  # of a mixture, the held-out part of one source may be empty
            problems.append(str(error))
    if not rows:
        what = "; ".join(problems) or "no source has a part that is held out"
        raise DataError(f"nothing to evaluate on: {what}; name a source in data.heldout")
    return rows


def _amount(stores: Sequence[TokenStore]) -> str:
    def count(number: int, noun: str) -> str:
        return f"{number:,} {noun}{'' if number == 1 else 's'}"

    tokens = sum(len(store.tokens) for store in stores)
    documents = sum(len(store) for store in stores)
    files = sum(len(store.files) for store in stores)
    return f"{count(tokens, 'token')} of {count(documents, 'document')} of {count(files, 'file')}"
