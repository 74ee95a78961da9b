"""Named precisions: what is stored in which dtype, and what small dtypes must not lose."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.config import ModelConfig
from jaxpar.models import decoder
from jaxpar.precision import PRECISIONS, named

CONFIG = ModelConfig(
    layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=64, positions=16
)


def build(precision: str, **options):
    staged, init, rules = decoder.make(CONFIG)
    return jaxpar.parallelize(
        staged,
        init,
        options.pop("optimizer", optax.adamw(3e-4)),
        mesh=jaxpar.make_mesh("4x2"),
        rules=rules,
        precision=precision,
        **options,
    )


def batch(seed: int = 0):
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 64, (16, 16), np.int32) for name in ("tokens", "targets")}


@pytest.mark.core
def test_bf16_params_with_masters_still_move_their_norms():
    """O1: a bfloat16 weight at 1.0 does not move by 3e-4; its float32 master does, and carries it along."""
    par = build("bf16_params", zero=1)
    state = par.init(0)
    for i in range(50):
        state, _ = par.step(state, batch(i))
    norms = (
        state.masters["blocks"]["attention_norm"]["scale"],
        state.params["blocks"]["attention_norm"]["scale"],
    )
    assert np.abs(np.asarray(norms[0]) - 1).max() > 3e-3
    assert np.abs(np.asarray(norms[1].astype(jnp.float32)) - 1).max() > 3e-3
    rounded = jax.tree.map(lambda m: m.astype(jnp.bfloat16), state.masters)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), rounded, state.params))


@pytest.mark.parametrize("zero", [1, 3])
def test_bf16_runs_stay_near_float32(zero):
    """Losses of 10 steps within the rounding of bfloat16, for every stage and both recipes."""
    curves = {}
    for name in ("float32", "bf16", "bf16_params"):
        par = build(name, zero=zero, microbatches=2, optimizer=optax.adamw(1e-3))
        state = par.init(0)
        curves[name] = []
        for i in range(10):
            state, metrics = par.step(state, batch(i))
            curves[name].append(float(metrics["loss"]))
    for name in ("bf16", "bf16_params"):
        assert np.abs(np.array(curves[name]) - curves["float32"]).max() < 0.02


def test_accumulated_gradients_are_kept_in_float32_and_sixteen_bytes_a_parameter_are_sixteen():
    for name, precision in PRECISIONS.items():
        assert precision.gradient(2) == ("float64" if name == "float64" else "float32")
    par = build("bf16_params", zero=0)
    count = par.layout.parameters() // 1
    local = sum(
        np.prod(r.local(par.layout.sizes)) for r in par.layout.rows if r.kind == "parameter"
    )
    moments = 8 * local
    assert par.layout.bytes_per_device("parameter") == 2 * local
    assert par.layout.bytes_per_device("gradient") == 2 * local
    assert par.layout.bytes_per_device("master") == 4 * local
    assert par.layout.bytes_per_device("moment") == moments
    assert count == sum(np.prod(x.shape) for x in jax.tree.leaves(par.unpad(par.init(0)).params))


@pytest.mark.core
def test_an_unknown_precision_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean bf16_params"):
        named("bf16_parms")
    with pytest.raises(ValueError, match="bfloat16 and float32 work"):
        named("bf16", "float16")
