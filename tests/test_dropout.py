"""Dropout depends on where an element is in the whole batch, not on mesh, accumulation or step order (case O5)."""

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.config import ModelConfig
from jaxpar.models import decoder
from jaxpar.ops.dropout import attention_mask, dropout

pytestmark = pytest.mark.usefixtures("x64")

BATCH = {
    "tokens": np.random.default_rng(0).integers(0, 64, (16, 8), np.int32),
    "targets": np.random.default_rng(1).integers(0, 64, (16, 8), np.int32),
}


def build(mesh: str, rate: float, *, microbatches: int = 1, style: str = "llama", zero: int = 1):
    config = ModelConfig(
        style=style,
        layers=1,
        embed=32,
        heads=8,
        kv_heads=4,
        head_dim=4,
        mlp=64,
        vocab=64,
        positions=8,
        dropout=rate,
    )
    staged, init, rules = decoder.make(config)
    return jaxpar.parallelize(
        staged,
        init,
        optax.sgd(0.0),
        mesh=jaxpar.make_mesh(mesh, devices=jax.devices()[: 1 if mesh == "1" else 8]),
        rules=rules,
        zero=zero,
        microbatches=microbatches,
        precision="float64",
    )


def losses(par, steps: int = 2) -> list[float]:
    state = par.init(0)
    out = []
    for _ in range(steps):
        state, metrics = par.step(state, BATCH)
        out.append(float(metrics["loss"]))
    return out


@pytest.mark.core
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_the_loss_is_the_same_on_every_mesh_and_accumulation(style):
    one = losses(build("1", 0.5, style=style))
    for mesh, microbatches in (("4x2", 2), ("2x4", 1), ("replica=2,data=2,model=2", 4)):
        other = losses(build(mesh, 0.5, microbatches=microbatches, style=style))
        assert np.allclose(one, other, rtol=1e-12), mesh


def test_masks_differ_between_steps_and_evaluation_has_none():
    par, still = build("4x2", 0.5), build("4x2", 0.0)
    first, second = losses(par)  # rate 0: the parameters stay
    assert abs(first - second) > 1e-6
    total, weight = par.evaluate(par.init(0), BATCH)["loss"]
    assert np.isclose(total / weight, losses(still, 1)[0], rtol=1e-12)


@pytest.mark.core
def test_masks_differ_between_rows_positions_and_heads_and_keep_the_right_share():
    rng, rows = jax.random.key(0), np.arange(64)
    x = np.ones((64, 16, 32))
    kept = np.asarray(dropout(x, 0.25, rng, rows, np.arange(16)))
    assert set(np.unique(kept)) == {0.0, 1 / 0.75}
    assert abs((kept > 0).mean() - 0.75) < 0.01
    flat = kept.reshape(64 * 16, 32)
    assert len(np.unique(flat, axis=0)) == len(flat)
    masks = np.asarray(attention_mask(0.5, rng, rows[:4], np.arange(8), 16))
    assert len(np.unique(masks.reshape(-1, 16), axis=0)) > 0.98 * masks.size / 16
    half = np.asarray(attention_mask(0.5, rng, rows[2:4], np.arange(4, 8), 16))
    assert np.array_equal(half, masks[2:4, 4:8]), (
        "a part of the batch and the heads sees its part of the mask"
    )
