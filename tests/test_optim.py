"""Schedules against their closed forms, optimizers against the papers' update rules in NumPy."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import optim
from jaxpar.config import OptimizerConfig
from jaxpar.rules import Leaf

STEPS = 50


def config(**changes) -> OptimizerConfig:
    given = {
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "lr_schedule": "constant",
        "warmup_steps": 0,
    }
    return dataclasses.replace(OptimizerConfig(), **{**given, **changes})


def rates(**changes) -> list[float]:
    return [optim.learning_rate(config(**changes), STEPS, count) for count in range(STEPS)]


# ---- schedules ----------------------------------------------------------------------------------


def test_warmup_rises_evenly_and_update_w_has_the_peak() -> None:
    for name in ("cosine", "linear", "wsd", "constant"):
        got = rates(lr_schedule=name, warmup_steps=10, final_fraction=0.1, decay_fraction=0.2)
        np.testing.assert_allclose(got[:10], [0.01 * n / 10 for n in range(1, 11)])
        assert max(got) == got[9]


def test_cosine() -> None:
    got = rates(lr_schedule="cosine", warmup_steps=10, final_fraction=0.1)
    floor = 0.001
    assert math.isclose(got[29], (0.01 + floor) / 2)  # half way
    assert math.isclose(got[-1], floor)
    quarter = floor + (0.01 - floor) * (1 + math.cos(math.pi / 4)) / 2
    assert math.isclose(got[19], quarter)


def test_linear() -> None:
    got = rates(lr_schedule="linear", warmup_steps=10, final_fraction=0.2)
    np.testing.assert_allclose(np.diff(got[9:]), -0.008 / 40)
    assert math.isclose(got[-1], 0.002)


def test_wsd_is_stable_then_decays_over_the_last_part() -> None:
    got = rates(lr_schedule="wsd", warmup_steps=5, final_fraction=0.1, decay_fraction=0.2)
    np.testing.assert_allclose(got[4:40], 0.01)
    np.testing.assert_allclose(got[40:], [0.01 * (1 - 0.9 * n / 10) for n in range(1, 11)])


def test_constant_and_no_warmup() -> None:
    np.testing.assert_allclose(rates(lr_schedule="constant"), 0.01)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_floor_holds_after_the_last_step(name) -> None:
    c = config(lr_schedule=name, final_fraction=0.1)
    assert math.isclose(optim.learning_rate(c, STEPS, 10 * STEPS), 0.001)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_host_and_device_give_the_same_rate(name) -> None:
    c = config(lr_schedule=name, warmup_steps=7, final_fraction=0.1)
    inside = jax.jit(jax.vmap(optim.schedule(c, STEPS)))(jnp.arange(STEPS))
    np.testing.assert_allclose(
        inside, rates(lr_schedule=name, warmup_steps=7, final_fraction=0.1), 1e-5
    )


def test_a_run_shorter_than_its_warmup() -> None:
    c = config(lr_schedule="cosine", warmup_steps=10)
    got = [optim.learning_rate(c, 4, count) for count in range(4)]
    np.testing.assert_allclose(got, [0.001, 0.002, 0.003, 0.004])


# ---- optimizers ---------------------------------------------------------------------------------


def tree():
    random = np.random.default_rng(0)
    return {
        "matrix": random.normal(size=(2, 8, 6)),
        "norm": 1 + 0.1 * random.normal(size=(2, 8)),
    }


MASK = {"matrix": True, "norm": False}


def run(c: OptimizerConfig, steps: int = 3, **kwargs):
    """Parameters after `steps` updates with gradients that differ each time."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree())
    optimizer = optim.make(c, STEPS, decay_mask=MASK, **kwargs)
    state = optimizer.init(params)
    for step in range(steps):
        gradients = jax.tree.map(lambda x, s=step: jnp.asarray(np.sin(x + s), jnp.float32), tree())
        updates, state = jax.jit(optimizer.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def adam_by_hand(c: OptimizerConfig, steps: int = 3, trust: bool = False):
    """AdamW (arXiv:1711.05101) or LAMB (arXiv:1904.00962) in float64."""
    params = tree()
    m = dict.fromkeys(params, 0.0)
    v = dict.fromkeys(params, 0.0)
    for t in range(1, steps + 1):
        rate = optim.learning_rate(c, STEPS, t - 1)
        for k, x in tree().items():
            g = np.sin(x + t - 1)
            m[k] = c.beta1 * m[k] + (1 - c.beta1) * g
            v[k] = c.beta2 * v[k] + (1 - c.beta2) * g * g
            step = m[k] / (1 - c.beta1**t) / (np.sqrt(v[k] / (1 - c.beta2**t)) + c.eps)
            step = step + c.weight_decay * params[k] * MASK[k]
            if trust:
                step = step * np.linalg.norm(params[k]) / np.linalg.norm(step)
            params[k] = params[k] - rate * step
    return params


def assert_close(got, want) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


def test_adamw_is_the_papers_with_decay_where_the_mask_says() -> None:
    """Case O4: the norm stacked over layers has two dimensions and is not decayed."""
    c = config(optimizer="adamw", weight_decay=0.3, warmup_steps=2)
    assert_close(run(c), adam_by_hand(c))


def test_lamb_scales_the_whole_update_by_the_trust_ratio() -> None:
    c = config(optimizer="lamb", weight_decay=0.3)
    assert_close(run(c), adam_by_hand(c, trust=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum) -> None:
    c = config(optimizer="sgd", momentum=momentum, weight_decay=0.3)
    want, trace = tree(), dict.fromkeys(MASK, 0.0)
    for step in range(3):
        for k, x in tree().items():
            trace[k] = momentum * trace[k] + np.sin(x + step)
            want[k] = want[k] - 0.01 * (trace[k] + 0.3 * want[k] * MASK[k])
    assert_close(run(c), want)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "adafactor", "muon"])
def test_decay_reaches_the_masked_leaves_alone_and_scales_with_the_rate(name) -> None:
    extra = {"matrices": matrices()} if name == "muon" else {}
    still, decayed = (
        run(config(optimizer=name, weight_decay=w), steps=1, **extra) for w in (0.0, 0.5)
    )
    np.testing.assert_array_equal(still["norm"], decayed["norm"])
    moved = np.asarray(still["matrix"] - decayed["matrix"])
    if name != "lamb":  # its trust ratio changes the length of the whole update
        np.testing.assert_allclose(moved, 0.01 * 0.5 * tree()["matrix"], rtol=1e-3, atol=1e-5)
    assert np.abs(moved).max() > 1e-4


def test_adafactor_is_optax_without_its_own_decay() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree())
    gradients = jax.tree.map(jnp.sin, params)
    theirs = optax.adafactor(0.01)
    updates, _ = theirs.update(gradients, theirs.init(params), params)
    got = run(config(optimizer="adafactor", weight_decay=0.0), steps=1)
    assert_close(got, optax.apply_updates(params, updates))


# ---- Muon ---------------------------------------------------------------------------------------


def leaf(dims: str, role: str = "matrix") -> Leaf:
    names = tuple(dims.split())
    return Leaf(
        path="x",
        kind="parameter",
        shape=(4,) * len(names),
        stored=(4,) * len(names),
        dtype="float32",
        dims=names,
        spec=((),) * len(names),
        rule="x",
        role=role,
        reason="rule",
    )


def matrices():
    return optim.muon_dimensions(
        {"matrix": leaf("layers embed mlp"), "norm": leaf("layers embed", "norm")}
    )


def test_muon_dimensions_by_name_and_role() -> None:
    names = {
        "query": leaf("layers embed heads head_dim"),
        "out": leaf("layers heads head_dim embed"),
        "down": leaf("layers mlp embed"),
        "tokens": leaf("vocab embed", "embedding"),
        "head": leaf("embed vocab"),
        "norm": leaf("layers embed", "norm"),
    }
    got = optim.muon_dimensions(names)
    assert got["query"] == ((1,), (2, 3))
    assert got["out"] == ((1, 2), (3,))
    assert got["down"] == ((1,), (2,))
    assert got["tokens"] is got["head"] is got["norm"] is None


def test_muon_updates_are_orthogonal_a_layer_and_adam_takes_the_rest() -> None:
    c = config(optimizer="muon", weight_decay=0.0)
    before = tree()
    after = run(c, steps=1, matrices=matrices())
    for layer in range(2):
        step = np.asarray(before["matrix"][layer] - after["matrix"][layer]) / 0.01
        # Five Newton-Schulz steps leave singular values of 0.7 to 1.2; then times 0.2 sqrt(8).
        values = np.linalg.svd(step, compute_uv=False) / (0.2 * math.sqrt(8))
        assert values.min() > 0.6
        assert values.max() < 1.3
    adam = optax.adam(0.01, c.beta1, c.beta2, c.eps, nesterov=True)
    norm = jnp.asarray(before["norm"], jnp.float32)
    update, _ = adam.update(jnp.sin(norm), adam.init(norm))
    np.testing.assert_allclose(after["norm"], norm + update, rtol=1e-5)


def test_muon_without_its_matrices_says_so() -> None:
    with pytest.raises(ValueError, match="muon_dimensions"):
        optim.make(config(optimizer="muon"), STEPS, decay_mask=MASK)
