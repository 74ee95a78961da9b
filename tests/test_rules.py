"""Rules name every dimension of every parameter, or say in one message what does not fit."""

import math
import re
import types
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.axes import AXES, BATCH_AXES
from jaxpar.rules import LayoutError, Leaf, Rule, Rules, paths_of, sizes_of

SPLIT = tuple(a for a in AXES if a not in BATCH_AXES)
"""Axes that may split a parameter."""


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SHAPES = {
    "embed": {"tokens": shaped(64, 32)},
    "blocks": {
        "norm": {"scale": shaped(2, 32)},
        "mlp": {"up": shaped(2, 32, 128), "down": shaped(2, 128, 32)},
    },
}
ENTRIES = [
    ("embed/tokens", ("vocab", "embed"), "embedding"),
    (".*/norm/scale", ("layers", "embed"), "norm"),
    ("blocks/mlp/up", ("layers", "embed", "mlp")),
    ("blocks/mlp/down", ("layers", "mlp", "embed")),
]
NAMED = {"vocab": "model", "embed": None, "layers": None, "mlp": "model"}


def leaves(shapes: Any = SHAPES, mesh: Any = None, entries: Any = ENTRIES, **options: Any) -> Any:
    axes = {**NAMED, **options.pop("axes", {})}
    rules = Rules(entries, axes=axes, **options)
    return rules.leaves(shapes, {"data": 2, "model": 4} if mesh is None else mesh)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(LayoutError) as error:
        leaves(*args, **options)
    return str(error.value)


def rows(tree: Any) -> dict[str, Leaf]:
    flat = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Leaf))
    return {leaf.path: leaf for leaf in flat}


# ---- what a leaf says --------------------------------------------------------------------------


@pytest.mark.core
def test_each_leaf_has_its_dimensions_axes_role_and_rule():
    tree = leaves()
    assert jax.tree.structure(tree) == jax.tree.structure(SHAPES)
    up = tree["blocks"]["mlp"]["up"]
    assert up == Leaf(
        path="blocks/mlp/up",
        kind="parameter",
        shape=(2, 32, 128),
        stored=(2, 32, 128),
        dtype="float32",
        dims=("layers", "embed", "mlp"),
        spec=((), (), ("model",)),
        rule="blocks/mlp/up",
        role="matrix",
        reason="rule",
    )
    assert up.local({"data": 2, "model": 4}) == (2, 32, 32)
    assert up.bytes_per_device({"data": 2, "model": 4}) == 2 * 32 * 32 * 4
    assert up.copies({"data": 2, "model": 4}) == ("data",)
    roles = {path: leaf.role for path, leaf in rows(tree).items()}
    assert roles["embed/tokens"] == "embedding"
    assert roles["blocks/norm/scale"] == "norm"


def test_the_first_rule_that_matches_the_whole_path_wins():
    entries = [("b", ("embed",)), ("a.*", ("mlp",), "bias"), (".*", ("vocab",))]
    tree = leaves({"ab": shaped(8), "b": shaped(8), "xb": shaped(8)}, entries=entries)
    assert {k: leaf.rule for k, leaf in tree.items()} == {"ab": "a.*", "b": "b", "xb": ".*"}


def test_entries_may_be_rules_and_a_lone_name_is_one_dimension():
    entries = [Rule("a", ("mlp",), "bias"), ("b", "mlp")]
    tree = leaves({"a": shaped(8), "b": shaped(8)}, entries=entries)
    assert tree["a"].role == "bias"
    assert tree["b"].dims == ("mlp",)


def test_a_dimension_may_lie_on_several_axes():
    mesh = {"stage": 2, "model": 4}
    leaf = leaves(mesh=mesh, axes={"vocab": ("stage", "model")})["embed"]["tokens"]
    assert leaf.spec == (("stage", "model"), ())
    assert leaf.local(mesh) == (8, 32)


@pytest.mark.parametrize("axis", SPLIT)
def test_an_axis_of_size_one_changes_only_its_own_dimension(axis):
    """R6, R8: the other axes of the same array stay."""
    mesh = {"data": 2, "model": 4, "stage": 2, "context": 2, "expert": 2, "replica": 2, axis: 1}
    other = "model" if axis != "model" else "stage"
    leaf = leaves(mesh=mesh, axes={"mlp": other, "embed": axis, "vocab": None})["blocks"]["mlp"][
        "up"
    ]
    assert leaf.spec == ((), (), (other,))
    assert axis not in leaf.copies(mesh)


def test_random_keys_count_their_words():
    """States with dropout hold typed keys; their bytes are those of jax.random.key_data."""
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=name)
        leaf = leaves({"key": key}, entries=[("key", ())])["key"]
        assert leaf.bytes_per_device({}) == jax.random.key_data(key).nbytes
        assert not leaf.floating


# ---- ways out that are asked for ---------------------------------------------------------------


def test_pad_stores_more_rows_and_says_so():
    """T1, R1: vocab 65 over model 4."""
    shapes = {**SHAPES, "embed": {"tokens": shaped(65, 32)}}
    leaf = leaves(shapes, pad=("vocab",))["embed"]["tokens"]
    assert (leaf.shape, leaf.stored, leaf.padded) == ((65, 32), (68, 32), True)
    assert leaf.local({"model": 4}) == (17, 32)
    assert leaf.reason == "vocab padded 65 -> 68 for model=4"


def test_replicate_keeps_that_dimension_whole_and_says_so():
    """T2: two kv heads over model 4 are kept on every device; the others are split."""
    entries = [("key", ("embed", "kv_heads")), ("up", ("embed", "mlp"))]
    shapes = {"key": shaped(32, 2), "up": shaped(32, 128)}
    tree = leaves(shapes, entries=entries, axes={"kv_heads": "model"}, replicate=("kv_heads",))
    assert tree["key"].spec == ((), ())
    assert tree["key"].stored == (32, 2)
    assert tree["key"].reason == "kv_heads 2 replicated over model=4 (asked)"
    assert tree["up"].spec == ((), ("model",))


def test_replicate_gives_up_every_axis_of_the_dimension():
    """A half that divides would put the heads on other devices than the rules say."""
    axes = {"kv_heads": ("stage", "model")}
    rules = Rules([("key", ("kv_heads",))], axes=axes, replicate=("kv_heads",))
    assert rules.leaves({"key": shaped(2)}, {"stage": 2, "model": 2})["key"].spec == ((),)


@pytest.mark.parametrize("way", ["pad", "replicate"])
def test_a_way_out_changes_nothing_where_the_size_divides(way):
    assert leaves(**{way: ("vocab",)}) == leaves()


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.core
def test_a_size_that_does_not_divide_is_named_with_the_sizes_that_do():
    """R1, R2: never a silent copy, never a dump of the mesh."""
    message = refusal({**SHAPES, "embed": {"tokens": shaped(65, 32)}})
    for part in ("embed/tokens", "(65, 32)", "'vocab' = 65", "model=4", "64 or 68 would"):
        assert part in message
    assert "pad=('vocab',)" in message
    assert "\n" not in message


def test_a_size_below_the_axis_names_only_the_size_above():
    message = refusal({**SHAPES, "embed": {"tokens": shaped(3, 32)}})
    assert "; 4 would" in message


@pytest.mark.core
def test_a_misspelt_rule_is_reported_from_both_sides():
    """R5: the rule that matched nothing, the nearest path, and the large leaves it left out."""
    entries = [e if e[0] != "blocks/mlp/up" else ("blocks/mpl/up", e[1]) for e in ENTRIES]
    message = refusal(entries=entries)
    assert "rule 'blocks/mpl/up' matches no path (nearest: 'blocks/mlp/up')" in message
    assert "blocks/mlp/up (2, 32, 128) matches no rule (nearest: 'blocks/mpl/up')" in message


def test_a_rule_behind_a_wider_one_is_an_error():
    """R4: two rules compete for the same leaf and one of them can never win."""
    message = refusal({"a": shaped(8)}, entries=[(".*", ("mlp",)), ("a", ("embed",))])
    assert "'a' is never reached" in message
    assert "'.*' stands before it" in message


REFUSED = {
    "wrong rank": (
        {"entries": [(".*", ("embed",))], "shapes": {"a": shaped(4, 8)}},
        ["a (4, 8) has 2 dimensions", "names 1"],
    ),
    "one axis twice": (
        # R4: both dimensions and their axis are named.
        {"axes": {"embed": "model"}},
        ["'embed' -> 'model'", "'mlp' -> 'model'", "blocks/mlp/up"],
    ),
    "unknown axis": ({"axes": {"embed": "dta"}}, ["'embed'", "unknown mesh axis 'dta'", "'data'"]),
    "unknown dimension": (
        {"entries": [(".*", ("embd",))], "shapes": {"a": shaped(8)}},
        ["'embd' is not in axes", "nearest: 'embed'"],
    ),
    "unknown in pad": ({"pad": ("vocabulary",)}, ["pad", "'vocabulary'", "nearest: 'vocab'"]),
    "unknown in replicate": ({"replicate": ("mpl",)}, ["replicate", "'mpl'", "nearest: 'mlp'"]),
    "padded and replicated": ({"pad": ("mlp",), "replicate": ("mlp",)}, ["mlp", "choose one"]),
    "one pattern twice": (
        {"entries": [*ENTRIES, ("blocks/mlp/up", ("layers", "mlp", "embed"))]},
        ["two rules", "'blocks/mlp/up'", "('layers', 'mlp', 'embed')"],
    ),
    "unknown role": ({"entries": [("a", ("mlp",), "matrx")]}, ["'matrx'", "matrix"]),
    "bad pattern": ({"entries": [("a(", ("mlp",))]}, ["'a('", "not a regular expression"]),
    "unknown axis of the mesh": ({"mesh": {"modl": 2}}, ["'modl'", "'model'"]),
    "open size": ({"mesh": {"data": -1}}, ["'data' has size -1", "from 1", "make_mesh"]),
    "no devices": ({"mesh": {"model": 0}}, ["'model' has size 0", "whole numbers from 1"]),
    "part of a device": ({"mesh": {"model": 2.5}}, ["'model' has size 2.5", "whole numbers"]),
    "not an array": (
        {"entries": [(".*", ("mlp",))], "shapes": {"a": shaped(8), "act": jnp.tanh}},
        ["act is a", "not an array", "equinox.partition"],
    ),
    "one path twice": (
        {"entries": [(".*", ("mlp",))], "shapes": {"a/b": shaped(8), "a": {"b": shaped(8)}}},
        ["two leaves have the path a/b"],
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_thing_the_cause_and_the_remedy(case):
    options, parts = REFUSED[case]
    message = refusal(**options)
    for part in parts:
        assert part in message


def test_all_that_is_wrong_comes_in_one_message_of_at_most_ten():
    shapes = {f"w{i}": shaped(7, 32) for i in range(14)}
    message = refusal(shapes, entries=[("w.*", ("vocab", "embed"))])
    assert len(message.splitlines()) == 11
    assert message.splitlines()[-1].strip() == "... and 4 more"
    two = refusal({"a": shaped(7), "b": shaped(9)}, entries=[(".*", ("vocab",))])
    assert "a (7,)" in two
    assert "b (9,)" in two


def test_the_largest_of_many_unmatched_leaves_is_shown_first():
    shapes = {f"small{i}": shaped(4) for i in range(20)} | {
        "zz": shaped(1000, 1000),
        "a": shaped(8),
    }
    message = refusal(shapes, entries=[("a", ("mlp",))])
    assert message.startswith("zz (1000, 1000) matches no rule")


# ---- any pytree --------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(8, rngs=rngs)


class Pair(NamedTuple):
    first: Any
    second: Any


class Bare:
    """A node without key names: JAX numbers its children."""

    def __init__(self, *children: Any):
        self.children = children


jax.tree_util.register_pytree_node(Bare, lambda b: (b.children, None), lambda _, c: Bare(*c))

NNX_PATHS = [
    *(f"layers/{i}/{name}" for i in (0, 1) for name in ("bias", "kernel")),
    "norm/bias",
    "norm/scale",
]


@pytest.mark.core
def test_flax_nnx_paths_do_not_show_the_variable():
    model = Net(nnx.Rngs(0))
    _, state = nnx.split(model, nnx.Param)
    assert paths_of(state) == NNX_PATHS
    assert paths_of(jax.eval_shape(lambda s: s, state)) == NNX_PATHS
    assert paths_of(nnx.to_pure_dict(state)) == NNX_PATHS
    assert paths_of(nnx.eval_shape(lambda: Net(nnx.Rngs(0)))) == NNX_PATHS


class Gain(nnx.Module):
    """Its parameter has the name that a Flax variable gives its own array."""

    def __init__(self, rngs: nnx.Rngs):
        self.value = nnx.Param(jnp.ones((8, 16)))
        self.inner = nnx.Dict(value=nnx.Param(jnp.ones(16)), up=nnx.Linear(8, 16, rngs=rngs))


def test_a_flax_nnx_parameter_may_be_called_value():
    _, state = nnx.split(Gain(nnx.Rngs(0)), nnx.Param)
    names = ["inner/up/bias", "inner/up/kernel", "inner/value", "value"]
    assert paths_of(state) == names
    assert paths_of(nnx.to_pure_dict(state)) == names
    entries = [("value", ("embed", "mlp")), (".*kernel", ("embed", "mlp")), ("inner/.*", ("mlp",))]
    tree = rows(leaves(state, entries=entries))
    assert tree["value"].spec == ((), ("model",))
    assert tree["inner/value"].spec == (("model",),)


def test_a_flax_nnx_state_of_leaves_keeps_its_structure():
    _, state = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    entries = [
        (".*kernel", ("embed", "mlp")),
        ("layers/.*/bias", ("mlp",)),
        ("norm/.*", ("embed",)),
    ]
    tree = leaves(state, entries=entries)
    assert jax.tree.structure(tree) == jax.tree.structure(state)
    assert tree["layers"][1]["kernel"].get_value().spec == ((), ("model",))


def test_flax_linen_paths():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(nn.Dense(4, name="up")(x))

    params = jax.eval_shape(Block().init, jax.random.key(0), jnp.zeros((1, 4)))["params"]
    names = {"LayerNorm_0/bias", "LayerNorm_0/scale", "up/bias", "up/kernel"}
    assert set(paths_of(params)) == names


def test_equinox_paths():
    model = eqx.filter_eval_shape(eqx.nn.MLP, 4, 4, 8, 1, key=jax.random.key(0))
    params = eqx.filter(model, lambda x: hasattr(x, "shape"))
    names = [f"layers/{i}/{name}" for i in (0, 1) for name in ("weight", "bias")]
    assert paths_of(params) == names


def test_haiku_style_names_keep_their_slashes():
    params = {"mlp/~/linear_0": {"w": shaped(4, 8), "b": shaped(8)}}
    assert paths_of(params) == ["mlp/~/linear_0/b", "mlp/~/linear_0/w"]
    entries = [(r"mlp/~/linear_\d+/w", ("embed", "mlp")), (".*/b", ("mlp",), "bias")]
    assert set(rows(leaves(params, entries=entries))) == set(paths_of(params))


def test_lists_tuples_named_tuples_and_bare_nodes():
    tree = Pair([shaped(1), {"x": shaped(2)}], Bare(shaped(3), (shaped(4), None)))
    assert paths_of(tree) == ["first/0", "first/1/x", "second/0", "second/1/0"]


def test_a_single_array_has_the_empty_path():
    assert leaves(shaped(8), entries=[("", ("mlp",))]).spec == (("model",),)


def test_a_mesh_is_a_mapping_or_an_object_with_sizes():
    sizes = dict.fromkeys(AXES, 1) | {"model": 4, "data": 2}
    assert leaves(mesh=types.SimpleNamespace(sizes=sizes)) == leaves()
    assert sizes_of({"model": 4}) == dict.fromkeys(AXES, 1) | {"model": 4}


# ---- for all shapes, meshes and rules ----------------------------------------------------------

DIMS = ("a", "b", "c")


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, ...]:
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 24)) for _ in range(rank))
    sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in AXES}
    names = draw(st.permutations(SPLIT))
    cuts = sorted(draw(st.integers(0, 4)) for _ in range(rank))
    axes = {d: tuple(names[low:high]) for d, low, high in zip(DIMS, [0, *cuts], cuts, strict=False)}
    way = draw(st.sampled_from(["pad", "replicate", None]))
    asked = tuple(draw(st.sets(st.sampled_from(DIMS[:rank]))))
    return shape, sizes, axes, {way: asked} if way else {}


@given(problems())
def test_every_part_is_a_whole_fraction_or_the_dimension_is_named(problem):
    """Split where it divides; else padded by less than one row a device, kept, or refused."""
    shape, sizes, axes, options = problem
    dims = DIMS[: len(shape)]
    rules = Rules([("w", dims)], axes=axes, **options)
    counts = {d: math.prod(sizes[a] for a in axes[d]) for d in dims}
    asked = {d for names in options.values() for d in names}
    bad = [d for d, n in zip(dims, shape, strict=True) if n % counts[d]]
    refused = [d for d in bad if d not in asked]
    if refused:
        with pytest.raises(LayoutError) as error:
            rules.leaves({"w": shaped(*shape)}, sizes)
        assert re.findall(r"dimension \d '(\w)'", str(error.value)) == refused
        return
    leaf = rules.leaves({"w": shaped(*shape)}, sizes)["w"]
    assert leaf.shape == shape
    parts = [math.prod(sizes[a] for a in names) for names in leaf.spec]
    assert [n * p for n, p in zip(leaf.local(sizes), parts, strict=True)] == list(leaf.stored)
    for dim, true, stored, part in zip(dims, shape, leaf.stored, parts, strict=True):
        kept = dim in bad and "replicate" in options
        assert part == (1 if kept else counts[dim])
        assert 0 <= stored - true < max(part, 1)
        assert (stored == true) == (dim not in bad or kept)
        assert (dim in bad) == (f"{dim} " in leaf.reason)


@given(problems())
def test_the_parts_and_copies_of_all_devices_make_up_the_array(problem):
    shape, sizes, axes, _ = problem
    dims = DIMS[: len(shape)]
    leaf = Rules([("w", dims)], axes=axes, pad=dims).leaves({"w": shaped(*shape)}, sizes)["w"]
    copies = math.prod(sizes[a] for a in leaf.copies(sizes))
    devices = math.prod(sizes.values())
    assert leaf.bytes_per_device(sizes) * devices == math.prod(leaf.stored) * 4 * copies
