"""Cross-entropy of a vocabulary that is split over `model`, in chunks, so that all logits never exist at once.

The head's product, the softmax and the loss are one operation with one hand-written gradient. The loss is a sum, so the
gradient of the logits is known as soon as a chunk's softmax is: the forward pass of a training step keeps
``d loss / d x`` and ``d loss / d kernel`` and throws the logits away. Three products a chunk, none of them twice, and
B·S·V/chunks logits alive in place of B·S·V. (Where B·S·V gradients in the compute dtype are smaller than a float32 copy of
the kernel, those are kept instead: `_keeps_logit_gradients`.)

    loss  = sum over valid tokens of  lse - logit[target] + z_loss * lse^2,       lse = log sum exp logits
    dlogit = valid * (softmax * (1 + 2 z_loss lse) - onehot(target))

Vocabulary split as in Megatron-LM (arXiv:1909.08053 section 3): maximum, sum of exponentials and target logit are
reduced over the axis, three numbers a token; z-loss as in PaLM (arXiv:2204.02311 section 5).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpar.collectives import varies, varying
from jaxpar.ops.tensor import TensorAxis


class Head(NamedTuple):
    """What the loss needs to know besides its arrays (hashable: a static argument).

    Attributes:
        vocab: true vocabulary; further columns of the kernel are padding and get no probability.
        chunks: parts that the tokens are taken in; must divide batch x seq of a shard.
        z_loss: weight of the squared log normaliser.
        axis: the `model` axis.
        transposed: the kernel is an embedding table (vocab, embed): tied weights.
    """

    vocab: int
    chunks: int
    z_loss: float
    axis: TensorAxis
    transposed: bool


def cross_entropy(
    x: Float[Array, "batch seq embed"],
    kernel: Float[Array, "embed vocab"],
    targets: Int[Array, "batch seq"],
    head: Head,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed loss over the valid targets of this shard, and their number.

    The loss is the same on every device of the `model` axis. Accumulated in float32 or wider.

    Raises:
        ValueError: `chunks` does not divide the tokens of a shard.
    """
    tokens = targets.size
    if tokens % head.chunks:
        raise ValueError(
            f"loss_chunks {head.chunks} does not divide the {tokens} tokens of a shard"
        )
    # Differentiating through the mark sums the partial gradients of x over the axis, where x is the same on it.
    x, kernel = varying((x, kernel), head.axis.axes)
    flat = x.reshape(head.chunks, tokens // head.chunks, x.shape[-1])
    aim = targets.reshape(head.chunks, tokens // head.chunks)
    return _summed(flat, kernel, aim, head), jnp.sum(targets >= 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(
    x: Float[Array, "chunks tokens embed"],
    kernel: Float[Array, "..."],
    targets: Int[Array, "chunks tokens"],
    head: Head,
) -> Float[Array, ""]:
    losses = _over_chunks(lambda a, t: _chunk(a, kernel, t, head)[0].sum(), x, targets)
    return losses.sum()


def _over_chunks(function: Any, *arrays: Any) -> Any:
    """`function` of each chunk, stacked; a loop only where there is more than one."""
    if arrays[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[None], function(*(a[0] for a in arrays)))
    return lax.map(lambda parts: function(*parts), arrays)


def _chunk(
    x: Array, kernel: Array, targets: Array, head: Head
) -> tuple[Array, Array, Array, Array]:
    """(loss a token, exponentials over their sum, log normaliser, one-hot place) of one chunk."""
    axis, wide = head.axis, jnp.promote_types(x.dtype, jnp.float32)
    contract = ((1,), (1,)) if head.transposed else ((1,), (0,))
    logits = lax.dot_general(x, kernel, (contract, ((), ())), preferred_element_type=wide)
    width = logits.shape[-1]
    first = axis.index() * width
    column = first + jnp.arange(width)
    if width * axis.size > head.vocab:
        logits = jnp.where(column < head.vocab, logits, jnp.finfo(wide).min)
    top = lax.stop_gradient(logits.max(-1))
    top = lax.pmax(top, axis.axes) if axis.axes else top
    exp = jnp.exp(logits - top[:, None])
    place = column == targets[:, None]
    sums = jnp.stack([exp.sum(-1), jnp.where(place, logits, 0).sum(-1)])
    total, picked = lax.psum(sums, axis.axes) if axis.axes else sums
    lse = jnp.log(total) + top
    valid = targets >= 0
    loss = jnp.where(valid, lse - picked + head.z_loss * jnp.square(lse), 0)
    return loss, exp / total[:, None], lse, place


def _forward(x, kernel, targets, head):
    contract = ((1,), (0,)) if head.transposed else ((1,), (1,))
    wide = jnp.promote_types(kernel.dtype, jnp.float32)

    def rows(a, t):
        """(loss, d loss / d a, d loss / d logits) of one chunk."""
        loss, soft, lse, place = _chunk(a, kernel, t, head)
        scale = jnp.where(t >= 0, 1 + 2 * head.z_loss * lse, 0)[:, None]
        hot = jnp.where(place & (t >= 0)[:, None], 1, 0)
        d = (soft * scale - hot).astype(a.dtype)
        return loss.sum(), lax.dot_general(d, kernel, (contract, ((), ()))), d

    def columns(a, d):
        """d loss / d kernel of these tokens, summed in float32 or wider."""
        left, right = (d, a) if head.transposed else (a, d)
        return lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide)

    if _keeps_logit_gradients(x, wide):
        loss, dx, d = _over_chunks(rows, x, targets)
        flat = [a.reshape(-1, a.shape[-1]) for a in (x, d)]
        return loss.sum(), (dx, columns(*flat).astype(kernel.dtype))

    def body(carry, parts):
        loss, dx, d = rows(*parts)
        return (carry[0] + loss, carry[1] + columns(parts[0], d)), dx

    loss = jax.eval_shape(lambda: rows(x[0], targets[0])[0])
    start = [
        varying(jnp.zeros(s.shape, dtype), tuple(along))
        for s, dtype, along in (
            (loss, loss.dtype, varies(loss)),
            (kernel, wide, varies(x) | varies(kernel)),
        )
    ]
    (loss, dkernel), dx = lax.scan(body, tuple(start), (x, targets))
    return loss, (dx, dkernel.astype(kernel.dtype))


def _keeps_logit_gradients(x, wide) -> bool:
    """Whether the kernel's gradient is one product after the loop, or a sum in the loop.

    The first keeps the gradient of every logit in the compute dtype, the second a kernel in `wide`: the smaller of the two,
    tokens x vocab or embed x vocab, is kept.
    """
    chunks, tokens, embed = x.shape
    return chunks == 1 or chunks * tokens * x.dtype.itemsize <= embed * wide.itemsize


def _backward(head, residual, cotangent):
    dx, dkernel = residual
    return (dx * cotangent).astype(dx.dtype), (dkernel * cotangent).astype(dkernel.dtype), None


_summed.defvjp(_forward, _backward)
