"""Every leaf of any optax state lies where its parameter lies, whatever wraps the optimizer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from jaxpar.layout import Layout
from jaxpar.mesh import make_mesh
from jaxpar.optimizer_state import LARGE
from jaxpar.rules import LayoutError, Leaf, Rules

SHAPES = {
    "embed": {"tokens": (64, 32)},
    "blocks": {"up": (2, 32, 128), "down": (2, 128, 32), "norm": (2, 32)},
}
PARAMS = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)
RULES = Rules(
    [
        ("embed/tokens", ("vocab", "embed"), "embedding"),
        ("blocks/up", ("layers", "embed", "mlp")),
        ("blocks/down", ("layers", "mlp", "embed")),
        ("blocks/norm", ("layers", "embed"), "norm"),
    ],
    axes={"vocab": "model", "embed": None, "mlp": "model", "layers": None},
    pad=("vocab",),
)
FREEZE = {"embed": {"tokens": "frozen"}, "blocks": {"up": "adam", "down": "adam", "norm": "adam"}}
MASK = {"embed": {"tokens": False}, "blocks": {"up": True, "down": True, "norm": False}}


def frozen_embedding() -> optax.GradientTransformation:
    return optax.multi_transform({"adam": optax.adamw(1e-3), "frozen": optax.set_to_zero()}, FREEZE)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd with momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "schedule-free": lambda: contrib.schedule_free_adamw(1e-3),
    "clip, schedule, bf16 moment": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(1.0, 0.0, 9), mu_dtype=jnp.bfloat16),
    ),
    "injected hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation(),
    "finite only": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "masked": lambda: optax.masked(optax.adam(1e-3), MASK),
    "multi_transform": frozen_embedding,
    "MultiSteps of multi_transform": lambda: optax.MultiSteps(
        frozen_embedding(), 2
    ).gradient_transformation(),
}


def layout(optimizer: Any, params: Any = PARAMS, rules: Rules = RULES, **options: Any) -> Layout:
    sizes = options.pop("sizes", {"data": 2, "model": 4})
    return Layout.build(params, rules, sizes, optimizer=optimizer, **options)


def state_rows(optimizer: Any, *args: Any, **options: Any) -> dict[str, Leaf]:
    tree = layout(optimizer, *args, **options).opt_state
    return {r.path: r for r in jax.tree.leaves(tree, is_leaf=_is_row)}


def _is_row(x: Any) -> bool:
    return isinstance(x, Leaf)


# ---- optax itself says which leaf belongs to which parameter -----------------------------------


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agrees_with_optax_about_whose_a_leaf_is(name, zero):
    """Z7: optax.tree.map_params puts a parameter's row where the state belongs to it."""
    optimizer = OPTIMIZERS[name]()
    got = layout(optimizer, zero=zero)
    state = jax.eval_shape(optimizer.init, PARAMS)
    # Stage 3 lays parameters as stages 1 to 3 lay moments.
    owners = layout(None, zero=3 if zero else 0).params
    wanted = optax.tree.map_params(
        optimizer,
        lambda x, row: x if isinstance(x, optax.MaskedNode) else row,
        state,
        owners,
        is_leaf=lambda x: isinstance(x, Leaf | optax.MaskedNode),
    )
    assert jax.tree.structure(got.opt_state, is_leaf=_is_row) == jax.tree.structure(state)
    kept, theirs = (jax.tree.leaves(t, is_leaf=_is_row) for t in (got.opt_state, wanted))
    for row, owner, x in zip(kept, theirs, jax.tree.leaves(state), strict=True):
        assert (row.stored, row.dtype) == (x.shape, str(x.dtype))
        if isinstance(owner, Leaf):
            assert (row.kind, row.spec, row.dims) == ("moment", owner.spec, owner.dims)
        else:
            assert (row.kind, row.spec) == ("other", ((),) * x.ndim)


def test_muon_momentum_lies_as_the_parameter():
    rows = state_rows(contrib.muon(1e-3), zero=1)
    wanted = {r.path: r.spec for r in layout(None, zero=3).rows if r.kind == "parameter"}
    for path, row in rows.items():
        owner = next((p for p in wanted if path.endswith("/" + p)), None)
        assert row.spec == (((),) * len(row.shape) if owner is None else wanted[owner])
    assert {r.kind for p, r in rows.items() if "ns_coeffs" in p} == {"other"}


def test_frozen_parameters_have_no_state():
    """Z7: holes take no bytes."""
    rows = state_rows(frozen_embedding(), zero=1)
    assert not [path for path in rows if path.endswith("tokens")]
    assert len([path for path in rows if path.endswith("up")]) == 2


def test_state_follows_the_masters_dtype():
    rows = state_rows(optax.adam(1e-3), param_dtype="bfloat16", master_dtype="float32")
    assert rows["0/nu/blocks/up"].dtype == "float32"
    assert (
        state_rows(optax.adam(1e-3), param_dtype="bfloat16")["0/nu/blocks/up"].dtype == "bfloat16"
    )


def test_state_of_whole_numbers_keeps_their_dtype():
    """They are not cast to the dtype of the parameters, so neither is what init makes of them."""
    params = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32),
        "ids": jax.ShapeDtypeStruct((8,), "int32"),
    }
    rules = Rules([("w|ids", ("a",))], axes={"a": None})
    rows = state_rows(optax.sgd(1e-3, momentum=0.9), params, rules, param_dtype="bfloat16")
    assert {p: r.dtype for p, r in rows.items()} == {
        "0/trace/ids": "int32",
        "0/trace/w": "bfloat16",
    }


def test_padded_parameters_have_padded_moments():
    """T1: their true shape is that of the parameter, for the checkpoint."""
    params = {**PARAMS, "embed": {"tokens": jax.ShapeDtypeStruct((65, 32), jnp.float32)}}
    row = state_rows(optax.adam(1e-3), params)["0/mu/embed/tokens"]
    assert (row.shape, row.stored) == ((65, 32), (68, 32))


# ---- factored moments --------------------------------------------------------------------------


def test_factored_moments_keep_the_dimensions_that_are_left():
    """Adafactor, arXiv:1804.04235: a row and a column of means instead of a matrix."""
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=32, momentum=0.9)
    rows = state_rows(optimizer)
    assert rows["0/v_row/blocks/up"].dims == ("layers", "embed")
    assert rows["0/v_row/blocks/up"].spec == ((), ())
    assert rows["0/v_col/blocks/up"].dims == ("layers", "mlp")
    assert rows["0/v_col/blocks/up"].spec == ((), ("model",))
    assert rows["0/v_row/embed/tokens"].dims == ("embed",)
    assert rows["0/v_col/embed/tokens"].spec == (("model",),)
    assert rows["0/v/blocks/up"].shape == (1,)
    assert rows["0/v/blocks/up"].kind == "other"
    assert rows["0/v/blocks/norm"].dims == ("layers", "embed")
    (ema,) = [r for p, r in rows.items() if p.endswith("ema/blocks/down")]
    assert ema.spec == ((), ("model",), ())


def test_zero_splits_factored_moments_over_data():
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=32)
    rows = state_rows(optimizer, zero=1)
    assert rows["0/v_row/blocks/up"].spec == ((), ("data",))
    assert rows["0/v_col/blocks/up"].spec == ((), ("model", "data"))


def test_square_matrices_drop_the_dimension_that_optax_averages():
    """Shapes alone cannot tell rows from columns of a square; optax's rule can."""
    params = {"w": jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)}
    rules = Rules(
        [("w", ("layers", "in", "out"))], axes={"layers": None, "in": None, "out": "model"}
    )
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=32)
    rows = state_rows(optimizer, params, rules)
    # The row is the mean over the last of the two largest dimensions, the column over the other.
    values = {"w": jnp.arange(2 * 64 * 64, dtype=jnp.float32).reshape(2, 64, 64) / 1e3}
    _, after = optimizer.update(values, optimizer.init(values), values)
    ratio = optax.tree.get(after, "v_row")["w"] / jnp.mean(values["w"] ** 2, axis=2)
    assert jnp.allclose(ratio, ratio[0, 0], rtol=1e-3)
    assert rows["0/v_row/w"].dims == ("layers", "in")
    assert rows["0/v_col/w"].dims == ("layers", "out")


@pytest.mark.core
def test_factored_moments_of_padded_parameters_are_padded():
    """The optimizer works on true shapes: a mean over rows is of 65, and is stored as 68."""
    params = {**PARAMS, "embed": {"tokens": jax.ShapeDtypeStruct((65, 32), jnp.float32)}}
    rows = state_rows(optax.adafactor(1e-3, min_dim_size_to_factor=16), params, zero=1)
    column, row = rows["0/v_col/embed/tokens"], rows["0/v_row/embed/tokens"]
    assert (column.shape, column.stored, column.spec) == ((65,), (68,), (("model",),))
    assert (row.shape, row.stored, row.spec) == ((32,), (32,), (("data",),))
    plain = state_rows(optax.adafactor(1e-3, min_dim_size_to_factor=128), params)
    assert plain["0/v/embed/tokens"].stored == (68, 32)
    assert plain["0/v_row/embed/tokens"].stored == (1,)


# ---- whose it is -------------------------------------------------------------------------------


def test_a_parameter_named_like_a_field_of_the_state_takes_nothing_of_others():
    """0/mu/w is the moment of w, though mu/w is a parameter too."""
    params = {
        "w": jax.ShapeDtypeStruct((8, 16), jnp.float32),
        "mu": {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)},
    }
    rules = Rules(
        [("w", ("a", "b")), ("mu/w", ("b", "a"))], axes={"a": "model", "b": None}, pad=("a",)
    )
    rows = state_rows(optax.adam(1e-3), params, rules)
    assert rows["0/mu/w"].reason == "follows w"
    assert rows["0/nu/w"].spec == (("model",), ())
    assert rows["0/mu/mu/w"].reason == "follows mu/w"
    assert rows["0/nu/mu/w"].spec == ((), ("model",))


def test_a_model_of_one_array():
    params = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    rules = Rules([("", ("a", "b"))], axes={"a": "model", "b": None})
    rows = state_rows(optax.adam(1e-3), params, rules, zero=1)
    assert rows["0/mu"].spec == (("model",), ("data",))
    assert rows["0/count"].kind == "other"


class Stray(NamedTuple):
    table: Any


def stray(n: int) -> optax.GradientTransformation:
    def init(params: Any) -> Stray:
        del params
        return Stray(jnp.zeros(n))

    return optax.GradientTransformation(init, optax.identity().update)


@pytest.mark.core
def test_a_large_leaf_that_follows_no_parameter_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"0/table \(65537,\) follows no parameter"):
        layout(optax.chain(stray(LARGE + 1)))
    row = state_rows(optax.chain(stray(LARGE)))["0/table"]
    assert (row.kind, row.spec) == ("other", ((),))


def test_large_state_of_another_shape_names_its_parameter():
    """L-BFGS keeps ten copies of each parameter in one array, which has no dimension names."""
    params = {**PARAMS, "embed": {"tokens": jax.ShapeDtypeStruct((1024, 32), jnp.float32)}}
    with pytest.raises(LayoutError, match=r"\(10, 1024, 32\) belongs to embed/tokens and has not"):
        layout(optax.scale_by_lbfgs(), params)


def test_random_keys_in_the_state_are_whole_and_counted():
    rows = state_rows(optax.add_noise(0.1, 0.5, key=jax.random.key(0)))
    (row,) = [r for p, r in rows.items() if p.endswith("key")]
    assert row.bytes_per_device({}) == 8


def test_random_keys_among_the_parameters_are_refused():
    params = {**PARAMS, "rng": jax.random.key(0)}
    rules = Rules([*RULES.entries, ("rng", ())], axes=RULES.axes)
    with pytest.raises(LayoutError, match="rng is a random key"):
        layout(optax.adam(1e-3), params, rules)


# ---- real arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "name", ["adamw", "adafactor", "MultiSteps of multi_transform", "schedule-free"]
)
def test_bytes_of_the_real_state_are_the_layouts(name, zero):
    """Z1: without its own shardings jit(optimizer.init) would put every moment on device 0."""
    mesh = make_mesh("2x4")
    optimizer = OPTIMIZERS.get(name, lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16))()
    plan = Layout.build(PARAMS, RULES, mesh, zero=zero, optimizer=optimizer)
    shardings = jax.tree.map(lambda r: mesh.sharding(r.spec), plan.opt_state, is_leaf=_is_row)
    state = jax.jit(
        lambda: optimizer.init(jax.tree.map(lambda s: jnp.ones(s.shape), PARAMS)),
        out_shardings=shardings,
    )()
    held = dict.fromkeys(jax.devices(), 0)
    for x in jax.tree.leaves(state):
        for part in x.addressable_shards:
            held[part.device] += math.prod(part.data.shape) * x.dtype.itemsize
    expected = plan.bytes_per_device("moment") + plan.bytes_per_device("other")
    assert set(held.values()) == {expected}
