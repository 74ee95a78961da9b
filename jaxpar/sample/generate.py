"""`Sampler`: tokens after prompts, one at a time, from a model that is split over a mesh.

```
host     hands over step i + 1 ......... and only then reads token i: the device always has its next step
device   | prefill          | step 1 | step 2 | ...        one compilation of each
```

Prompts are padded to a bucket length and the cache to another, so that nearby lengths share their compilations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from jaxpar import precision as precisions
from jaxpar.config import ModelConfig
from jaxpar.mesh import Mesh
from jaxpar.models.decoding import Cache, Decoder, both
from jaxpar.sample.choice import NOT_FINITE, Choice, choose

ENDED = -1
"""In place of a token of a row whose end token was drawn."""

_SMALLEST = 16


def bucket(length: int) -> int:
    """The padded size of a length: the next power of two from 16 on.

    >>> bucket(1), bucket(16), bucket(17)
    (16, 16, 32)
    """
    return max(_SMALLEST, 1 << (length - 1).bit_length())


class Sampler:
    """A model ready to continue prompts.

    Parameters stay where training has them, split over `model` and in the compute dtype: what lies so already is shared
    with the caller and not copied, so that a state must not be donated to a train step while its sampler is in use.

    Args:
        mesh: devices; prompts are split over the batch axes.
        params: parameters of true shapes or of the stored shapes of `mesh`, under any ZeRO stage.
        precision: name of the run's precision; its compute dtype is what is computed in.
        vocab: ids from it on are never drawn, where the tokenizer has fewer than the model.

    Raises:
        ValueError, LayoutError: a mesh or parameters that do not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        params: Any,
        *,
        precision: str = "float32",
        vocab: int | None = None,
    ):
        self.config = config
        self.mesh = mesh
        self.decoder = Decoder(config, mesh)
        self.params = self.decoder.place(params, precisions.named(precision).compute)
        self.vocab = min(vocab or config.vocab, config.vocab)

    def room(self, length: int, count: int) -> tuple[int, int]:
        """(tokens of a prompt that are read, the last ones; tokens that can be written after them).

        Rotary positions (llama) have no end. Learned ones (gpt2) do: the end of the prompt is kept as far as it leaves
        room for `count` tokens, and where nothing of it would stay, its last token is kept and less is written.
        """
        if self.config.style != "gpt2":
            return length, count
        places = self.config.positions + 1  # the last token written is not read
        kept = min(length, max(1, places - count))
        return kept, min(count, places - kept)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | Int[np.ndarray, " tokens"]],
        count: int,
        *,
        choice: Choice | None = None,
        seed: int = 0,
        end: int | None = None,
    ) -> list[Int[np.ndarray, " written"]]:
        """What the model writes after each prompt: up to `count` tokens, without the end token.

        Arguments and errors as of `stream`.
        """
        rows = list(self.stream(prompts, count, choice=choice, seed=seed, end=end))
        table = np.stack(rows) if rows else np.zeros((0, len(prompts)), np.int32)
        return [column[column != ENDED] for column in table.T]

    def stream(
        self,
        prompts: Sequence[Sequence[int] | Int[np.ndarray, " tokens"]],
        count: int,
        *,
        choice: Choice | None = None,
        seed: int = 0,
        end: int | None = None,
        cache: bool = True,
    ) -> Iterator[Int[np.ndarray, " prompts"]]:
        """The next token of every prompt, up to `count` times; stops when every row has ended.

        Args:
            prompts: token ids of any lengths; an empty one starts from `end`.
            choice: how a token is chosen; the model's own odds by default.
            seed: with the place of a prompt in the list and of a token in the text it decides every draw.
            end: token that ends a text: `ENDED` from it on.
            cache: False reads the whole text again for every token, to compare with.

        Raises:
            ValueError: no prompt, an empty one without `end`, a token outside the vocabulary, a count below 1; and while it
                runs, logits that are not finite.
        """
        if count < 1:
            raise ValueError(f"count {count}; at least 1 token")
        rows = [np.asarray(prompt, np.int64) for prompt in prompts]
        rows = [np.array([end]) if end is not None and not row.size else row for row in rows]
        self._check(rows)
        room = [self.room(len(row), count) for row in rows]
        rows = [row[len(row) - kept :] for row, (kept, _) in zip(rows, room, strict=True)]
        count = min(written for _, written in room)
        start = self._start if cache else self._start_again
        return _read(start(rows, count, choice or Choice(), seed), len(rows), end)

    def _check(self, rows: list[Int[np.ndarray, " tokens"]]) -> None:
        if not rows:
            raise ValueError("no prompt; give at least one")
        for i, row in enumerate(rows):
            if row.ndim != 1 or not row.size:
                raise ValueError(
                    f"prompt {i} of shape {row.shape}; give at least one token in one dimension"
                )
            wrong = row[(row < 0) | (row >= self.config.vocab)]
            if wrong.size:
                raise ValueError(
                    f"prompt {i} holds token {wrong[0]}; the model has the ids 0 to {self.config.vocab - 1}"
                )

    # ---- programs -------------------------------------------------------------------------------------------------

    def _start(
        self, rows: list[np.ndarray], count: int, choice: Choice, seed: int
    ) -> Iterator[Array]:
        """Tokens of each step, on the devices, with the cache."""
        longest = max(map(len, rows))
        table, lengths = self._table(rows, bucket(longest))
        key = self._put(jax.random.key(seed))
        # The last token is not read: no place for it.
        places = bucket(longest + count - 1)
        tokens, cache = self.first(
            self.params,
            *self._put((table, lengths)),
            key,
            np.int32(0),
            places=places,
            choice=choice,
        )
        yield tokens
        lengths = self._put(lengths)
        for i in range(1, count):
            tokens, cache = self.next(
                self.params, cache, tokens, lengths, key, np.int32(i), choice=choice
            )
            yield tokens

    def _start_again(
        self, rows: list[np.ndarray], count: int, choice: Choice, seed: int
    ) -> Iterator[Array]:
        """Tokens of each step by reading the whole text again."""
        places = bucket(max(map(len, rows)) + count - 1)
        table, lengths = self._table(rows, places)
        key = self._put(jax.random.key(seed))
        for i in range(count):
            tokens, _ = self.first(
                self.params,
                *self._put((table, lengths)),
                key,
                np.int32(i),
                places=places,
                choice=choice,
            )
            yield tokens
            if i + 1 < count:
                table[np.arange(len(table)), lengths] = np.maximum(np.asarray(tokens), 0)
                lengths = lengths + np.int32(1)

    def _table(self, rows: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens (B, width), lengths (B,)): rows repeat until the batch axes divide them."""
        size = self.mesh.size(*self.mesh.batch_axes)
        batch = -(-len(rows) // size) * size
        filled = [rows[i % len(rows)] for i in range(batch)]
        table = np.zeros((batch, width), np.int32)
        for i, row in enumerate(filled):
            table[i, : len(row)] = row
        return table, np.array([len(row) for row in filled], np.int32)

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.mesh.sharding())

    @functools.cached_property
    def first(self) -> Any:
        """Jitted ``(params, tokens, lengths, key, index, *, places, choice) -> (tokens (B,), Cache)``: the prompt."""

        def run(params, tokens, lengths, key, index, *, places, choice):
            logits, cache = self.decoder.prefill(params, tokens, lengths, places)
            return self._pick(logits, key, index, choice), cache

        return jax.jit(run, static_argnames=("places", "choice"), out_shardings=self._outs)

    @functools.cached_property
    def next(self) -> Any:
        """Jitted ``(params, cache, tokens, lengths, key, index, *, choice) -> (tokens (B,), Cache)``: one more token.

        The cache is donated: it stays in its place.
        """

        def run(params, cache, tokens, lengths, key, index, *, choice):
            logits, cache = self.decoder.step(params, cache, tokens, lengths + index - 1)
            return self._pick(logits, key, index, choice), cache

        return jax.jit(
            run, static_argnames="choice", donate_argnames="cache", out_shardings=self._outs
        )

    @property
    def _outs(self) -> tuple[Any, Cache]:
        split = jax.sharding.NamedSharding(self.mesh.jax_mesh, self.decoder.cache_spec)
        return self.mesh.sharding(), both(split)

    def _pick(
        self, logits: Float[Array, "batch vocab"], key: Key[Array, ""], index: Array, choice: Choice
    ) -> Int[Array, " batch"]:
        """Token `index` of every row. The logits of one token, and no more, are gathered over `model`."""
        rows, whole = self.decoder.rows, PartitionSpec()

        def pick(logits: Array, row: Array, key: Array, index: Array) -> Array:
            def own(r: Array) -> Array:
                return jax.random.fold_in(jax.random.fold_in(key, r), index)

            return choose(logits[:, : self.vocab], jax.vmap(own)(row), choice)

        run = self.decoder.region(pick, (rows, rows, whole, whole), rows)
        return run(logits, jnp.arange(logits.shape[0]), key, index)


def _read(
    steps: Iterator[Array], rows: int, end: int | None
) -> Iterator[Int[np.ndarray, " prompts"]]:
    """Tokens on the host, each read after the next step was handed over."""
    alive = np.ones(rows, bool)
    ahead = next(steps, None)
    while ahead is not None:
        tokens, ahead = ahead, next(steps, None)
        found = np.asarray(tokens)[:rows]
        if (found[alive] == NOT_FINITE).any():
            raise ValueError(
                "the logits are not finite: these weights give no text; take an earlier checkpoint, or a wider precision"
            )
        alive &= found != end
        yield np.where(alive, found, ENDED)
        if not alive.any():
            return
