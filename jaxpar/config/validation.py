"""Every combination that cannot run is refused here, before any device is touched, with what would work."""

from __future__ import annotations

import dataclasses
import math
import sys

from jaxpar import policies, topology
from jaxpar.axes import parse_mesh
from jaxpar.config.schema import ConfigError, RunConfig

_INT32_MAX = 2**31 - 1
_FLOAT32_TINY = 2.0**-126
"""Smallest float32 that no device rounds to 0."""


def validate(config: RunConfig) -> None:
    """Refuse every combination that cannot run, before any device is touched.

    Raises:
        ConfigError or axes.MeshError: the first thing that is wrong.
    """
    # Numbers first: what follows divides by them.
    for error in (*_bad_text(config), *_bad_numbers(config)):
        raise ConfigError(error)
    count = _device_count(config)
    # With an open axis and the devices not known yet, what the other axes ask for is checked; the mesh checks the rest.
    asked = parse_mesh(config.mesh, count, keep_open=True, topology=config.topology)
    sizes = {axis: 1 if size == -1 else size for axis, size in asked.items()}
    for error in (*_bad_mesh(config, sizes), *_bad_options(config)):
        raise ConfigError(error)


def _device_count(config: RunConfig) -> int | None:
    if config.topology is not None:
        count = topology.device_count(config.topology)
        if not config.show:
            raise ConfigError(
                f"topology {config.topology} is of chips that are not here: add --show layout"
            )
        if config.devices is not None:
            raise ConfigError(
                f"devices {config.devices} are simulated, and topology {config.topology} has its own; leave one out"
            )
        return count
    return config.devices


def _bad_text(config: RunConfig) -> list[str]:
    errors = []
    for part in (config, config.model, config.optimizer, config.data):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            for text in value if isinstance(value, dict) else [value]:
                if text == "" and field.name != "mesh":  # a mesh has words of its own
                    errors.append(f"{field.name} is empty; leave it out for its default")
                if isinstance(text, str) and "\0" in text:
                    errors.append(f"{field.name} is {text!r}; no name holds a NUL character")
    return errors


def _bad_numbers(config: RunConfig) -> list[str]:
    errors = []
    model, optimizer, data = config.model, config.optimizer, config.data
    least_one = {
        "microbatches": config.microbatches, "loss_chunks": config.loss_chunks, "steps": config.steps,
        "batch": data.batch, "sequence": data.sequence, "layers": model.layers, "embed": model.embed,
        "heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "mlp": model.mlp,
        "vocab": model.vocab, "positions": model.positions, "eval_batches": config.eval_batches,
        "devices": 1 if config.devices is None else config.devices,
        "stop_after": 1 if config.stop_after is None else config.stop_after,
        "workers": 1 if data.workers is None else data.workers,
        "attention_chunks": 1 if config.attention_chunks is None else config.attention_chunks,
    }  # fmt: skip
    errors += [f"{name} is {value}; at least 1" for name, value in least_one.items() if value < 1]
    least_zero = {
        "eval_every": config.eval_every, "checkpoint_every": config.checkpoint_every, "z_loss": config.z_loss,
        "keep_checkpoints": config.keep_checkpoints, "keep_best": config.keep_best, "keep_every": config.keep_every,
        "max_bad_steps": config.max_bad_steps, "max_rollbacks": config.max_rollbacks,
        "sample_tokens": config.sample_tokens, "warmup_steps": optimizer.warmup_steps, "seed": config.seed,
        "weight_decay": optimizer.weight_decay, "learning_rate": optimizer.learning_rate,
    }  # fmt: skip
    errors += [
        f"{name} is {value}; at least 0" for name, value in least_zero.items() if not value >= 0
    ]
    errors += [
        f"{name} is {value}; a finite number"
        for name, value in least_zero.items()
        if value == math.inf
    ]
    if not 0 < model.rope_theta < math.inf:
        errors.append(f"rope_theta is {model.rope_theta}; a finite number above 0")
    # A row of zeros, or a token that no batch held, is divided by this alone: 0/0 where it is 0 or float32 rounds it to 0.
    least = sys.float_info.min if config.precision == "float64" else _FLOAT32_TINY
    for name, value, usual in (
        ("norm_eps", model.norm_eps, "1e-5"),
        ("eps", optimizer.eps, "1e-8"),
    ):
        if not least <= value < math.inf:
            errors.append(
                f"{name} is {value}; a finite number above 0 that {config.precision} can hold, such as {usual}"
            )
    if config.seed >= 2**32:  # JAX keeps the lower 32 bits: two seeds would be one
        errors.append(f"seed is {config.seed}; at most {2**32 - 1}")
    errors += [
        f"{name} is {value}; at most {_INT32_MAX}, as it is counted in 32 bits"
        for name, value in (least_one | least_zero).items()
        if isinstance(value, int) and value > _INT32_MAX and name != "seed"
    ]
    shares = {
        "dropout": model.dropout, "beta1": optimizer.beta1, "beta2": optimizer.beta2, "momentum": optimizer.momentum,
    }  # fmt: skip
    errors += [
        f"{name} is {value}; from 0 up to, not including, 1"
        for name, value in shares.items()
        if not 0 <= value < 1
    ]
    for name, value in (
        ("final_fraction", optimizer.final_fraction),
        ("decay_fraction", optimizer.decay_fraction),
    ):
        if not 0 <= value <= 1:
            errors.append(f"{name} is {value}; from 0 to 1")
    if config.clip_norm is not None and not 0 < config.clip_norm < math.inf:
        errors.append(
            f"clip_norm is {config.clip_norm}; above 0 and finite, or none to leave gradients as they are"
        )
    if isinstance(data.source, dict):
        errors += [
            f"source {name!r} has weight {weight}; a finite number above 0"
            for name, weight in data.source.items()
            if not 0 < weight < math.inf
        ]
        if not data.source:
            errors.append("source is an empty mixture; give at least one source and its weight")
    if optimizer.warmup_steps > config.steps:
        errors.append(
            f"warmup_steps {optimizer.warmup_steps} is more than steps {config.steps}; the rate would never peak"
        )
    return errors


def _bad_mesh(config: RunConfig, sizes: dict[str, int]) -> list[str]:
    errors = []
    model, split = config.model, sizes["model"]
    for axis, what in (
        ("stage", "a pipeline"),
        ("expert", "experts"),
        ("context", "a split sequence"),
    ):
        if sizes[axis] > 1:
            errors.append(
                f"mesh {config.mesh}: {what} ({axis}={sizes[axis]}) is not run by this version; use {axis}=1"
            )
    for name, size in (("heads", model.heads), ("mlp", model.mlp)):
        if size % split:
            errors.append(
                f"{name} {size} does not divide by model={split}; {_around(size, split)} would"
            )
    if model.kv_heads % split and split % model.kv_heads:
        fits = [
            k
            for k in range(1, model.heads + 1)
            if model.heads % k == 0 and (k % split == 0 or split % k == 0)
        ]
        errors.append(
            f"kv_heads {model.kv_heads} and model={split}: one must divide the other; kv_heads of {_listed(fits)} would"
        )
    if config.sequence_parallel and config.data.sequence % split:
        errors.append(
            f"sequence {config.data.sequence} does not divide by model={split}; {_around(config.data.sequence, split)} "
            f"would, or --no-sequence-parallel"
        )
    rows = sizes["replica"] * sizes["data"]
    parts = rows * config.microbatches
    if config.data.batch % parts:
        names = [f"{a}={sizes[a]}" for a in ("replica", "data") if sizes[a] > 1]
        names += [f"microbatches={config.microbatches}"] if config.microbatches > 1 else []
        errors.append(
            f"batch {config.data.batch} does not divide by {' x '.join(names)}; {_around(config.data.batch, parts)} would"
        )
    if config.optimizer.optimizer == "adafactor" and model.vocab % split:
        errors.append(
            f"vocab {model.vocab} does not divide by model={split}: adafactor's means over rows would count the padding; "
            f"vocab {-(-model.vocab // split) * split} would, or another optimizer"
        )
    tokens = config.data.batch // parts * config.data.sequence
    if not errors and tokens % config.loss_chunks:
        errors.append(
            f"loss_chunks {config.loss_chunks} does not divide the {tokens} tokens of a shard's microbatch"
        )
    return errors


def _bad_options(config: RunConfig) -> list[str]:
    errors = []
    model, data = config.model, config.data
    if (
        config.overwrite
        and config.init_from
        and config.run_dir
        and config.init_from.startswith(config.run_dir)
    ):
        errors.append(
            "init_from lies in the run folder that --overwrite would replace; choose another --run-dir"
        )
    if model.heads % model.kv_heads:
        fits = [k for k in range(1, model.heads + 1) if model.heads % k == 0]
        errors.append(
            f"heads {model.heads} does not divide by kv_heads {model.kv_heads}; {_listed(fits)} would"
        )
    if model.style == "llama" and model.head_dim % 2:
        errors.append(
            f"head_dim {model.head_dim} is odd; rotary positions pair its halves, so it must be even"
        )
    if model.style == "gpt2" and config.data.sequence > model.positions:
        errors.append(
            f"sequence {config.data.sequence} is longer than the {model.positions} learned positions"
        )
    if data.tokenizer == "bytes" and model.vocab < 256:
        errors.append(f"vocab {model.vocab} is too small for bytes; at least 256")
    chunks = config.attention_chunks or 1
    if config.data.sequence % chunks:
        errors.append(f"attention_chunks {chunks} does not divide sequence {config.data.sequence}")
    if config.schedule is not None:
        errors.append(
            f"schedule {config.schedule} needs a stage axis, which is not run by this version; leave it out"
        )
    common = ("block_input", "query", "key", "value", "attention", "mlp_input", "up")
    try:
        policies.parse(config.remat, (*common, "gate") if model.style == "llama" else common)
    except ValueError as error:
        errors.append(str(error))
    if config.precision == "float64" and config.reduce_dtype is not None:
        errors.append(
            f"precision float64 with reduce_dtype {config.reduce_dtype} would round gradients; leave it out"
        )
    return errors


def _around(value: int, parts: int) -> str:
    low = value // parts * parts
    return f"{low} or {low + parts}" if low else f"{parts}"


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])
