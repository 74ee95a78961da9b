"""The weights of a checkpoint on a mesh, and nothing else of it: no optimizer state is read or made."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import optax

from jaxpar import checkpoint
from jaxpar import precision as precisions
from jaxpar.config import RunConfig
from jaxpar.mesh import Mesh
from jaxpar.models import decoder
from jaxpar.parallel import parallelize


def load(
    config: RunConfig,
    mesh: Mesh,
    folder: pathlib.Path,
    step: int | None,
    say: Callable[[str], None] = print,
) -> tuple[Any, int]:
    """(parameters in their places on `mesh`, step of the checkpoint); the newest complete one where none is named.

    Raises:
        CheckpointError: no complete checkpoint, or one of another model.
    """
    staged, init, rules = decoder.make(config.model)
    # Without masters, an optimizer or ZeRO: what a checkpoint holds of them is not asked for.
    kind = dataclasses.replace(precisions.named(config.precision), masters=None)
    par = parallelize(staged, init, optax.identity(), mesh=mesh, rules=rules, precision=kind)
    store = checkpoint.Checkpoints(folder, say=say)
    # Where the run has masters, the weights are made from them; every cast is in the notes.
    restored = store.restore(par, step=step, weights_only=True, allow_cast=True, set_aside=False)
    for note in restored.notes:
        say(note)
    return restored.state.params, restored.step
