"""What once broke the engine: each test failed, or killed its process, before the engine was mended."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.axes import parse_mesh
from jaxpar.plan import hlo
from jaxpar.rules import LayoutError

ENTRIES = [
    ("up", ("features", "hidden")),
    ("down", ("hidden", "targets")),
    ("bias", ("targets",), "bias"),
    ("gain", (), "norm"),
]
WHOLE = {"features": None, "targets": None}


def initialiser(hidden: int = 16) -> Any:
    def init(rng):
        a, b, c = jax.random.split(rng, 3)
        return {
            "up": jax.random.normal(a, (8, hidden)),
            "down": jax.random.normal(b, (hidden, 4)),
            "bias": jax.random.normal(c, (4,)),
            "gain": jnp.ones(()),
        }

    return init


def loss(params, batch, rng, bend=jnp.tanh):
    out = (bend(batch["x"] @ params["up"]) @ params["down"] + params["bias"]) * params["gain"]
    error = jnp.sum((out - batch["y"]) ** 2, -1)
    return jnp.sum(batch["w"] * error), jnp.sum(batch["w"]), {}


def rules(hidden: Any = "model", **options: Any) -> jaxpar.Rules:
    return jaxpar.Rules(ENTRIES, axes={"hidden": hidden, **WHOLE}, **options)


def batch_of(rows: int = 48) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((rows, 8)),
        "y": random.standard_normal((rows, 4)),
        "w": random.integers(1, 4, rows).astype(float),
    }


def mesh_of(text: str) -> jaxpar.Mesh:
    count = math.prod(parse_mesh(text, None).values())
    return jaxpar.make_mesh(text, devices=jax.devices()[:count])


def parallel(mesh: str = "4x2", function: Any = loss, init: Any = None, **options: Any) -> Any:
    given = {"mesh": mesh_of(mesh), "rules": rules(), **options}
    optimizer = given.pop("optimizer", optax.sgd(1e-2))
    return jaxpar.parallelize(function, init or initialiser(), optimizer, **given)


# ---- rules -------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("hidden", ["data", "replica", ("data", "model"), ("model", "data")])
@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_axes_that_split_rows_split_no_parameter(mesh, hidden):
    """R1: the loss would see one shard's part of the array, and give other numbers without a word."""
    axis = next(a for a in ("replica", "data") if a in hidden)
    with pytest.raises(LayoutError, match=rf"up \(8, 16\): dimension 1 'hidden'.*{axis}.*zero=3"):
        parallel(mesh, rules=rules(hidden))


@pytest.mark.core
@pytest.mark.parametrize("zero", [1, 3])
def test_a_leaf_without_elements_stays_whole(zero):
    def sums(params, batch, rng):
        return jnp.sum((batch["x"] @ params["a"]) ** 2), 6.0, {}

    par = parallel(
        function=sums,
        init=lambda rng: {"a": jnp.ones((8, 4)), "z": jnp.ones((0, 4))},
        rules=jaxpar.Rules([("a|z", ("features", "targets"))], axes=WHOLE),
        zero=zero,
    )
    state, metrics = par.step(par.init(0), batch_of())
    assert np.isfinite(metrics["loss"])
    assert state.params["z"].shape == (0, 4)


# ---- bfloat16 sums beside an automatic axis ----------------------------------------------------

NARROW = [
    ("4x2" if zero % 2 else "replica=4,model=2", zero, micro, precision)
    for zero, micro, precision in itertools.product((0, 1, 2, 3), (1, 2), ("bf16", "bf16_params"))
    if (zero + micro + (precision == "bf16")) % 2
] + [("4x2", zero, 1, "bf16") for zero in (0, 2)]


@functools.cache
def wide() -> jaxpar.Parallel:
    """One device, float32."""
    return parallel("1x1")


@pytest.mark.parametrize(("mesh", "zero", "micro", "precision"), NARROW)
def test_bfloat16_trains_where_model_splits_only_some_leaves(mesh, zero, micro, precision):
    """XLA on CPU aborted the process on the sum of a leaf that `model` does not split."""
    options = {"zero": zero, "microbatches": micro, "precision": precision}
    par = parallel(mesh, **options, optimizer=optax.sgd(1.0))
    one = wide()
    before = jax.tree.map(np.asarray, one.init(0).params)
    state, metrics = par.step(par.load(before), batch_of())
    mean, norm, grads = jax.tree.map(np.asarray, one.gradients(one.load(before), batch_of()))
    metrics, after = jax.tree.map(np.asarray, (metrics, state.masters or state.params))
    assert abs(metrics["loss"] - mean) < 1e-2 * mean
    assert abs(metrics["grad_norm"] - norm) < 1e-2 * norm
    for name, grad in grads.items():
        # Each product rounds to 8 bits, and 48 rows are summed.
        error = np.abs(before[name] - after[name] - grad).max()
        assert error < 3e-2 * np.abs(grad).max(), name


@pytest.mark.core
def test_a_global_sum_of_bfloat16_has_a_gradient():
    """The same abort, and the same sum in the backward pass."""

    def coupled(params, batch, rng):
        y = (batch["x"].astype(params["up"].dtype) @ params["up"])[:, 0]
        mean = jaxpar.global_sum(y.sum()) / 48
        assert mean.dtype == y.dtype
        return jnp.sum((y - mean) ** 2), y.shape[0], {}

    got = {}
    for precision in ("bf16", "float32"):
        par = parallel(function=coupled, precision=precision)
        _, norm, grads = par.gradients(par.init(0), batch_of())
        got[precision] = np.asarray(grads["up"])
        assert norm > 0
    scale = np.abs(got["float32"]).max()
    assert np.abs(got["bf16"] - got["float32"]).max() < 3e-2 * scale


# ---- padding -----------------------------------------------------------------------------------

AVERAGING = {
    "sgd": lambda: optax.sgd(1e-2),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(1e-1)),
    "muon": lambda: optax.contrib.muon(1e-1),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(1e-2)),
    "param_block_rms": lambda: optax.chain(optax.scale_by_param_block_rms(), optax.sgd(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "eps 0": lambda: optax.adam(1e-2, eps=0.0),
}
bent = functools.partial(loss, bend=jax.nn.sigmoid)


@functools.cache
def plain_optax(name: str) -> tuple[Any, list[tuple[float, float]]]:
    """Three updates of the unpadded model on one device, by optax alone."""
    optimizer = AVERAGING[name]()
    params = jax.tree.map(lambda x: x.astype(jnp.float64), initialiser(15)(jax.random.key(0)))
    state, seen = optimizer.init(params), []
    for _ in range(3):
        value, grads = jax.value_and_grad(
            lambda p: bent(p, batch_of(), None)[0] / batch_of()["w"].sum()
        )(params)
        seen.append((float(value), float(optax.global_norm(grads))))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params), seen


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "mesh", "zero"),
    [(n, m, z) for i, n in enumerate(AVERAGING) for m, z in (("4x2", i % 4), ("2x4", 3 - i % 4))],
)
def test_padding_changes_no_number(name, mesh, zero):
    """Hidden 15 is stored as 16; sigmoid(0) is not 0, and the optimizers take means over a leaf."""
    par = parallel(
        mesh, bent, initialiser(15), rules=rules(pad=("hidden",)), optimizer=AVERAGING[name](),
        zero=zero, precision="float64",
    )  # fmt: skip
    start = jax.tree.map(np.asarray, initialiser(15)(jax.random.key(0)))
    state = par.load(start)
    expected, seen = plain_optax(name)
    for mean, norm in seen:
        state, metrics = par.step(state, batch_of())
        assert np.isclose(metrics["loss"], mean, rtol=1e-9)
        assert np.isclose(metrics["grad_norm"], norm, rtol=1e-9)
        assert metrics["skipped"] == 0
    assert state.params["up"].shape == (8, 16)
    assert not np.asarray(state.params["up"])[:, 15].any(), "the padding stays zero"
    for path, x in par.unpad(state).params.items():
        assert np.allclose(x, expected[path], rtol=1e-8, atol=1e-10), path


def test_padding_of_a_manual_model_axis_gets_no_gradient():
    """Each device of `model` knows which of its rows are padding, under ZeRO's split of the same dimension too."""

    def embed(params, batch, rng):
        return params["table"]

    def head(params, x, batch):
        places = jax.lax.axis_index("model") * 8 + jnp.arange(x.shape[0])
        total = jax.lax.psum(jnp.sum((x + places[:, None]) ** 2) + x.sum(), "model")
        return total, batch["id"].shape[0], {}

    staged = jaxpar.Staged(
        embed=embed, block=lambda p, x, b, r: x + p["s"], head=head, model_axis="manual"
    )
    par = parallel(
        "2x2",
        staged,
        lambda rng: {"table": jnp.ones((13, 3)), "blocks": {"s": jnp.zeros((1, 3))}},
        rules=jaxpar.Rules(
            [("table", ("vocab", "out")), ("blocks/s", ("layers", "out"))],
            axes={"vocab": "model", "out": None, "layers": None},
            pad=("vocab",),
        ),
        zero=2,
        optimizer=optax.sgd(1.0),
    )
    assert par.layout.params["table"].stored == (14, 3)
    state, _ = par.step(par.init(0), {"id": np.arange(4, dtype=np.int32)})
    table = np.asarray(state.params["table"])
    assert not table[13:].any()
    assert (table[:13] != 1).all()


@pytest.mark.core
def test_taking_the_padding_off_for_the_optimizer_sends_nothing(x64):
    """A part of the true array is as large as a part of the stored one."""
    text = {}
    for hidden, pad in ((15, ("hidden",)), (16, ())):
        par = parallel(
            init=initialiser(hidden), rules=rules(pad=pad), optimizer=optax.adam(1e-2), zero=1
        )
        compiled = par.lower(batch_of()).compile().as_text()
        found = hlo.collectives(compiled, par.mesh.jax_mesh)
        text[hidden] = sorted((c.kind, c.axes, c.payload) for c in found)
    assert text[15] == text[16]


# ---- what is not finite ------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 0.0, "1", True])
def test_a_clip_norm_that_cannot_be_is_refused(value):
    with pytest.raises(ValueError, match=r"clip_norm .*above 0, or None"):
        parallel(clip_norm=value)


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 3])
def test_an_update_that_is_not_finite_is_skipped(zero):
    """0/0: the second moment of a leaf without gradient, and an eps of 0."""
    frozen = functools.partial(_without, "gain")
    par = parallel(function=frozen, optimizer=optax.adam(1e-2, eps=0.0), zero=zero)
    state = par.init(0)
    kept = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = par.step(state, batch_of())
    assert (int(metrics["skipped"]), int(state.skipped), int(state.step)) == (1, 1, 1)
    now = jax.tree.map(np.asarray, (state.params, state.opt_state))
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, now))


def _without(name: str, params: Any, batch: Any, rng: Any) -> Any:
    return loss({**params, name: 1.0}, batch, rng)


@pytest.mark.core
@pytest.mark.parametrize("weight", [1e-24, 1e19])
def test_the_size_of_weights_does_not_matter(weight):
    """Squares of the summed gradient leave float32 long before the mean does."""
    found = {}
    for scale in (1.0, weight):
        batch = batch_of() | {"w": batch_of()["w"] * scale}
        par = parallel(clip_norm=1.0)
        state, metrics = par.step(par.init(0), batch)
        found[scale] = [float(metrics[n]) for n in ("loss", "grad_norm")]
        found[scale] += np.asarray(state.params["up"]).ravel().tolist()
        assert metrics["skipped"] == 0
    assert np.allclose(found[weight], found[1.0], rtol=1e-5)


# ---- states and keys ---------------------------------------------------------------------------


@pytest.mark.core
def test_parameters_of_other_shapes_and_names_are_not_loaded():
    par = parallel()
    good = initialiser()(jax.random.key(0))
    with pytest.raises(ValueError, match=r"up has shape \(8, 32\) and the layout \(8, 16\)"):
        par.load(initialiser(32)(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"gain \(\) is missing\n  gane \(\) is not known"):
        par.load({("gane" if k == "gain" else k): v for k, v in good.items()})
    padded = parallel(init=initialiser(15), rules=rules(pad=("hidden",)))
    with pytest.raises(ValueError, match=r"\(8, 13\) and the layout \(8, 15\)"):
        padded.load(initialiser(13)(jax.random.key(0)))


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 3])
def test_a_state_that_was_donated_is_refused(zero):
    """The process died: the program wrote into memory that was another array's."""
    par = parallel(zero=zero)
    state = par.init(0)
    par.step(state, batch_of())
    with pytest.raises(
        ValueError, match=r"given to step before .* keep the one that step returned"
    ):
        par.step(state, batch_of())


@pytest.mark.core
def test_a_state_of_another_stage_mesh_or_optimizer_is_refused_with_a_way():
    one, three = parallel(zero=1), parallel(zero=3)
    for other in (one, parallel("2x4")):
        state = other.init(0)
        with pytest.raises(ValueError, match=r"lies as .*new.pad\(old.unpad\(state\)\)"):
            three.step(state, batch_of())
        moved, metrics = three.step(three.pad(other.unpad(state)), batch_of())
        assert np.isfinite(metrics["loss"])
    with pytest.raises(ValueError, match="another optimizer"):
        parallel(optimizer=optax.adam(1e-2)).step(moved, batch_of())
    with pytest.raises(ValueError, match="is a dict; step takes"):
        three.step(moved.params | {}, batch_of())


def test_a_random_key_in_the_optimizers_state():
    """optax's own noise; the same on every mesh."""
    ends = []
    for mesh, zero in (("1x1", 0), ("4x2", 1)):
        noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
        par = parallel(mesh, optimizer=optax.chain(noise, optax.sgd(1e-2)), zero=zero)
        state = par.init(0)
        for _ in range(2):
            state, _ = par.step(state, batch_of())
        ends.append(np.asarray(state.params["up"]))
    assert np.allclose(*ends, rtol=1e-4, atol=1e-5)


# ---- optimizers that ask for more than gradients -----------------------------------------------


def test_optimizers_get_the_loss_as_value():
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=1.0)
    par = parallel(optimizer=optax.chain(optax.sgd(1e-2), plateau))
    state = par.init(0)
    for _ in range(4):
        state, metrics = par.step(state, batch_of())
    assert np.isfinite(metrics["loss"])
    found = [
        s
        for s in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "best_value"))
        if hasattr(s, "best_value")
    ]
    assert found[0].scale < 1


def test_a_line_search_is_refused():
    par = parallel(optimizer=optax.lbfgs())
    with pytest.raises(TypeError, match=r"value_fn.*line search"):
        par.step(par.init(0), batch_of())
