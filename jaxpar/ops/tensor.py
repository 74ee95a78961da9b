"""Megatron tensor splits over the `model` axis, with activations split along the sequence between blocks.

Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053 section 3) splits the first product of a block by columns and the
second by rows. Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198 section 4.2.2) turns the all-reduce after
the second product into a reduce-scatter and an all-gather before the next first one:

```
          (B, S/m, E)          (B, S, E)        (B, S, F/m)        (B, S, E) partial      (B, S/m, E)
 norm ──────────────► enter ────────────► up ───────────────► down ───────────────► leave ─────────────►
                    all-gather          columns               rows              reduce-scatter
```

The collectives are written out, with `model` manual: their number and bytes are known before compiling, and a
conditional may hold them (groups never leave one `model` row). Backward passes come from differentiation: the
transpose of an all-gather is a reduce-scatter and the other way round.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.collectives import all_gather, manual_axes, reduce_scatter


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorAxis:
    """The `model` axis as a block sees it. With no such axis in context every method is the identity.

    Attributes:
        axes: physical axis names, slowest first.
        sequence: whether activations between blocks are split along the sequence (dimension 1).
    """

    axes: tuple[str, ...]
    sequence: bool

    @classmethod
    def here(cls, *, sequence: bool) -> TensorAxis:
        """The axis at the point of tracing."""
        return cls(axes=manual_axes("model"), sequence=sequence)

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return math.prod(lax.axis_size(a) for a in self.axes)

    def index(self) -> Int[Array, ""] | int:
        """This device's place along the axis."""
        return lax.axis_index(self.axes) if self.axes else 0

    def enter(self, x: Float[Array, "batch part embed"]) -> Float[Array, "batch seq embed"]:
        """Input of a column-split product: the whole sequence."""
        return all_gather(x, self.axes, 1) if self.sequence else x

    def leave(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch part embed"]:
        """Output of a row-split product: summed over the axis, this device's part of the sequence."""
        if not self.axes:
            return x
        return reduce_scatter(x, self.axes, 1) if self.sequence else lax.psum(x, self.axes)

    def once(self, bias: Float[Array, " embed"]) -> Float[Array, " embed"]:
        """A bias to add to a row-split product before `leave`, so that the sum holds it once."""
        if not self.axes:
            return bias
        return jnp.where(self.index() == 0, bias, jnp.zeros_like(bias))

    def part(self, x: Array, dim: int) -> Array:
        """This device's part of dimension `dim` of an array that every device holds whole."""
        if not self.axes:
            return x
        size = x.shape[dim] // self.size
        return lax.dynamic_slice_in_dim(x, self.index() * size, size, dim)

    def sequence_part(self, x: Array, dim: int) -> Array:
        """`part` where activations are split along the sequence, else `x`."""
        return self.part(x, dim) if self.sequence else x


def group_of_heads(
    weight: Float[Array, "..."], axis: TensorAxis, *, dim: int, kv_heads: int
) -> Float[Array, "..."]:
    """The key or value heads that this device's query heads read.

    `weight` has all `kv_heads` heads on every device (fewer heads than the axis) or this device's share already. In the
    first case device i reads head ``i * kv_heads // size``; the gradient of the slice is zero for the other heads, and
    the sum over the axis that every replicated leaf gets adds up the devices that share a head.
    """
    if not axis.axes or weight.shape[dim] != kv_heads or kv_heads >= axis.size:
        return weight
    head = axis.index() * kv_heads // axis.size
    return lax.dynamic_slice_in_dim(weight, head, 1, dim)


def vocab_embedding(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], axis: TensorAxis
) -> Float[Array, "batch part embed"]:
    """Rows of a table that is split by vocabulary over the axis (Megatron-LM, section 3)."""
    if not axis.axes:
        return lookup(table, tokens)
    local = tokens - axis.index() * table.shape[0]
    inside = (local >= 0) & (local < table.shape[0])
    rows = lookup(table, jnp.where(inside, local, 0))
    return axis.leave(jnp.where(inside[..., None], rows, jnp.zeros_like(rows)))


@jax.custom_vjp
def lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "*rows"]
) -> Float[Array, "*rows embed"]:
    """``table[tokens]``, whose gradient is summed in at least float32.

    A frequent token adds hundreds of rows to one; in bfloat16 such a sum stops growing. Ids must lie in the table: they
    are checked on the host (`jaxpar.data`), since indexing on the device clamps silently.
    """
    return table[tokens]


def _lookup_forward(table, tokens):
    return table[tokens], (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_backward(residual, cotangent):
    tokens, like = residual
    wide = jnp.promote_types(like.dtype, jnp.float32)
    flat = cotangent.reshape(-1, cotangent.shape[-1]).astype(wide)
    zero = jnp.zeros_like(flat, shape=(like.shape[0], flat.shape[-1]))
    return zero.at[tokens.reshape(-1)].add(flat).astype(like.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)
