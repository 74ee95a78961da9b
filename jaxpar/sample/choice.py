"""Logits become a token: temperature, then the k likeliest, then the nucleus, then one draw.

The draw is the largest of logits plus Gumbel noise, which is a draw from their softmax (Gumbel, 1954). The noise is a
function of a row's key and a token's id alone: neither the mesh nor the other rows change what a seed gives.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

NOT_FINITE = -1
"""In place of a token whose logits were not all finite."""

_GREEDY = float(jnp.finfo(jnp.float32).tiny)
"""Temperatures below divide by what a device takes for 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a token is chosen; hashable, and a part of the compiled program.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens, or None.
        top_p: only the likeliest tokens that together have this probability (the one that reaches it included), of what
            `top_k` left: the nucleus (Holtzman et al. 2020, arXiv:1904.09751). 1 keeps all.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature}; 0 is the likeliest token, 1 the model's own odds"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}; at least 1 token, or none to keep all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}; above 0 and up to 1, which keeps all")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _GREEDY or self.top_k == 1


def choose(
    logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"], choice: Choice
) -> Int[Array, " batch"]:
    """One token a row, or `NOT_FINITE`; `keys` make the draw."""
    one = jax.vmap(functools.partial(_draw, choice=choice))
    finite = jnp.isfinite(logits).all(-1)
    return jnp.where(finite, one(logits, keys), NOT_FINITE).astype(jnp.int32)


def _draw(logits: Float[Array, " vocab"], key: Key[Array, ""], choice: Choice) -> Int[Array, ""]:
    if choice.greedy:
        return logits.argmax()
    # Below their maximum first: a small temperature then makes -inf of them, and never inf.
    scaled = (logits - logits.max()) / choice.temperature
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    if choice.top_k is None and choice.top_p == 1:
        return (scaled + noise).argmax()
    order = jnp.argsort(scaled, descending=True, stable=True)
    ranked, rank = scaled[order], jnp.arange(scaled.size)
    kept = rank < (choice.top_k or scaled.size)
    share = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    kept = kept & (jnp.cumsum(share) - share < choice.top_p)
    return order[jnp.where(kept, ranked + noise[order], -jnp.inf).argmax()]
