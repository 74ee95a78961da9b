"""Meshes: which device stands where, what a logical axis becomes, and what cannot be a mesh."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxpar.axes import AXES, MeshError, parse_mesh
from jaxpar.mesh import Mesh, make_mesh


def ids(mesh: Mesh) -> np.ndarray:
    return np.vectorize(lambda d: d.id)(mesh.jax_mesh.devices)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(MeshError) as caught:
        make_mesh(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- order --------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("text", ["4x2", "2x4", "8x1", "1x8", "2x2x2", "replica=2,data=2,model=2"])
def test_devices_stand_in_row_major_order_of_the_placement(text):
    """M1: axis names, order and devices say the same; axes of size 1 are left out."""
    mesh = make_mesh(text)
    sizes = parse_mesh(text, 8)
    names = tuple(a for a in AXES if sizes[a] > 1)
    assert dict(mesh.sizes) == sizes
    assert mesh.jax_mesh.axis_names == names
    assert np.array_equal(ids(mesh), np.arange(8).reshape([sizes[a] for a in names]))
    assert mesh.devices == 8


def test_the_order_of_names_and_of_devices_given_means_nothing():
    """M2: the same devices always make the same mesh, so that their arrays mix."""
    wanted = make_mesh("4x2").jax_mesh
    assert make_mesh("model=2,data=4").jax_mesh == wanted
    assert make_mesh({"model": 2, "data": 4}).jax_mesh == wanted
    assert make_mesh("4x2", devices=jax.devices()[::-1]).jax_mesh == wanted


def test_every_visible_device_is_data_by_default():
    assert make_mesh().jax_mesh == make_mesh("8").jax_mesh
    assert make_mesh("-1x2").jax_mesh == make_mesh("4x2").jax_mesh


@pytest.mark.parametrize("spec", ["1", "1x1", {}, {"model": 1}])
def test_one_device_is_a_mesh(spec):
    """R8."""
    mesh = make_mesh(spec, devices=jax.devices()[3:4])
    assert mesh.devices == 1
    assert [d.id for d in mesh.jax_mesh.devices.flat] == [3]
    assert mesh.spec((("data",), ("model",))) == PartitionSpec()
    assert str(mesh).startswith("mesh one device on 1 x cpu")


@pytest.mark.core
def test_no_global_mesh_is_left_and_every_axis_is_auto():
    """M6."""
    before = jax.sharding.get_abstract_mesh()
    mesh = make_mesh("4x2")
    assert jax.sharding.get_abstract_mesh() == before
    assert before.empty
    assert set(mesh.jax_mesh.axis_types) == {AxisType.Auto}


# ---- what a split becomes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        ((), PartitionSpec()),
        (((), ()), PartitionSpec()),
        ((("model",), ()), PartitionSpec("model")),
        (((), ("model",)), PartitionSpec(None, "model")),
        ((("data", "model"),), PartitionSpec(("data", "model"))),
        ((("model", "data"),), PartitionSpec(("model", "data"))),
        # R6: an axis of size 1 splits nothing, and the others stay.
        ((("stage", "data"), ("context",), ("model",)), PartitionSpec("data", None, "model")),
    ],
)
def test_logical_names_become_a_partition_spec(dims, wanted):
    assert make_mesh("4x2").spec(dims) == wanted


def test_size_is_the_product_of_the_axes_named():
    mesh = make_mesh("replica=2,data=2,model=2")
    assert (mesh.size(), mesh.size("data"), mesh.size("replica", "model")) == (1, 2, 4)
    assert mesh.size("stage", "model") == 2


@pytest.mark.core
@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.spec((("dta",), ("model",))),
        lambda m: m.sharding((("dta",),)),
        lambda m: m.size("dta"),
        lambda m: m.physical("data", "dta"),
    ],
)
def test_an_unknown_axis_is_an_error_with_the_nearest(use):
    """R6: never a dropped constraint."""
    with pytest.raises(MeshError, match="unknown mesh axis 'dta'; did you mean data"):
        use(make_mesh("4x2"))


@pytest.mark.core
@pytest.mark.parametrize("text", ["8x1", "4x2", "2x2x2", "replica=2,data=2,model=2"])
def test_rows_of_a_batch_are_split_over_replica_and_data(text):
    mesh = make_mesh(text)
    rows = mesh.size("replica", "data")
    for leading in (0, 1):
        shape = (*(3,) * leading, 16, 5)
        sharding = jax.NamedSharding(mesh.jax_mesh, mesh.batch_spec(leading))
        assert sharding.shard_shape(shape) == (*(3,) * leading, 16 // rows, 5)


def test_a_batch_is_whole_where_no_axis_splits_it():
    assert make_mesh("1x8").batch_spec() == PartitionSpec(None)
    assert make_mesh("1x8").batch_spec(1) == PartitionSpec(None, None)


@given(
    st.sampled_from(["8", "4x2", "2x4", "1x8", "2x2x2", "replica=2,context=2,model=2"]), st.data()
)
def test_the_parts_of_an_array_are_what_its_split_says(text, data):
    """Shape of a part, and every element on as many devices as the axes left out."""
    mesh = make_mesh(text)
    names = data.draw(st.permutations(AXES))
    low, high = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    dims = (tuple(names[:low]), tuple(names[low:high]))
    array = jax.device_put(jnp.arange(128).reshape(8, 16), mesh.sharding(dims))
    wanted = (8 // mesh.size(*dims[0]), 16 // mesh.size(*dims[1]))
    assert {part.data.shape for part in array.addressable_shards} == {wanted}
    seen = np.bincount(np.concatenate([np.ravel(p.data) for p in array.addressable_shards]))
    assert set(seen) == {8 // mesh.size(*dims[0], *dims[1])}


# ---- refusals -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "product": ("4x3", {}, ["mesh 4x3 needs 12 devices and 8 are visible", "4x2"]),
    "few": ("2x2", {}, ["mesh 2x2 needs 4 devices and 8 are visible", "2x4"]),
    "two open": ("-1x-1", {}, ["data and model open; only one size may be -1"]),
    "open": ("-1x3", {}, ["3 does not divide the 8 devices", "4x2"]),
    "name": ({"modl": 8}, {}, ["unknown axis 'modl'; did you mean model?"]),
    "size": ({"data": 0}, {}, ["data is '0'; sizes are whole numbers from 1"]),
    "fraction": ({"data": 8.0}, {}, ["data is '8.0'; sizes are whole numbers from 1"]),
    "nothing": ({}, {}, ["needs 1 devices and 8 are visible"]),
    "no devices": ("1", {"devices": []}, ["a mesh needs at least one"]),
    "both": ("1", {"devices": [], "topology": "v5p:2x2x2"}, ["devices or a topology, not both"]),
    "chip": ("8", {"topology": "v5q:2x2x2"}, ["'v5q' is not one of", "did you mean v5p?"]),
    "no sizes": ("8", {"topology": "v5p"}, ["topology 'v5p' has no sizes", "v5p:4x4x4"]),
    "no GPUs": ("8", {"topology": "h100:8x0"}, ["'h100:8x0' has no sizes", "h100:1x8x8"]),
    "no number": ("8", {"topology": "v4:2xtwo"}, ["'v4:2xtwo' has no sizes", "v4:4x4x4"]),
}


@pytest.mark.core
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_would_work(case):
    """M3."""
    spec, options, parts = REFUSED[case]
    message = refusal(spec, **options)
    for part in parts:
        assert part in message


def test_every_mesh_that_a_refusal_offers_can_be_made():
    offered = re.findall(r"\d+x\d+", refusal("4x3").partition(";")[2])
    assert {"4x2", "2x4", "8x1"} <= set(offered)
    for text in offered:
        assert make_mesh(text).devices == 8


def test_a_device_given_twice_is_refused():
    """It would hold two parts of every array, and the sums over it would count it twice."""
    one, two = jax.devices()[:2]
    assert "is given twice" in refusal("3", devices=[one, two, one])


# ---- networks -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device that is not here, as far as a mesh looks at it."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "H100"


@dataclasses.dataclass(frozen=True)
class Tpu(Chip):
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    coords: tuple[int, int, int] = (0, 0, 0)
    slice_index: int = 0
    core_on_chip: int = 0


def hosts(processes: int, each: int) -> list[Chip]:
    """Devices of several hosts, numbered so that neighbours in number are on different hosts."""
    return [Chip(id=i, process_index=i % processes) for i in range(processes * each)]


def torus(*shape: int, slices: int = 1) -> list[Tpu]:
    places = itertools.product(range(slices), *map(range, (*shape, 1, 1)[:3]))
    return [Tpu(id=i, slice_index=s, coords=tuple(at)) for i, (s, *at) in enumerate(places)]


def lines(mesh: Mesh, *names: str) -> list[list[Any]]:
    """The groups of devices that differ only along the axes named."""
    own = mesh.physical(*names)
    all_names = mesh.jax_mesh.axis_names
    order = [n for n in all_names if n not in own] + list(own)
    array = mesh.jax_mesh.devices.transpose([all_names.index(n) for n in order])
    return [list(row) for row in array.reshape(-1, mesh.size(*names))]


@pytest.mark.core
@pytest.mark.parametrize(("processes", "each", "model"), [(2, 4, 4), (2, 4, 2), (4, 8, 8)])
def test_a_model_axis_stays_inside_a_process(processes, each, model):
    """M5: though sorting by number alone would take it across."""
    devices = hosts(processes, each)
    mesh = make_mesh(f"-1x{model}", devices=devices)
    assert all(len({d.process_index for d in row}) == 1 for row in lines(mesh, "model"))


def test_the_processes_of_every_row_are_printed():
    """M5."""
    shown = str(make_mesh("2x4", devices=hosts(2, 4)))
    assert shown.splitlines() == [
        "mesh data=2 x model=4 on 8 x H100 (gpu)",
        "  row 0: processes [0]",
        "  row 1: processes [1]",
    ]
    crossed = str(make_mesh("1x8", devices=hosts(2, 4)))
    assert "  row 0: processes [0, 1]" in crossed
    many = str(make_mesh("20x2", devices=hosts(10, 4))).splitlines()
    assert many[-1] == "  ... 12 more rows"


def test_axes_take_whole_dimensions_of_a_torus():
    """Three rings of 4 and not one of 64: the compiler makes real reduce-scatters of them."""
    mesh = make_mesh("64", devices=torus(4, 4, 4))
    assert mesh.axes["data"] == ("data_0", "data_1", "data_2")
    assert mesh.spec((("data",),)) == PartitionSpec(("data_0", "data_1", "data_2"))
    assert "data = 4x4x4 torus sub-axes" in str(mesh)
    mesh = make_mesh("16x4", devices=torus(4, 4, 4))
    assert mesh.axes["model"] == ("model",)
    for row in lines(mesh, "model"):  # a ring: only the innermost coordinate moves
        assert len({d.coords[:2] for d in row}) == 1


@pytest.mark.parametrize(
    "text",
    ["replica=2,data=8,model=8", "replica=4,data=2,model=16", "16x8", "32x4", "64x2", "8x16"],
)
def test_a_model_axis_that_fits_into_a_slice_stays_inside_it(text):
    """Slices are joined by the slowest network; 2 x 4 x 4 x 4 has an 8 that lies across it."""
    mesh = make_mesh(text, devices=torus(4, 4, 4, slices=2))
    assert all(len({d.slice_index for d in row}) == 1 for row in lines(mesh, "model"))


def test_devices_that_are_no_box_are_taken_in_the_order_of_their_places():
    devices = [d for d in torus(2, 2, 2) if d.coords != (1, 1, 1)][::-1]
    mesh = make_mesh("7", devices=devices)
    assert mesh.axes["data"] == ("data",)
    assert ids(mesh).tolist() == list(range(7))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Tpu], dict[str, int]]:
    """A torus of up to four slices, and a mesh of all its devices."""
    shape = [draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(3)]
    slices = draw(st.sampled_from([1, 2, 4]))
    left, sizes = math.prod(shape) * slices, {}
    for name in draw(st.permutations(AXES))[:-1]:
        sizes[name] = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        left //= sizes[name]
    last = next(a for a in AXES if a not in sizes)
    return torus(*shape, slices=slices), {**sizes, last: left}


@given(networks())
def test_any_mesh_of_a_torus_holds_every_device_once(network):
    devices, sizes = network
    mesh = make_mesh(sizes, devices=devices)
    assert sorted(d.id for d in mesh.jax_mesh.devices.flat) == list(range(len(devices)))
    shape = mesh.jax_mesh.shape
    for name in AXES:
        assert math.prod(shape[p] for p in mesh.axes[name]) == sizes[name] == mesh.size(name)
    assert mesh.physical(*AXES) == (mesh.jax_mesh.axis_names if len(devices) > 1 else ())


@given(networks())
def test_the_fastest_axis_leaves_a_slice_only_where_it_must(network):
    devices, sizes = network
    mesh = make_mesh(sizes, devices=devices)
    name = next((a for a in reversed(AXES) if sizes[a] > 1), None)
    slices = len({d.slice_index for d in devices})
    if name is not None and (len(devices) // slices) % sizes[name] == 0:
        assert all(len({d.slice_index for d in row}) == 1 for row in lines(mesh, name))
