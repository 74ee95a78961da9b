"""`parallelize` with a user's own loss: the sharded step equals plain JAX on one device, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

import jaxpar

pytestmark = [pytest.mark.usefixtures("x64")]

MESHES = ("1", "8x1", "4x2", "2x4", "replica=2,data=2,model=2")


def init(rng: Array) -> dict:
    """A network with stacked blocks; the same tree serves the opaque loss and the staged model."""
    a, b, c, d = jax.random.split(rng, 4)
    return {
        "embed": jax.random.normal(a, (8, 16)),
        "blocks": {
            "up": jax.random.normal(b, (3, 16, 32)) / 4,
            "bias": jax.random.normal(c, (3, 32)),
            "down": jax.random.normal(d, (3, 32, 16)) / 6,
        },
        "head": jax.random.normal(a, (16, 4)) / 4,
    }


def embed(params, batch, rng):
    return batch["x"] @ params["embed"]


def block(layer, x, batch, rng):
    return x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]


def head(params, x, batch):
    error = jnp.square(x @ params["head"] - batch["y"]).sum(-1) * batch["weight"]
    return error.sum(), batch["weight"].sum(), {"error_max": (error.max(), 1)}


def opaque(params, batch, rng):
    x = embed(params, batch, rng)
    for i in range(3):
        x = block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, batch, rng)
    return head(params, x, batch)


STAGED = jaxpar.Staged(embed=embed, block=block, head=head)


def rules(**axes) -> jaxpar.Rules:
    given = dict.fromkeys(("in", "width", "out", "layers")) | {"hidden": "model"} | axes
    return jaxpar.Rules(
        [
            ("embed", ("in", "width")),
            ("blocks/up", ("layers", "width", "hidden")),
            ("blocks/bias", ("layers", "hidden"), "bias"),
            ("blocks/down", ("layers", "hidden", "width")),
            ("head", ("width", "out")),
        ],
        axes=given,
    )


def make_batch(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(32, 8)),
        "y": random.normal(size=(32, 4)),
        "weight": random.integers(0, 3, 32).astype(np.float64),
    }


def mesh_of(text: str) -> jaxpar.Mesh:
    return jaxpar.make_mesh(text, devices=jax.devices()[: 1 if text == "1" else 8])


@functools.cache
def oracle():
    params = jax.tree.map(lambda a: a.astype(jnp.float64), init(jax.random.key(0)))
    batch = make_batch()

    def mean(p):
        total, weight, _ = opaque(p, batch, None)
        return total / weight

    loss, grads = jax.value_and_grad(mean)(params)
    return params, batch, loss, grads, optax.global_norm(grads)


def worst(a, b) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max())
        for x, y in pairs
    )


CASES = [
    (mesh, zero, micro, door, small)
    for i, (mesh, zero, micro) in enumerate(itertools.product(MESHES, (0, 1, 2, 3), (1, 4)))
    # Doors and thresholds take turns, so that each meets every mesh and stage.
    for door, small in (("opaque", 0), ("staged", 0), ("staged", 1 << 20))
    if (i + len(door) + small // (1 << 20)) % 2 == 0
]


@pytest.mark.parametrize(("mesh", "zero", "micro", "door", "small"), CASES)
def test_equals_one_device(mesh, zero, micro, door, small):
    params, batch, loss, grads, norm = oracle()
    par = jaxpar.parallelize(
        opaque if door == "opaque" else STAGED,
        init,
        optax.sgd(1.0),
        mesh=mesh_of(mesh),
        rules=rules(),
        zero=zero,
        microbatches=micro,
        remat="full" if door == "staged" and micro == 4 else "none",
        precision="float64",
        small=small,
    )
    got = par.gradients(par.load(params), batch)
    assert abs(got[0] - loss) / abs(loss) < 1e-12
    assert abs(got[1] - norm) / norm < 1e-12
    assert worst(got[2], grads) < 1e-11
    state, metrics = par.step(par.load(params), batch)
    assert worst(state.params, jax.tree.map(jnp.subtract, params, grads)) < 1e-11
    assert metrics["weight"] == batch["weight"].sum()


@pytest.mark.core
def test_metrics_are_sums_over_weights():
    params, batch, *_ = oracle()
    par = jaxpar.parallelize(
        opaque,
        init,
        optax.sgd(1.0),
        mesh=mesh_of("4x2"),
        rules=rules(),
        precision="float64",
        microbatches=2,
    )
    _, metrics = par.step(par.load(params), batch)
    error = jnp.square(_forward(params, batch) - batch["y"]).sum(-1) * batch["weight"]
    shards = np.asarray(error).reshape(4, 2, 4)  # 4 data shards, 2 microbatches of 4 rows
    assert np.isclose(metrics["error_max"], shards.max(-1).mean(), rtol=1e-12)


def _forward(params, batch):
    x = embed(params, batch, None)
    for i in range(3):
        x = block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, batch, None)
    return x @ params["head"]


def test_evaluation_does_not_depend_on_accumulation_or_mesh():
    """G4."""
    params, batch, loss, *_ = oracle()
    for mesh, micro in (("8x1", 1), ("4x2", 4), ("2x4", 2)):
        par = jaxpar.parallelize(
            STAGED,
            init,
            optax.sgd(1.0),
            mesh=mesh_of(mesh),
            rules=rules(),
            zero=2,
            microbatches=micro,
            precision="float64",
            small=0,
        )
        total, weight = par.evaluate(par.load(params), batch)["loss"]
        assert abs(total / weight - loss) < 1e-12


@pytest.mark.core
def test_clipping_uses_the_global_norm_once():
    """T4, T5: replicated and sharded leaves together, clipped to 0.1 on every mesh."""
    params, batch, _, grads, norm = oracle()
    expected = jax.tree.map(lambda p, g: p - g * (0.1 / norm), params, grads)
    for mesh in MESHES:
        par = jaxpar.parallelize(
            opaque,
            init,
            optax.sgd(1.0),
            mesh=mesh_of(mesh),
            rules=rules(),
            zero=1,
            precision="float64",
            clip_norm=0.1,
        )
        state, metrics = par.step(par.load(params), batch)
        assert abs(metrics["grad_norm"] - norm) < 1e-11
        assert worst(state.params, expected) < 1e-11


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip in the chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "accumulating chain": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "frozen embedding": lambda: optax.multi_transform(
        {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()},
        lambda p: {
            k: jax.tree.map(lambda _, k=k: "freeze" if k == "embed" else "train", v)
            for k, v in p.items()
        },
    ),
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_sees_whole_arrays(name, zero):
    """Z4, Z7: three updates equal plain optax on one device; frozen leaves stay bitwise and have no state."""
    params, batch, *_ = oracle()
    optimizer = OPTIMIZERS[name]()
    par = jaxpar.parallelize(
        opaque, init, optimizer, mesh=mesh_of("4x2"), rules=rules(), zero=zero, precision="float64"
    )
    state = par.load(params)
    mean = jax.grad(lambda p: opaque(p, batch, None)[0] / opaque(p, batch, None)[1])
    plain, inner = params, optimizer.init(params)
    before = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    for _ in range(3):
        state, _ = par.step(state, batch)
        updates, inner = optimizer.update(mean(plain), inner, plain)
        plain = optax.apply_updates(plain, updates)
    # The iteration of Muon amplifies rounding; adafactor takes roots of tiny means.
    assert worst(state.params, plain) < (1e-6 if name in ("muon", "adafactor") else 1e-9)
    assert jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state)) == before, "Z2"
    assert par.cache_size() == 1, "Z3"
    if name == "frozen embedding":
        assert np.array_equal(state.params["embed"], params["embed"])


def test_state_of_every_stage_takes_the_bytes_that_the_layout_says():
    """Z1: moments are shards, not whole arrays on device 0."""
    for mesh, zero in itertools.product(("8x1", "4x2", "replica=2,data=2,model=2"), (0, 1, 2, 3)):
        par = jaxpar.parallelize(
            opaque,
            init,
            optax.adam(1e-2),
            mesh=mesh_of(mesh),
            rules=rules(),
            zero=zero,
            precision="float32",
        )
        state = par.init(0)
        for tree, leaves in (
            (state.params, par.layout.params),
            (state.opt_state, par.layout.opt_state),
        ):
            for x, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(leaves), strict=True):
                sizes = {s.data.nbytes for s in x.addressable_shards}
                assert sizes == {leaf.bytes_per_device(par.mesh.sizes)}, leaf.path


@pytest.mark.core
def test_initial_parameters_do_not_depend_on_the_mesh():
    """O6: bitwise, for every mesh and stage."""
    first = None
    for mesh, zero in (
        ("1", 0),
        ("8x1", 3),
        ("4x2", 1),
        ("2x4", 3),
        ("replica=2,data=2,model=2", 2),
    ):
        par = jaxpar.parallelize(
            opaque,
            init,
            optax.adam(1e-2),
            mesh=mesh_of(mesh),
            rules=rules(),
            zero=zero,
            precision="float32",
        )
        got = jax.tree.map(np.asarray, par.init(7).params)
        first = first or got
        assert jax.tree.all(jax.tree.map(np.array_equal, got, first))


@pytest.mark.core
def test_a_step_that_is_not_finite_changes_nothing_but_the_counts():
    """G8."""
    params, batch, *_ = oracle()
    par = jaxpar.parallelize(
        opaque,
        init,
        optax.adam(1e-2),
        mesh=mesh_of("4x2"),
        rules=rules(),
        zero=1,
        precision="float64",
    )
    state, _ = par.step(par.load(params), batch)
    kept = jax.tree.map(np.asarray, (state.params, state.opt_state))
    bad = batch | {"x": np.where(np.arange(32)[:, None] == 5, np.nan, batch["x"])}
    state, metrics = par.step(state, bad)
    assert metrics["skipped"] == 1
    assert int(state.skipped) == 1
    assert int(state.step) == 2
    assert jax.tree.all(
        jax.tree.map(
            np.array_equal, kept, jax.tree.map(np.asarray, (state.params, state.opt_state))
        )
    )
    state, metrics = par.step(state, batch)
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["loss"])


@pytest.mark.core
def test_a_batch_that_does_not_divide_is_an_error_that_names_what_would():
    """R2."""
    par = jaxpar.parallelize(
        opaque, init, optax.sgd(1.0), mesh=mesh_of("4x2"), rules=rules(), precision="float64"
    )
    with pytest.raises(ValueError, match="batch 19 does not divide by data=4; 16 or 20 would"):
        par.put({"x": np.zeros((19, 8))})


@pytest.mark.core
def test_global_sum_couples_rows_across_shards():
    """A loss over all rows: the variance of a prediction, which no shard can compute alone."""

    def coupled(params, batch, rng):
        y = (batch["x"] @ params["w"])[:, 0]
        count = jaxpar.global_sum(jnp.asarray(float(y.shape[0])))
        mean = jaxpar.global_sum(y.sum()) / count
        return jnp.square(y - mean).sum(), y.shape[0], {}

    w = np.random.default_rng(0).normal(size=(8, 1))
    batch = {"x": make_batch()["x"]}
    grad = jax.grad(lambda p: jnp.var(batch["x"] @ p["w"]))({"w": jnp.asarray(w)})
    for mesh in ("1", "8x1", "4x2"):
        par = jaxpar.parallelize(
            coupled,
            {"w": jax.ShapeDtypeStruct((8, 1), jnp.float64)},
            optax.sgd(1.0),
            mesh=mesh_of(mesh),
            rules=jaxpar.Rules([("w", ("in", "out"))], axes={"in": None, "out": None}),
            precision="float64",
        )
        _, _, got = par.gradients(par.load({"w": jnp.asarray(w)}), batch)
        assert worst(got, grad) < 1e-12


@pytest.mark.core
def test_one_array_under_two_names_is_two_parameters():
    """Z10: donating the state does not donate one buffer twice."""
    x = jnp.ones((8, 4))
    par = jaxpar.parallelize(
        lambda p, b, rng: (
            jnp.sum((b["x"] @ p["a"] - b["x"] @ p["b"] + 1) ** 2),
            b["x"].shape[0],
            {},
        ),
        {"a": x, "b": x},
        optax.sgd(0.1),
        mesh=mesh_of("8x1"),
        rules=jaxpar.Rules([("a|b", ("in", "out"))], axes={"in": None, "out": None}),
        precision="float64",
    )
    state = par.load({"a": x, "b": x})
    state, _ = par.step(state, {"x": make_batch()["x"]})
    assert not np.allclose(state.params["a"], state.params["b"])
    assert np.array_equal(x, np.ones((8, 4))), "the caller's array is left alone"


@pytest.mark.core
def test_a_step_works_inside_and_outside_a_global_mesh():
    """M6: jaxpar sets none, and minds none."""
    params, batch, loss, *_ = oracle()
    mesh = mesh_of("4x2")
    par = jaxpar.parallelize(
        STAGED, init, optax.sgd(1.0), mesh=mesh, rules=rules(), zero=3, precision="float64", small=0
    )
    assert jax.sharding.get_abstract_mesh().empty
    with jax.set_mesh(mesh.jax_mesh):
        _, inside = par.step(par.load(params), batch)
    _, outside = par.step(par.load(params), batch)
    assert abs(inside["loss"] - loss) < 1e-12
    assert abs(outside["loss"] - loss) < 1e-12
    assert par.cache_size() == 1


@pytest.mark.core
def test_a_state_of_true_shapes_comes_back_padded_as_it_was():
    """T1: a table of 17 rows over model=2 is stored as 18; what leaves jaxpar has 17."""

    def lookup(params, batch, rng):
        return jnp.sum(params["table"][batch["id"]] ** 2), batch["id"].shape[0], {}

    par = jaxpar.parallelize(
        lookup,
        {"table": jax.ShapeDtypeStruct((17, 4), jnp.float64)},
        optax.adam(0.1),
        mesh=mesh_of("4x2"),
        rules=jaxpar.Rules(
            [("table", ("vocab", "out"))], axes={"vocab": "model", "out": None}, pad=("vocab",)
        ),
        precision="float64",
    )
    table = np.random.default_rng(0).normal(size=(17, 4))
    state, _ = par.step(par.load({"table": table}), {"id": np.arange(32, dtype=np.int32) % 17})
    true = par.unpad(state)
    assert state.params["table"].shape == (18, 4)
    assert {x.shape for x in jax.tree.leaves((true.params, true.opt_state)) if x.ndim} == {(17, 4)}
    again = par.pad(true)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, state))
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, state)
