"""A decoder's state from one mesh, ZeRO stage and precision to another: bitwise where it can be, refused where not."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import optim
from jaxpar.checkpoint import CheckpointError, Checkpoints, true_state
from jaxpar.checkpoint.restoring import flat
from jaxpar.config import ModelConfig, OptimizerConfig
from jaxpar.models import decoder

MODEL = ModelConfig(
    layers=3, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=65, positions=16
)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(0.1),
    "anchored": optax.GradientTransformation(
        lambda params: {"anchor": params}, lambda grads, state, params=None: (grads, state)
    ),
}


def devices(mesh: str) -> jaxpar.Mesh:
    count = int(np.prod([int(n) for n in mesh.split("x")]))
    return jaxpar.make_mesh(mesh, devices=jax.devices()[:count])


@functools.cache
def decoder_on(mesh: str, zero: int, precision: str = "float32") -> jaxpar.Parallel:
    """A decoder of 65 tokens, which every model axis pads, with momentum."""
    staged, init, rules = decoder.make(MODEL)
    return jaxpar.parallelize(
        staged,
        init,
        lambda layout: optim.make(
            OptimizerConfig(optimizer="sgd", momentum=0.9), 10, decay_mask=layout.decay_mask()
        ),
        mesh=devices(mesh),
        rules=rules,
        zero=zero,
        precision=precision,
    )


@functools.cache
def parallel(
    mesh: str = "1x1",
    zero: int = 0,
    precision: str = "float32",
    optimizer: str = "sgd",
    layers: int = 3,
) -> jaxpar.Parallel:
    """A few leaves with every trait of a decoder's: stacked blocks, a table that the model axis pads, norms."""

    def init(rng):
        a, b, c = jax.random.split(rng, 3)
        return {
            "embed": {"tokens": jax.random.normal(a, (65, 16))},
            "blocks": {
                "norm": {"scale": jnp.ones((layers, 16))},
                "mlp": {
                    "up": jax.random.normal(b, (layers, 16, 32)),
                    "down": jax.random.normal(c, (layers, 32, 16)),
                },
            },
        }

    def loss(params, batch, rng):
        raise AssertionError("never traced: these tests take no step")

    rules = jaxpar.Rules(
        [
            ("embed/tokens", ("vocab", "embed"), "embedding"),
            ("blocks/norm/scale", ("layers", "embed"), "norm"),
            ("blocks/mlp/up", ("layers", "embed", "mlp")),
            ("blocks/mlp/down", ("layers", "mlp", "embed")),
        ],
        axes={"vocab": "model", "mlp": "model", "embed": None, "layers": None},
        pad=("vocab",),
    )
    return jaxpar.parallelize(
        loss,
        init,
        OPTIMIZERS[optimizer],
        mesh=devices(mesh),
        rules=rules,
        zero=zero,
        precision=precision,
    )


def random_state(par: jaxpar.Parallel, seed: int = 0):
    """A state with another number everywhere, as after some training, in true shapes on the host."""
    random = np.random.default_rng(seed)

    def one(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return random.normal(size=x.shape).astype(x.dtype)
        return random.integers(0, 1 << 30, x.shape).astype(x.dtype)

    return jax.tree.map(one, true_state(par))


def on_host(par: jaxpar.Parallel, state):
    return jax.device_get(par.unpad(state))


def assert_bitwise(one, other, only: str = "") -> None:
    one, other = flat(one), flat(other)
    assert list(one) == list(other)
    for name, x in one.items():
        if name.startswith(only):
            assert x.dtype == other[name].dtype, name
            assert x.tobytes() == other[name].tobytes(), name


def as_asked(par: jaxpar.Parallel, state) -> None:
    wanted, got = flat(par.abstract_state), flat(state)
    assert {n: x.sharding for n, x in got.items()} == {n: x.sharding for n, x in wanted.items()}
    assert {n: (x.shape, x.dtype) for n, x in got.items()} == {
        n: (x.shape, x.dtype) for n, x in wanted.items()
    }


@pytest.fixture
def saved(tmp_path):
    """Saves a random state of a `Parallel` as step 5; gives the store and the state."""
    stores = []

    def make(par: jaxpar.Parallel):
        host = random_state(par)
        store = Checkpoints(tmp_path / f"of-{len(stores)}", say=lambda line: None)
        stores.append(store)
        store.save(5, par.unpad(par.pad(host)), {})
        store.wait()
        return store, host

    yield make
    for store in stores:
        store.close()


@pytest.mark.core
def test_from_mesh_to_mesh_and_back(tmp_path) -> None:
    """Cases C1, Z12, T1: 4x2 ZeRO 1 -> 2x4 ZeRO 3 -> 8x1 ZeRO 0 -> one device -> 4x2 ZeRO 1."""
    chain = [("4x2", 1), ("2x4", 3), ("8x1", 0), ("1x1", 0), ("4x2", 1)]
    first = decoder_on(*chain[0])
    expected = random_state(first)
    state = first.pad(expected)
    for step, (here, there) in enumerate(itertools.pairwise(chain)):
        store = Checkpoints(tmp_path)
        store.save(step, decoder_on(*here).unpad(state), {})
        store.close()
        par = decoder_on(*there)
        restored = Checkpoints(tmp_path).restore(par)
        assert (restored.step, restored.notes) == (step, [])
        state = restored.state
        as_asked(par, state)
        assert_bitwise(on_host(par, state), expected)


def test_a_restored_state_is_trained_without_a_second_compilation(saved) -> None:
    """Case Z3: placement and types are those that the step was compiled for."""

    def loss(params, batch, rng):
        error = jnp.square(batch["x"] @ params["w"]).sum(-1)
        return error.sum(), jnp.float32(error.shape[0]), {}

    par = jaxpar.parallelize(
        loss,
        lambda rng: {"w": jax.random.normal(rng, (16, 8))},
        optax.adam(1e-2),
        mesh=devices("4x2"),
        rules=jaxpar.Rules([("w", ("in", "out"))], axes={"in": None, "out": "model"}),
        zero=1,
    )
    batch = {"x": np.ones((8, 16), np.float32)}
    par.step(par.init(0), batch)
    store, _ = saved(par)
    state, metrics = par.step(store.restore(par).state, batch)
    assert par.cache_size() == 1
    assert np.isfinite(float(metrics["loss"]))
    as_asked(par, state)


def test_inside_and_outside_a_global_mesh(saved) -> None:
    """Case M6."""
    par = parallel("4x2", 1)
    store, host = saved(par)
    with jax.set_mesh(par.mesh.jax_mesh):
        store.save(6, par.unpad(par.pad(host)), {})
        assert_bitwise(on_host(par, store.restore(par, step=5).state), host)
    assert_bitwise(on_host(par, store.restore(par, step=6).state), host)


def test_the_number_of_layers_is_the_models(saved) -> None:
    store, _ = saved(parallel())
    with pytest.raises(
        CheckpointError, match=r"float32\[3, 32, 16\] in the checkpoint, float32\[2, 32, 16\]"
    ):
        store.restore(parallel(layers=2))


# ---- masters and precisions ---------------------------------------------------------------------


@pytest.mark.core
def test_masters_come_back_bitwise(saved) -> None:
    """Case O2: the dtypes of all leaves are those that were saved."""
    par = decoder_on("4x2", 1, "bf16_params")
    store, host = saved(par)
    state = store.restore(par).state
    as_asked(par, state)
    assert_bitwise(on_host(par, state), host)
    assert {str(x.dtype) for x in jax.tree.leaves(host.masters)} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(host.params)} == {"bfloat16"}


def test_masters_are_made_from_parameters_only_if_asked(saved) -> None:
    wide, narrow = parallel("1x1"), parallel("4x2", 1, "bf16_params")
    store, host = saved(wide)
    with pytest.raises(
        CheckpointError, match=r"float32\[3, 32, 16\] in the checkpoint, bfloat16"
    ) as error:
        store.restore(narrow)
    assert str(error.value).endswith("--allow-cast lets values change their dtype")
    restored = store.restore(narrow, allow_cast=True)
    as_asked(narrow, restored.state)
    got = on_host(narrow, restored.state)
    assert_bitwise(got.masters, host.params)
    assert_bitwise(got.opt_state, host.opt_state)
    assert_bitwise(
        got.params,
        jax.tree.map(lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16)), host.params),
    )
    assert restored.notes[0] == "masters are made from the parameters of the checkpoint"
    assert "cast from float32 to bfloat16" in restored.notes[1]


def test_parameters_are_made_from_masters_and_not_from_their_rounded_copies(saved) -> None:
    narrow, wide = parallel("4x2", 1, "bf16_params"), parallel("1x1")
    store, host = saved(narrow)
    with pytest.raises(CheckpointError, match="does not fit"):
        store.restore(wide)
    restored = store.restore(wide, allow_cast=True)
    got = on_host(wide, restored.state)
    assert_bitwise(got.params, host.masters)
    assert_bitwise(got.opt_state, host.opt_state)
    assert got.masters is None
    assert restored.notes == ["parameters are made from the masters of the checkpoint"]


def test_allow_cast_changes_nothing_where_nothing_has_to(saved) -> None:
    par = parallel("4x2", 1, "bf16_params")
    store, host = saved(par)
    restored = store.restore(par, allow_cast=True)
    assert restored.notes == []
    assert_bitwise(on_host(par, restored.state), host)


# ---- a new optimizer, or weights alone ----------------------------------------------------------


def test_a_new_optimizer_leaves_all_else(saved) -> None:
    store, host = saved(parallel("4x2", 1, optimizer="adamw"))
    par = parallel("4x2", 1)
    with pytest.raises(CheckpointError, match="opt_state/0/count: only in the checkpoint") as error:
        store.restore(par)
    assert str(error.value).endswith("--reset-optimizer starts the optimizer state anew")
    state = store.restore(par, reset_optimizer=True).state
    as_asked(par, state)
    got = on_host(par, state)
    assert_bitwise(got.params, host.params)
    for name in ("step", "skipped", "rng"):
        np.testing.assert_array_equal(getattr(got, name), getattr(host, name))
    assert_bitwise(got.opt_state, on_host(par, par.init(0)).opt_state)


def test_an_optimizer_that_starts_from_the_parameters_gets_the_restored_ones(saved) -> None:
    """Its state is not that of `init`: it holds a copy of what it began with."""

    store, host = saved(parallel("4x2", 1))
    par = parallel("4x2", 1, optimizer="anchored")
    got = on_host(par, store.restore(par, reset_optimizer=True).state)
    assert_bitwise(got.opt_state["anchor"], host.params)


def test_weights_alone_start_a_run(saved) -> None:
    par = parallel("4x2", 1, "bf16_params", "adamw")
    store, host = saved(par)
    restored = store.restore(par, weights_only=True, rng=3)
    as_asked(par, restored.state)
    got, first = on_host(par, restored.state), on_host(par, par.init(3))
    assert_bitwise(got.params, host.params)
    assert_bitwise(got.masters, host.masters)
    assert_bitwise(got.opt_state, first.opt_state)
    assert (int(got.step), int(got.skipped), restored.step) == (0, 0, 5)
    np.testing.assert_array_equal(got.rng, first.rng)


def test_weights_alone_of_another_optimizer_fit(saved) -> None:
    store, host = saved(parallel("4x2", 1, optimizer="adamw"))
    par = parallel("4x2", 1)
    assert_bitwise(on_host(par, store.restore(par, weights_only=True).state).params, host.params)
