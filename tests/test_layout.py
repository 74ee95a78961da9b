"""A Layout says what every device holds: the bytes of the real arrays, before any exist."""

import io
import json
import math
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxpar.axes import AXES
from jaxpar.layout import KINDS, Layout
from jaxpar.mesh import Mesh, make_mesh
from jaxpar.rules import LayoutError, Leaf, Rules

PARAMS = {
    "embed": {"tokens": jax.ShapeDtypeStruct((65, 32), jnp.float32)},
    "blocks": {
        "norm": {"scale": jax.ShapeDtypeStruct((2, 32), jnp.float32)},
        "mlp": {
            "up": jax.ShapeDtypeStruct((2, 32, 128), jnp.float32),
            "up_bias": jax.ShapeDtypeStruct((2, 128), jnp.float32),
            "down": jax.ShapeDtypeStruct((2, 128, 32), jnp.float32),
        },
    },
}
RULES = Rules(
    [
        ("embed/tokens", ("vocab", "embed"), "embedding"),
        (".*/scale", ("layers", "embed"), "norm"),
        (".*/up", ("layers", "embed", "mlp")),
        (".*/up_bias", ("layers", "mlp"), "bias"),
        (".*/down", ("layers", "mlp", "embed")),
    ],
    axes={"vocab": "model", "embed": None, "mlp": "model", "layers": None},
    pad=("vocab",),
)
MESHES = ("8x1", "4x2", "2x4", "1x8", "replica=2,data=2,model=2", "data=2,context=2,model=2")


def build(mesh: Any = None, zero: int = 0, **options: Any) -> Layout:
    options = {"optimizer": optax.adamw(1e-3), **options}
    return Layout.build(PARAMS, RULES, mesh or {"data": 2, "model": 4}, zero=zero, **options)


def _is_row(x: Any) -> bool:
    return isinstance(x, Leaf)


def leaves(tree: Any) -> list[Leaf]:
    return jax.tree.leaves(tree, is_leaf=_is_row)


# ---- bytes -------------------------------------------------------------------------------------


def jax_bytes(row: Leaf, mesh: Mesh) -> int:
    """What JAX says one device holds; it refuses a dimension that does not divide."""
    return (
        math.prod(mesh.sharding(row.spec).shard_shape(row.stored)) * jnp.dtype(row.dtype).itemsize
    )


@pytest.mark.core
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("text", MESHES)
def test_bytes_are_those_of_jax_shardings(text, zero):
    mesh = make_mesh(text)
    layout = build(mesh, zero, param_dtype="bfloat16", master_dtype="float32")
    for kind in KINDS:
        rows = [r for r in layout.rows if r.kind == kind]
        assert rows
        assert layout.bytes_per_device(kind) == sum(jax_bytes(r, mesh) for r in rows)
    assert layout.bytes_per_device() == sum(layout.bytes_per_device(k) for k in KINDS)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("text", MESHES)
def test_bytes_are_those_of_real_parameters(text, zero):
    mesh = make_mesh(text)
    layout = build(mesh, zero)
    held = dict.fromkeys(jax.devices(), 0)
    for row in leaves(layout.params):
        array = jax.device_put(jnp.ones(row.stored, row.dtype), mesh.sharding(row.spec))
        for part in array.addressable_shards:
            held[part.device] += part.data.nbytes
    assert set(held.values()) == {layout.bytes_per_device("parameter")}


def test_no_device_is_needed():
    """16,384 devices, and the same bytes as the closed form."""
    sizes = {"replica": 4, "data": 512, "model": 8}
    params = {"up": jax.ShapeDtypeStruct((126, 16384, 53248), jnp.float32)}
    rules = Rules([("up", ("layers", "embed", "mlp"))], axes=RULES.axes)
    layout = Layout.build(params, rules, sizes, zero=3)
    assert layout.bytes_per_device("parameter") == 126 * 16384 * 53248 * 4 // (512 * 8)
    assert layout.parameters() == 126 * 16384 * 53248


def test_parameters_are_counted_without_padding_and_bytes_with_it():
    layout = build({"model": 4})
    tokens = next(r for r in layout.rows if r.path == "embed/tokens")
    assert layout.parameters() == sum(math.prod(x.shape) for x in jax.tree.leaves(PARAMS))
    assert tokens.bytes_per_device(layout.sizes) == 17 * 32 * 4


def test_dtypes_are_those_asked_for_each_kind():
    layout = build(param_dtype="bfloat16", grad_dtype="float32", master_dtype="float32")
    dtypes = {k: {r.dtype for r in layout.rows if r.kind == k} for k in KINDS}
    assert dtypes["parameter"] == {"bfloat16"}
    assert dtypes["gradient"] == dtypes["master"] == dtypes["moment"] == {"float32"}
    assert build(param_dtype="bfloat16").masters is None


def test_leaves_that_are_not_real_numbers_keep_their_dtype():
    params = {"table": jax.ShapeDtypeStruct((4,), jnp.int32), "rng": jax.random.key(0)}
    rules = Rules([("table", ("embed",)), ("rng", ())], axes=RULES.axes)
    layout = Layout.build(params, rules, {}, param_dtype="bfloat16")
    assert layout.params["table"].dtype == "int32"
    assert layout.bytes_per_device("parameter") == 16 + 8


@pytest.mark.parametrize("zero", [-1, 4, "3"])
def test_other_stages_are_refused(zero):
    with pytest.raises(LayoutError, match="the stages are 0, 1, 2 and 3"):
        build(zero=zero)


# ---- any library -------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.LayerNorm(name="norm")(nn.Dense(64, name="up")(x))


class Equinox(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Any):
        self.up = eqx.nn.Linear(16, 64, key=key)
        self.norm = eqx.nn.LayerNorm(64)


KEY = jax.random.key(0)
MODELS = {
    "Flax NNX": lambda: nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param)[1],
    "Flax Linen": lambda: jax.eval_shape(Dense().init, KEY, jnp.zeros((1, 16)))["params"],
    "Equinox": lambda: eqx.filter(Equinox(KEY), eqx.is_array),
    "Haiku": lambda: {
        "net/~/up": {"w": jnp.zeros((16, 64)), "b": jnp.zeros(64)},
        "net/~/norm": {"scale": jnp.zeros(64), "offset": jnp.zeros(64)},
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_lays_out_any_pytree_and_its_optimizer_state(model):
    params = MODELS[model]()
    weight = ("out", "in") if model == "Equinox" else ("in", "out")
    rules = Rules(
        [
            (".*up/(kernel|weight|w)", weight),
            (".*up/(bias|b)", ("out",), "bias"),
            (".*norm/.*", ("width",), "norm"),
        ],
        axes={"in": None, "out": "model", "width": None},
    )
    optimizer = optax.adamw(1e-3)
    layout = Layout.build(params, rules, {"data": 2, "model": 4}, zero=1, optimizer=optimizer)
    for tree, like in ((layout.params, params), (layout.grads, params)):
        assert jax.tree.structure(tree, is_leaf=_is_row) == jax.tree.structure(like)
    state = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(layout.opt_state, is_leaf=_is_row) == jax.tree.structure(state)
    whole = 16 * 64 + 3 * 64
    assert layout.parameters() == whole
    assert layout.bytes_per_device("parameter") == 4 * (16 * 64 // 4 + 64 // 4 + 2 * 64)
    # Two moments, each split over data=2 as well.
    assert layout.bytes_per_device("moment") == layout.bytes_per_device("parameter")
    mask = layout.decay_mask()
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert sum(jax.tree.leaves(mask)) == 1
    decay = optax.add_decayed_weights(0.1, mask)
    zeros, ones = (jax.tree.map(lambda x, f=f: f(x.shape), params) for f in (jnp.zeros, jnp.ones))
    updates, _ = decay.update(zeros, decay.init(ones), ones)
    assert sum(bool(x.any()) for x in jax.tree.leaves(updates)) == 1


def test_decay_goes_by_role_and_not_by_number_of_dimensions():
    """O4: norms and biases stacked over layers have two dimensions and do not decay."""
    assert build().decay_mask() == {
        "embed": {"tokens": True},
        "blocks": {
            "norm": {"scale": False},
            "mlp": {"up": True, "up_bias": False, "down": True},
        },
    }


# ---- what is whole though it need not be -------------------------------------------------------


def test_large_parameters_that_an_axis_could_split_are_listed():
    """R5: a dimension mapped to no axis leaves its weights whole, which no other check can see."""
    forgotten = Rules(RULES.entries, axes={**RULES.axes, "mlp": None}, pad=("vocab",))
    layout = Layout.build(PARAMS, forgotten, {"data": 2, "model": 4})
    paths = [r.path for r in layout.unsharded(least=2 * 32 * 128 * 4)]
    assert sorted(paths) == ["blocks/mlp/down", "blocks/mlp/up"]
    assert layout.unsharded(least=2 * 32 * 128 * 4 + 1) == ()
    assert build().unsharded(least=1024) == ()


def test_copies_that_the_stage_asks_for_are_not_listed():
    """Whole over data below ZeRO 3, and over replica always, is what was asked for."""
    assert build({"data": 8}, zero=2).unsharded(least=1) == ()
    assert build({"replica": 8}, zero=3).unsharded(least=1) == ()
    assert build({"data": 8, "replica": 2}, zero=3).unsharded(least=1) == ()


def test_what_stage_three_could_not_split_is_listed_largest_first():
    """5 divides the 65 rows of the embedding and nothing else."""
    layout = build({"data": 5}, zero=3)
    listed = layout.unsharded(least=1)
    assert all("no dimension divides by data=5" in r.reason for r in listed)
    assert {r.path for r in listed} == {
        r.path for r in leaves(layout.params) if r.path != "embed/tokens"
    }
    sizes = [r.bytes_per_device(layout.sizes) for r in listed]
    assert sizes == sorted(sizes, reverse=True)


# ---- showing -----------------------------------------------------------------------------------


def test_prints_path_shape_split_bytes_and_reason():
    text = str(build(zero=3))
    assert text.startswith("18,784 parameters on data=2 x model=4, ZeRO 3")
    line = next(x for x in text.splitlines() if x.startswith("embed/tokens"))
    for part in ("68x32 float32", "vocab:model", "embed:data", "1,088", "padded 65 -> 68"):
        assert part in line
    assert f"{build(zero=3).bytes_per_device('moment') / 1e3:.3g} kB" in text


def test_the_table_shows_the_kinds_asked_for_largest_first():
    layout = build(zero=1)
    out = io.StringIO()
    Console(file=out, width=200).print(layout.table(("moment",), by_bytes=True))
    shown = [x.split()[1] for x in out.getvalue().splitlines() if x.startswith("│")]
    rows = [r for r in layout.rows if r.kind == "moment"]
    assert sorted(shown) == sorted(r.path for r in rows)
    by_path = {r.path: r.bytes_per_device(layout.sizes) for r in rows}
    assert [by_path[p] for p in shown] == sorted(by_path.values(), reverse=True)


def test_the_difference_of_two_meshes_names_what_moves():
    before, after = build({"data": 8}), build({"data": 2, "model": 4})
    text = before.diff(after)
    assert "  parameter blocks/mlp/up: whole -> mlp:model, 32.8 kB -> 8.19 kB a device" in text
    assert "blocks/norm/scale" not in text
    assert f"- {before.title}" in text
    assert f"+ {after.title}" in text
    assert len(before.diff(before).splitlines()) == 4
    bare = build({"data": 8}, optimizer=None)
    assert "- moment 0/mu/blocks/mlp/up" in before.diff(bare)
    assert "+ moment 0/mu/blocks/mlp/up" in bare.diff(before)


# ---- JSON --------------------------------------------------------------------------------------


@pytest.mark.core
@given(
    st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in AXES}),
    st.integers(0, 3),
    st.sampled_from([None, "float32"]),
)
def test_json_and_back_loses_nothing(sizes, zero, masters):
    layout = build(sizes, zero, master_dtype=masters)
    back = Layout.from_json(layout.to_json())
    assert back.rows == layout.rows
    assert (back.sizes, back.zero) == (layout.sizes, zero)
    assert back.params["blocks/mlp/up"] == layout.params["blocks"]["mlp"]["up"]
    assert (back.masters is None) == (masters is None)
    assert back.bytes_per_device() == layout.bytes_per_device()
    assert str(back) == str(layout)
    assert back.to_json() == layout.to_json()
    assert json.loads(layout.to_json())["bytes_per_device"] == layout.bytes_per_device()


def test_json_keeps_the_order_of_rows():
    """Layer 10 follows layer 9, though its name sorts before that of layer 2."""
    params = [jax.ShapeDtypeStruct((8,), jnp.float32) for _ in range(12)]
    rules = Rules([(r"\d+", ("embed",))], axes=RULES.axes)
    layout = Layout.build(params, rules, {}, optimizer=optax.adam(1e-3))
    back = Layout.from_json(layout.to_json())
    assert [r.path for r in leaves(back.params)] == [str(i) for i in range(12)]
    assert back.rows == layout.rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"sizes": [], "zero": 0, "rows": []}',
        '{"sizes": {"dta": 2}, "zero": 0, "rows": []}',
        '{"sizes": {}, "zero": 0, "rows": [{"path": "a"}]}',
    ],
)
def test_other_json_is_refused(text):
    with pytest.raises(LayoutError, match="not a layout"):
        Layout.from_json(text)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"zero": 9}, "the stages are 0, 1, 2 and 3"),
        ({"sizes": {"data": 2, "model": 0}}, "'model' has size 0"),
        ({"sizes": {"model": 3}}, "blocks/mlp/down: 128 does not divide by model=3"),
        ({"row": {"spec": [["dta"], []]}}, "embed/tokens: unknown mesh axis 'dta'"),
        ({"row": {"spec": [["model"]]}}, "embed/tokens: shape, stored, dims and spec differ"),
        ({"row": {"dtype": "float33"}}, "float33"),
        ({"row": {"kind": "weight"}}, "embed/tokens: unknown kind 'weight'"),
    ],
)
def test_a_layout_whose_bytes_would_be_wrong_is_refused(change, cause):
    """An edited file must not print sums of what no device holds."""
    data = json.loads(build({"model": 4}).to_json())
    row = next(r for r in data["rows"] if r["path"] == "embed/tokens")
    row.update(change.get("row", {}))
    data.update({k: v for k, v in change.items() if k != "row"})
    with pytest.raises(LayoutError, match="not a layout") as error:
        Layout.from_json(json.dumps(data))
    assert cause in str(error.value)
