"""The decoder one token at a time: a cache of keys and values, split over `model` by heads and over the batch axes by rows.

```
tokens (B, P) ── prefill: attention of training ──► logits of the next token, cache with P of its T places filled
                                                                       │
token (B,) ────── step: one query over the cache and itself ◄──────────┘──► logits, cache with one place more
```

Everything runs in `jax.shard_map`, manual over every axis, with the collectives of training (`jaxpar.ops.tensor`): one
all-reduce after attention and one after the mlp, of one token a row. No parameter moves.

Letters: B batch, P prompt, T places of the cache, L layers, E embed, K kv heads, D head size, V vocab.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxpar.config import ModelConfig
from jaxpar.mesh import Mesh
from jaxpar.models import decoder
from jaxpar.models.blocks import Block, Context
from jaxpar.ops.attention import cached_attention, causal_attention
from jaxpar.ops.tensor import TensorAxis
from jaxpar.rules import Leaf


class Cache(NamedTuple):
    """Keys and values of the positions that were read.

    K is `kv_heads`, or the size of `model` where that is larger: each device then keeps the head that it reads.
    """

    key: Float[Array, "layers batch places kv dim"]
    value: Float[Array, "layers batch places kv dim"]


def both(x: Any) -> Any:
    """The pytree of a `Cache` with `x` (a split, a shape) for either half."""
    return Cache(x, x)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The programs of one model on one mesh: pure functions of whole arrays, to be jitted.

    Raises:
        ValueError: an axis that decoding does not run over.
        LayoutError: heads or mlp that `model` does not divide.
    """

    config: ModelConfig
    mesh: Mesh

    def __post_init__(self) -> None:
        for axis in ("stage", "expert", "context"):
            if self.mesh.size(axis) > 1:
                raise ValueError(
                    f"mesh axis {axis}={self.mesh.size(axis)}: text is made over data, replica and model; use size 1"
                )
        split, kv = self.mesh.size("model"), self.config.kv_heads
        if kv % split and split % kv:
            raise ValueError(f"kv_heads {kv} and model={split}: one must divide the other")
        _ = self.leaves

    @functools.cached_property
    def leaves(self) -> Any:
        """Where each parameter lies: split over `model` as in training, and over nothing else."""
        shapes = jax.eval_shape(lambda: decoder.init(self.config, jax.random.key(0)))
        return decoder.rules_for(self.config).leaves(shapes, self.mesh)

    def place(self, params: Any, dtype: str) -> Any:
        """Parameters in their places, in `dtype`, padded as `leaves` says.

        A leaf that is in its place already is not copied, and no device ever holds a whole leaf that is split.

        Args:
            params: of true shapes or of the stored shapes of this mesh, in any split on it, or on the host.

        Raises:
            ValueError: shapes of another model.
        """
        flat, treedef = jax.tree.flatten(self.leaves, is_leaf=_is_leaf)
        out = list(treedef.flatten_up_to(params))
        moves = {}
        for i, (x, leaf) in enumerate(zip(out, flat, strict=True)):
            if x.shape not in (leaf.shape, leaf.stored):
                raise ValueError(
                    f"{leaf.path} is {list(x.shape)}, and {list(leaf.shape)} in this model"
                )
            there = self.mesh.sharding(leaf.spec)
            if not _lies(x, leaf.stored, dtype, there):
                moves[i] = (x, leaf.stored, there)

        def move(arrays: dict[int, Any]) -> dict[int, Any]:
            return {
                i: jnp.pad(x, [(0, n - m) for n, m in zip(moves[i][1], x.shape, strict=True)])
                .astype(dtype)
                for i, x in arrays.items()
            }  # fmt: skip

        splits = {i: there for i, (_, _, there) in moves.items()}
        moved = jax.jit(move, out_shardings=splits)({i: x for i, (x, _, _) in moves.items()})
        return treedef.unflatten([moved.get(i, x) for i, x in enumerate(out)])

    # ---- whole-array programs -------------------------------------------------------------------------------------

    def prefill(
        self,
        params: Any,
        tokens: Int[Array, "batch prompt"],
        lengths: Int[Array, " batch"],
        places: int,
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Logits after the first `lengths` tokens of each row, and a cache of `places` positions a row.

        What stands behind a prompt in its row is never read. Logits are of the stored vocabulary, split over `model`:
        ids from `config.vocab` on are padding.
        """
        run = functools.partial(_prefill, self.config, self._graph, places)
        outs = (self._logits, both(self.cache_spec))
        return self.region(run, (self._params, self.rows, self.rows), outs)(params, tokens, lengths)

    def step(
        self,
        params: Any,
        cache: Cache,
        tokens: Int[Array, " batch"],
        positions: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch vocab"], Cache]:
        """Logits after one more token a row, which stands at `positions`, and the cache with it."""
        caches = both(self.cache_spec)
        run = functools.partial(_step, self.config, self._graph)
        ins = (self._params, caches, self.rows, self.rows)
        return self.region(run, ins, (self._logits, caches))(params, cache, tokens, positions)

    def region(self, function: Callable[..., Any], ins: Any, outs: Any) -> Any:
        """`function` on the shards of each device, manual over every axis of the mesh."""
        return jax.shard_map(function, mesh=self.mesh.jax_mesh, in_specs=ins, out_specs=outs)

    @property
    def cache_spec(self) -> PartitionSpec:
        """Split of either half of a `Cache`."""
        return self.mesh.spec(((), self.mesh.batch_axes, (), ("model",), ()))

    @property
    def rows(self) -> PartitionSpec:
        """Split of an array with one row for each prompt."""
        return self.mesh.spec((self.mesh.batch_axes,))

    @property
    def _logits(self) -> PartitionSpec:
        return self.mesh.spec((self.mesh.batch_axes, ("model",)))

    @functools.cached_property
    def _params(self) -> Any:
        return jax.tree.map(lambda leaf: self.mesh.spec(leaf.spec), self.leaves, is_leaf=_is_leaf)

    @functools.cached_property
    def _graph(self) -> Any:
        return nnx.graphdef(nnx.eval_shape(lambda: Block(self.config, rngs=nnx.Rngs(0))))


# ---- on one device: rows of its batch shard, its heads, its columns ----------------------------------------------


def _prefill(
    config: ModelConfig, graph: Any, places: int, params: Any, tokens: Array, lengths: Array
) -> tuple[Array, Cache]:
    prompt = tokens.shape[1]
    # Padding takes the place of the last token: a position behind the learned ones would read no number.
    positions = jnp.minimum(jnp.arange(prompt), lengths[:, None] - 1)
    chunks = decoder.default_chunks(prompt)
    x, at = _enter(config, params, tokens, positions)

    def layer(x: Array, block: Any) -> tuple[Array, Cache]:
        return _layer(graph, block, x, at, functools.partial(causal_attention, chunks=chunks))

    x, cache = lax.scan(layer, x, params["blocks"])
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], 1)[:, 0]
    free = [(0, 0), (0, 0), (0, places - prompt), (0, 0), (0, 0)]
    return _logits(config, params, last), Cache(*(jnp.pad(c, free) for c in cache))


def _step(
    config: ModelConfig, graph: Any, params: Any, cache: Cache, tokens: Array, positions: Array
) -> tuple[Array, Cache]:
    x, at = _enter(config, params, tokens[:, None], positions[:, None])

    def layer(x: Array, parts: Any) -> tuple[Array, Cache]:
        block, past = parts

        def attend(q: Array, k: Array, v: Array) -> Array:
            return cached_attention(q[:, 0], k[:, 0], v[:, 0], past.key, past.value, positions)[
                :, None
            ]

        return _layer(graph, block, x, at, attend)

    x, new = lax.scan(layer, x, (params["blocks"], cache))
    row = jnp.arange(tokens.shape[0])
    # The loop over layers only reads the cache: written once after it, in place, since the caller donates it.
    cache = Cache(
        *(c.at[:, row, positions].set(n[:, :, 0]) for c, n in zip(cache, new, strict=True))
    )
    return _logits(config, params, x[:, 0]), cache


def _enter(
    config: ModelConfig, params: Any, tokens: Array, positions: Array
) -> tuple[Array, Context]:
    """The first activations, whole along the sequence, and what every block needs."""
    rows = jnp.arange(tokens.shape[0])
    batch = {"tokens": tokens, "positions": positions, "row_id": rows}
    at = Context(
        axis=TensorAxis.here(sequence=False),
        rows=rows,
        positions=positions,
        local=jnp.arange(tokens.shape[1]),
        rng=None,
    )
    return decoder.embed(config, False, params, batch, None), at


def _layer(
    graph: Any, params: Any, x: Array, at: Context, attend: Callable[..., Array]
) -> tuple[Array, Cache]:
    """`Block` with other attention, and what is to be cached of it."""
    block = nnx.merge(graph, decoder.as_state(params))
    q, k, v = block.attention.project(at.axis.enter(block.attention_norm(x)), at)
    x = x + at.axis.leave(block.attention.output(attend(q, k, v), at))
    x = x + at.axis.leave(block.mlp(at.axis.enter(block.mlp_norm(x)), at))
    return x, Cache(k, v)


def _logits(
    config: ModelConfig, params: Any, x: Float[Array, "batch embed"]
) -> Float[Array, "batch columns"]:
    """Logits of this device's part of the vocabulary, in float32 or wider."""
    x = decoder.normed(config, params, x)
    kernel = params["embed"]["tokens"] if config.tied else params["head"]["kernel"]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    contract = ((1,), (1 if config.tied else 0,))
    return lax.dot_general(x, kernel, (contract, ((), ())), preferred_element_type=wide)


def _lies(x: Any, shape: tuple[int, ...], dtype: str, there: NamedSharding) -> bool:
    return (
        isinstance(x, jax.Array)
        and x.shape == shape
        and x.dtype == jnp.dtype(dtype)
        and x.sharding.is_equivalent_to(there, x.ndim)
    )


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)
