"""A config becomes a job: data, mesh, model and step, built and not started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxpar import config as configs
from jaxpar import data, optim
from jaxpar.mesh import make_mesh
from jaxpar.models import decoder
from jaxpar.parallel import Parallel, parallelize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that a run needs, built and not started.

    Attributes:
        par: the train step.
        dataset: training batches, held-out batches and the tokenizer.
    """

    config: configs.RunConfig
    par: Parallel
    dataset: data.Dataset


def build(config: configs.RunConfig) -> Parallel:
    """The train step of a config on its mesh; compiles nothing.

    Raises:
        MeshError, LayoutError, ValueError: options that do not fit each other or the devices.
    """
    if config.precision == "float64":
        jax.config.update("jax_enable_x64", True)
    staged, init, rules = decoder.make(
        config.model,
        loss_chunks=config.loss_chunks,
        z_loss=config.z_loss,
        sequence_parallel=config.sequence_parallel,
        attention_chunks=config.attention_chunks,
    )

    def optimizer(layout: Any) -> Any:
        matrices = (
            optim.muon_dimensions(layout.params) if config.optimizer.optimizer == "muon" else None
        )
        mask = layout.decay_mask()
        return optim.make(config.optimizer, config.steps, decay_mask=mask, matrices=matrices)

    return parallelize(
        staged,
        init,
        optimizer,
        mesh=make_mesh(config.mesh, topology=config.topology),
        rules=rules,
        zero=config.zero,
        microbatches=config.microbatches,
        remat=config.remat,
        precision=config.precision,
        reduce_dtype=config.reduce_dtype,
        clip_norm=config.clip_norm,
        schedule=config.schedule,
    )


def prepare(config: configs.RunConfig, say: Callable[[str], None] = print) -> Job:
    """Build a run and read its input.

    Raises:
        DataError: input that cannot be used. And what `build` raises.
    """
    dataset = data.build(config.data, seed=config.seed, vocab=config.model.vocab, say=say)
    return Job(config=config, par=build(config), dataset=dataset)
