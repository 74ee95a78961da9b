"""ZeRO stages say which leaf is split over the devices that would hold copies of it, and where."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpar.axes import AXES
from jaxpar.layout import Layout
from jaxpar.rules import Leaf, Rules
from jaxpar.zero import SHARDED_OVER, shard, split_from

AXES_OF = {"layers": None, "embed": None, "mlp": "model", "vocab": "model", "expert": "expert"}


def leaf(shape: tuple[int, ...], dims: tuple[str, ...], **sizes: int) -> Leaf:
    """A parameter split by its rules and not yet by ZeRO."""
    given = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Rules([("w", dims)], axes=AXES_OF, pad=dims).leaves({"w": given}, sizes)["w"]


def split(shape: tuple[int, ...], dims: tuple[str, ...], **sizes: int) -> tuple[Any, ...]:
    return shard(leaf(shape, dims, **sizes), sizes).spec


# ---- which dimension ---------------------------------------------------------------------------


def test_the_largest_dimension_that_divides_is_split():
    assert split((32, 96), ("embed", "mlp"), data=8) == ((), ("data",))
    assert split((96, 32), ("embed", "mlp"), data=8) == (("data",), ())
    assert split((100, 32), ("embed", "mlp"), data=8) == ((), ("data",))


def test_the_stack_of_layers_is_never_split():
    """A scan takes one layer at a time: split over data, one device would hold it whole."""
    assert split((64, 8), ("layers", "embed"), data=8) == ((), ("data",))
    whole = shard(leaf((64, 6), ("layers", "embed"), data=8), {"data": 8})
    assert whole.spec == ((), ())
    assert whole.reason == "kept whole: no dimension divides by data=8"


def test_a_dimension_that_the_rules_left_whole_comes_first():
    assert split((32, 512), ("embed", "mlp"), data=4, model=2) == (("data",), ("model",))


def test_else_a_split_dimension_is_split_further():
    assert split((6, 512), ("embed", "mlp"), data=4, model=2) == ((), ("model", "data"))
    # 8 over model 2 leaves 4 a device, which 8 does not divide.
    assert split((6, 8), ("embed", "mlp"), data=8, model=2) == ((), ("model",))


def test_combine_keeps_zero_off_dimensions_that_the_rules_split():
    sizes = {"data": 4, "model": 2}
    one = leaf((6, 512), ("embed", "mlp"), **sizes)
    assert shard(one, sizes, combine=False).spec == one.spec
    two = leaf((8, 512), ("embed", "mlp"), **sizes)
    assert shard(two, sizes, combine=False).spec == (("data",), ("model",))


def test_parts_that_fill_tpu_tiles_come_before_larger_dimensions():
    """A part of 64 of the last dimension is half a tile of 128; 16 rows are two tiles of 8."""
    assert split((2, 1024, 4096), ("layers", "embed", "mlp"), data=64) == ((), ("data",), ())
    assert split((2, 1024, 8192), ("layers", "embed", "mlp"), data=64) == ((), (), ("data",))


# ---- which axes --------------------------------------------------------------------------------


def test_split_over_every_axis_along_which_it_is_a_copy():
    sizes = {"data": 2, "context": 2, "expert": 2, "model": 2}
    assert split((32, 64), ("embed", "mlp"), **sizes) == (("data", "context", "expert"), ("model",))


def test_expert_weights_are_no_copies_along_expert():
    dims = ("expert", "embed", "mlp")
    sizes = {"data": 2, "context": 2, "expert": 2}
    assert split((2, 64, 32), dims, **sizes) == (("expert",), ("data", "context"), ())


@pytest.mark.parametrize("axis", ["replica", "stage", "model"])
def test_other_axes_are_not_zeros(axis):
    """Hybrid sharding: along replica every device keeps its copy."""
    assert split((32, 64), ("embed", "embed"), **{axis: 2}) == ((), ())
    sizes = {axis: 2, "data": 4}
    assert split((30, 64), ("embed", "embed"), **sizes) == ((), ("data",))


def test_the_reason_is_added_to_what_the_rules_said():
    sizes = {"data": 2, "model": 4}
    one = shard(leaf((65, 32), ("vocab", "embed"), **sizes), sizes)
    assert one.reason == "vocab padded 65 -> 68 for model=4; zero: embed over data=2"


def test_nothing_changes_on_one_device():
    one = leaf((32, 64), ("embed", "mlp"))
    assert shard(one, dict.fromkeys(AXES, 1)) == one


@st.composite
def problems(draw: st.DrawFn) -> tuple[Leaf, dict[str, int]]:
    sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in AXES}
    rank = draw(st.integers(0, 3))
    dims = tuple(draw(st.permutations(list(AXES_OF)))[:rank])
    assume(not {"mlp", "vocab"} <= set(dims))  # both lie on model
    shape = tuple(draw(st.sampled_from([1, 2, 6, 8, 24, 96, 256])) for _ in dims)
    return leaf(shape, dims, **sizes), sizes


@pytest.mark.core
@given(problems())
def test_one_dimension_over_all_its_axes_or_whole_with_the_reason(problem):
    before, sizes = problem
    after = shard(before, sizes)
    axes = tuple(a for a in SHARDED_OVER if a in before.copies(sizes))
    count = math.prod(sizes[a] for a in axes)
    changed = [i for i, (a, b) in enumerate(zip(before.spec, after.spec, strict=True)) if a != b]
    can = [
        i
        for i, (d, n) in enumerate(zip(before.dims, before.local(sizes), strict=True))
        if d != "layers" and n % count == 0
    ]
    assert after.stored == before.stored
    if not axes:
        assert after == before
    elif not can:
        assert changed == []
        assert "kept whole" in after.reason
    else:
        (i,) = changed
        assert i in can
        assert after.spec[i] == (*before.spec[i], *axes)
        assert after.bytes_per_device(sizes) * count == before.bytes_per_device(sizes)
        assert not set(SHARDED_OVER) & set(after.copies(sizes))


# ---- what lives where --------------------------------------------------------------------------

SHAPES = {
    "up": jax.ShapeDtypeStruct((5, 24_000, 31_250), jnp.float32),
    "down": jax.ShapeDtypeStruct((5, 31_250, 24_000), jnp.float32),
}
RULES = Rules(
    [("up", ("layers", "embed", "mlp")), ("down", ("layers", "mlp", "embed"))], axes=AXES_OF
)


def sixteen_bytes(zero: int, **sizes: int) -> Layout:
    """7.5 billion parameters: 2 bytes each, 2 of gradient, 4 of master copy, 4 + 4 of moments."""
    return Layout.build(
        SHAPES,
        RULES,
        sizes,
        zero=zero,
        optimizer=optax.adam(1e-3),
        param_dtype="bfloat16",
        grad_dtype="bfloat16",
        master_dtype="float32",
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("zero", "exact", "published"),
    [
        (0, 16 * 7.5e9, 120),
        (1, 4 * 7.5e9 + 12 * 7.5e9 / 64, 31.4),
        (2, 2 * 7.5e9 + 14 * 7.5e9 / 64, 16.6),
        (3, 16 * 7.5e9 / 64, 1.9),
    ],
)
def test_bytes_of_the_paper(zero, exact, published):
    """arXiv:1910.02054, figure 1: 7.5B parameters on 64 devices, GB per device."""
    layout = sixteen_bytes(zero, data=64)
    assert layout.parameters() == 7_500_000_000
    count = layout.bytes_per_device("other")
    assert count == 4  # Adam's step count, whole everywhere
    assert layout.bytes_per_device() - count == exact
    assert round(exact / 1e9, 0 if zero == 0 else 1) == published


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_stage_splits_one_kind_more(zero):
    layout = sixteen_bytes(zero, data=64)
    first = {"master": 1, "moment": 1, "gradient": 2, "parameter": 3}
    for kind, stage in first.items():
        assert split_from(kind) == stage
        specs = {r.spec for r in layout.rows if r.kind == kind}
        assert any(("data",) in spec for spec in specs) == (zero >= stage)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradient_master_and_moments_lie_as_the_parameter_of_stage_three(zero):
    """Else the update would move every one of them over the network first."""
    sizes = {"data": 4, "context": 2, "model": 2, "replica": 2}
    layout = sixteen_bytes(zero, **sizes)
    third = {r.path: r.spec for r in sixteen_bytes(3, **sizes).rows if r.kind == "parameter"}
    for row in layout.rows:
        if row.kind != "other" and zero >= split_from(row.kind):
            assert row.spec == third[row.path.rsplit("/", 1)[-1]]


def test_replica_times_data_saves_what_data_saves():
    """Hybrid sharding: two replicas of 32 hold twice the bytes of 64."""
    hybrid = sixteen_bytes(3, replica=2, data=32).bytes_per_device() - 4
    assert hybrid == 2 * (sixteen_bytes(3, data=64).bytes_per_device() - 4)
    assert hybrid == sixteen_bytes(3, data=32).bytes_per_device() - 4
