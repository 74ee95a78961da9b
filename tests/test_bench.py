"""Closed forms of the bench: parameters, FLOPs, peaks; and what the measuring itself measures."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.bench import chips, step
from jaxpar.config import ModelConfig
from jaxpar.models import decoder


def model(**changes) -> ModelConfig:
    base = {
        "style": "llama",
        "layers": 3,
        "embed": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "mlp": 48,
        "vocab": 64,
        "positions": 16,
        "tied": False,
        "dropout": 0.0,
    }
    return dataclasses.replace(ModelConfig(), **{**base, **changes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_matmul_parameters_are_the_matrices_of_the_real_model(style, tied) -> None:
    config = model(style=style, tied=tied, kv_heads=4 if style == "gpt2" else 2)
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    attention, mlp = shapes["blocks"]["attention"], shapes["blocks"]["mlp"]
    names = [attention[n] for n in ("query", "key", "value", "out")]
    names += [mlp[n] for n in ("gate", "up", "down") if n in mlp]
    names.append(shapes["embed"]["tokens"] if tied else shapes["head"]["kernel"])
    assert chips.matmul_parameters(config) == sum(int(np.prod(s.shape)) for s in names)


def test_flops_are_three_times_a_forward_pass_counted_by_xla() -> None:
    """A step is three forward passes; XLA counts one, and small things beside it."""
    config = model(layers=1, embed=256, head_dim=64, mlp=1024, vocab=512)
    seq = 128
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)

    def logits(params, tokens):
        return decoder.next_token_logits(config, params, tokens)

    counted = jax.jit(logits).lower(params, tokens).compile().cost_analysis()["flops"]
    head = 2 * config.embed * config.vocab
    forward = chips.flops_per_token(config, seq) / 3 - head  # the head is applied to one token
    assert counted == pytest.approx(seq * forward + head, rel=0.03)


def test_attention_term_is_12_layers_seq_heads_head_dim() -> None:
    config = model()
    two, one = (chips.flops_per_token(config, seq) for seq in (200, 100))
    assert two - one == 12 * 3 * 100 * 4 * 8


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_chips_by_the_names_that_jax_gives_them(kind, name) -> None:
    assert chips.chip_of(kind).name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "TPU v3"])
def test_a_chip_without_a_known_peak_has_no_mfu(kind) -> None:
    assert chips.chip_of(kind) is None


def test_two_devices_at_one_place_are_one_chip() -> None:
    def device(*coords):
        return types.SimpleNamespace(slice_index=0, coords=coords)

    assert chips.chips_in([device(0, 0, 0), device(0, 0, 0), device(1, 0, 0)]) == 2
    assert chips.chips_in(jax.devices()) == len(jax.devices())


def test_the_loop_adds_less_than_a_millisecond_a_step() -> None:
    metrics = {n: jnp.float32(1) for n in ("loss", "weight", "grad_norm")}
    seconds = step.loop_seconds(None, None, metrics | {"skipped": jnp.int32(0)})
    assert 0 < seconds < 1e-3


def bench(**changes) -> step.StepBench:
    values = {f.name: 1.0 for f in dataclasses.fields(step.StepBench)}
    values |= {"mesh": "data=8", "device": "8 x cpu", "mfu": None, "device_bytes": None}
    values |= {"tokens": 8, "flops_per_token": 100, "matmul_parameters": 10}
    return step.StepBench(**{**values, **changes})


def test_what_is_not_known_is_said() -> None:
    text = str(bench())
    assert "MFU          not known: no peak rate is on record for 8 x cpu" in text
    assert "per device   not reported" in text
    known = str(bench(mfu=0.412, device_bytes={"arguments": 2 << 20, "peak": 3 << 20}))
    assert "41.2% of the bfloat16 peak" in known
    assert "arguments 2.0, peak 3.0 MiB" in known
