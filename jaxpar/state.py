"""All that changes in a run, and its way between stored shapes (padded) and true ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxpar.layout import Layout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "masters", "opt_state", "skipped", "rng"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that changes in a run.

    Attributes:
        step: index of the next batch, int32; also advances when a step is skipped.
        params: parameters, in their stored dtype and split.
        masters: float32 copies that the optimizer updates, or None.
        opt_state: state of the optax chain; its counts are numbers of applied updates.
        skipped: number of steps that changed nothing, int32.
        rng: raw key data, uint32; every step folds its index in.
    """

    step: Any
    params: Any
    masters: Any
    opt_state: Any
    skipped: Any
    rng: Any


def advanced(state: TrainState, step: int) -> TrainState:
    """`state` before batch `step`, with the batches in between counted as skipped."""
    gap = step - int(state.step)
    if gap < 0:
        raise ValueError(f"the state is before batch {int(state.step)}, which is past {step}")
    if not gap:
        return state
    skipped = np.int32(int(state.skipped) + gap)
    return dataclasses.replace(
        state,
        step=jax.device_put(np.int32(step), state.step.sharding),
        skipped=jax.device_put(skipped, state.skipped.sharding),
    )


def reshaped(state: TrainState, layout: Layout, change: Any) -> TrainState:
    """`state` with `change` (`padded` or `true`) applied to parameters, masters and optimizer state."""
    trees = {"params": layout.params, "masters": layout.masters, "opt_state": layout.opt_state}
    new = {
        n: change(getattr(state, n), leaves) for n, leaves in trees.items() if leaves is not None
    }
    return dataclasses.replace(state, **new)
