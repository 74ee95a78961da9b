"""An `OptimizerConfig` becomes an optax chain with its learning-rate schedule inside.

```
gradient ─► direction (adam, muon, ...) ─► + decay of the leaves in the mask ─► x -rate(count)
```

The schedule counts applied updates: a skipped step does not move it, and it knows nothing of
microbatches or devices. `learning_rate` gives the same rate on the host, for logs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxpar.config import OptimizerConfig
from jaxpar.rules import Leaf

_MUON_BETA = 0.95
"""Momentum of Muon (kellerjordan.github.io/posts/muon)."""

_MUON_RMS = 0.2
"""Size of a Muon update, so that AdamW's rate and decay fit it (arXiv:2502.16982, section 2.2)."""


def make(
    config: OptimizerConfig, steps: int, *, decay_mask: Any, matrices: Any = None
) -> optax.GradientTransformation:
    """The optimizer of a run.

    Args:
        steps: updates over which the schedule runs down.
        decay_mask: pytree of bool like the parameters, true where weight decay applies; by role and
            not by ndim, which norms stacked over layers would pass (`Layout.decay_mask`).
        matrices: what `muon_dimensions` gives; only Muon asks for it.

    Raises:
        ValueError: Muon without `matrices`.
    """
    rate = schedule(config, steps)
    decay = optax.add_decayed_weights(config.weight_decay, decay_mask)
    scale = optax.scale_by_learning_rate(rate)
    match config.optimizer:
        case "adamw":
            adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
            return optax.chain(adam, decay, scale)
        case "sgd":
            momentum = [optax.trace(config.momentum)] if config.momentum else []
            return optax.chain(*momentum, decay, scale)
        case "lamb":
            # The trust ratio compares the whole update, decay and all, with the weights
            # (arXiv:1904.00962). A stack of layers is one leaf and has one ratio.
            adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
            return optax.chain(adam, decay, optax.scale_by_trust_ratio(), scale)
        case "adafactor":
            # optax.adafactor would decay by its own rate: here as elsewhere, decay x rate.
            factored = optax.adafactor(None, weight_decay_rate=None)
            return optax.chain(factored, optax.scale(-1.0), decay, scale)
        case "muon":
            if matrices is None:
                raise ValueError("muon orthogonalises matrices: pass matrices=muon_dimensions(...)")
            direction = muon(
                1.0,
                beta=_MUON_BETA,
                adam_b1=config.beta1,
                adam_b2=config.beta2,
                eps=config.eps,
                muon_weight_dimension_numbers=matrices,
                consistent_rms=_MUON_RMS,
            )
            # muon() has no decay mask for its Adam part: take its direction, decay like the rest.
            return optax.chain(direction, optax.scale(-1.0), decay, scale)
    raise ValueError(f"optimizer {config.optimizer!r} is not known")


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate as a function of the count of updates applied before; for use in jit."""
    return lambda count: config.learning_rate * _factor(config, steps, count, jnp)


def learning_rate(config: OptimizerConfig, steps: int, count: int) -> float:
    """The rate of the update that follows `count` applied ones: `schedule`, on the host."""
    return float(config.learning_rate * _factor(config, steps, count, np))


def _factor(config: OptimizerConfig, steps: int, count: Any, xp: Any) -> Any:
    """Rate over peak rate of update n = count + 1, with w warm-up updates of N and a floor f.

    | part                | factor                                                 |
    |---------------------|--------------------------------------------------------|
    | n <= w              | n / w                                                  |
    | cosine              | f + (1 - f) (1 + cos(pi t)) / 2, t = (n - w) / (N - w) |
    | linear              | 1 - (1 - f) t                                          |
    | wsd, last D updates | 1 - (1 - f) (n - (N - D)) / D, and 1 before            |
    | constant            | 1                                                      |

    The floor holds after update N. Cosine: arXiv:1608.03983; warm-up, stable, decay:
    arXiv:2404.06395.
    """
    n = count + 1.0
    warmup, floor = config.warmup_steps, config.final_fraction
    t = xp.clip((n - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    match config.lr_schedule:
        case "cosine":
            after = floor + (1 - floor) * 0.5 * (1 + xp.cos(math.pi * t))
        case "linear":
            after = 1 - (1 - floor) * t
        case "wsd":
            last = max(1, round(config.decay_fraction * steps))
            after = 1 - (1 - floor) * xp.clip((n - (steps - last)) / last, 0.0, 1.0)
        case "constant":
            after = xp.ones_like(t)
        case _:
            raise ValueError(f"schedule {config.lr_schedule!r} is not known")
    return xp.where(n <= warmup, n / max(warmup, 1), after)


def muon_dimensions(leaves: Any) -> Any:
    """For each parameter, the dimensions of the matrix that Muon makes orthogonal; None for Adam.

    A leaf of role "matrix" with one dimension "embed" is a map from or to the residual stream: its
    other dimensions (heads and head_dim, say) are the other side, and "layers" counts matrices.
    Embeddings, heads, norms and biases take optax's Adam with Nesterov momentum
    (kellerjordan.github.io/posts/muon).

    Args:
        leaves: pytree of `Leaf` like the parameters.
    """

    def one(leaf: Leaf) -> MuonDimensionNumbers | None:
        places = [i for i, name in enumerate(leaf.dims) if name != "layers"]
        stream = [i for i in places if leaf.dims[i] == "embed"]
        other = [i for i in places if leaf.dims[i] != "embed"]
        if leaf.role != "matrix" or "vocab" in leaf.dims or len(stream) != 1 or not other:
            return None
        first = stream[0] < other[0]
        return MuonDimensionNumbers(
            reduction_axis=tuple(stream if first else other),
            output_axis=tuple(other if first else stream),
        )

    return jax.tree.map(one, leaves, is_leaf=lambda x: isinstance(x, Leaf))
