"""Mesh texts: what each form means, what is inferred, and that a refusal says what would fit."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.axes import AXES, MeshError, format_mesh, parse_mesh

pytestmark = pytest.mark.core

sizes_of_axes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 12), min_size=1)


def named(sizes: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


@given(sizes=sizes_of_axes, data=st.data())
def test_named_sizes_mean_the_same_in_any_order(sizes, data) -> None:
    order = data.draw(st.permutations(list(sizes)))
    text = named({name: sizes[name] for name in order})
    assert parse_mesh(text, math.prod(sizes.values())) == {a: sizes.get(a, 1) for a in AXES}


@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=3))
def test_numbers_are_data_model_stage(sizes) -> None:
    text = "x".join(map(str, sizes))
    by_name = dict(zip(("data", "model", "stage"), sizes, strict=False))
    assert parse_mesh(text, None) == parse_mesh(named(by_name), None)


def test_every_axis_is_there_in_placement_order() -> None:
    assert tuple(parse_mesh("8", 8)) == AXES
    assert AXES == ("replica", "stage", "data", "expert", "context", "model")


def test_spaces_around_names_and_sizes_mean_nothing() -> None:
    assert parse_mesh(" data = 4 , model = 2 ", 8) == parse_mesh("4x2", 8)


@given(sizes=sizes_of_axes)
def test_formatted_sizes_parse_back(sizes) -> None:
    full = dict.fromkeys(AXES, 1) | sizes
    assert parse_mesh(format_mesh(full), None) == full


@given(sizes=sizes_of_axes, rest=st.integers(1, 12), data=st.data())
def test_one_size_is_inferred_from_the_devices(sizes, rest, data) -> None:
    free = data.draw(st.sampled_from(AXES))
    others = {name: size for name, size in sizes.items() if name != free}
    devices = math.prod(others.values()) * rest
    assert parse_mesh(named({**others, free: -1}), devices)[free] == rest


@given(split=st.integers(2, 64), devices=st.integers(1, 512))
def test_a_size_is_inferred_only_where_the_others_divide(split, devices) -> None:
    if devices % split == 0:
        assert parse_mesh(f"-1x{split}", devices)["data"] == devices // split
    else:
        with pytest.raises(MeshError, match=f"{split} does not divide the {devices} devices?"):
            parse_mesh(f"-1x{split}", devices)


@given(asked=st.tuples(st.integers(1, 64), st.integers(1, 64)), devices=st.integers(1, 512))
def test_a_refused_product_names_both_counts_and_meshes_that_fit(asked, devices) -> None:
    need = math.prod(asked)
    text = f"{asked[0]}x{asked[1]}"
    if need == devices:
        assert math.prod(parse_mesh(text, devices).values()) == devices
        return
    with pytest.raises(MeshError) as caught:
        parse_mesh(text, devices)
    asked_for, _, remedy = str(caught.value).partition(";")
    assert asked_for.startswith(f"mesh {text} needs {need} devices and {devices} ")
    fits = re.findall(r"\d+x\d+", remedy)
    assert fits
    assert len(fits) == len(set(fits))
    for mesh in fits:
        parse_mesh(mesh, devices)


def test_the_message_of_a_mesh_that_does_not_fit() -> None:
    """M3."""
    with pytest.raises(MeshError, match="mesh 4x3 needs 12 devices and 8 are visible; ") as caught:
        parse_mesh("4x3", 8)
    assert {"4x2", "2x4", "8x1"} <= set(re.findall(r"\d+x\d+", str(caught.value).split(";")[1]))


def test_without_a_device_count_any_product_is_a_mesh() -> None:
    assert math.prod(parse_mesh("4x3", None).values()) == 12


REFUSED = {
    "4x2x2x2": "has 4 sizes; the short form has up to three, data x model x stage",
    "-1x-1": "leaves data and model open; only one size may be -1",
    "data=-1,replica=-1": "leaves replica and data open; only one size may be -1",
    "0x8": "data is '0'; sizes are whole numbers from 1",
    "4x-2": "model is '-2'; sizes are whole numbers from 1",
    "data=4,model=0": "model is '0'; sizes are whole numbers from 1",
    "": "data is ''; sizes are whole numbers from 1",
    "x": "data is ''; sizes are whole numbers from 1",
    "4x": "model is ''; sizes are whole numbers from 1",
    "4x2.0": "model is '2.0'; sizes are whole numbers from 1",
    "1_0": "data is '1_0'; sizes are whole numbers from 1",
    "+8": "data is '+8'; sizes are whole numbers from 1",
    "\u0668": "sizes are whole numbers from 1",
    "four": "data is 'four'; sizes are whole numbers from 1",
    "data=": "data is ''; sizes are whole numbers from 1",
    "data=4,modl=2": "unknown axis 'modl'; did you mean model?",
    "dat=8": "unknown axis 'dat'; did you mean data?",
    "zzz=8": "unknown axis 'zzz'; the axes are replica, stage, data, expert, context, model",
    "=8": "unknown axis ''; the axes are",
    "data=4,data=2": "sizes data twice; keep one",
    "data=4,2": "'2' is not name=size",
    "data=8,": "'' is not name=size",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_bad_text_is_refused_by_name(text) -> None:
    with pytest.raises(MeshError, match=re.escape(REFUSED[text])) as caught:
        parse_mesh(text, 8)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["1", "-1", "4x2"])
def test_no_devices_are_refused(text) -> None:
    with pytest.raises(MeshError, match="on 0 devices: a mesh needs at least one"):
        parse_mesh(text, 0)


@given(sizes=sizes_of_axes, free=st.sampled_from(AXES))
def test_an_open_size_may_be_kept_until_the_devices_are_known(sizes, free) -> None:
    text = named({**sizes, free: -1})
    kept = parse_mesh(text, None, keep_open=True)
    assert kept == dict.fromkeys(AXES, 1) | sizes | {free: -1}
    devices = math.prod(size for size in kept.values() if size != -1) * 3
    assert parse_mesh(text, devices, keep_open=True) == kept | {free: 3}


@pytest.mark.parametrize("text", ["-1x-1", "2-1", "-1,2", "4x-2"])
def test_keeping_a_size_open_refuses_what_is_refused_without_in_the_same_words(text) -> None:
    with pytest.raises(MeshError) as open_size:
        parse_mesh(text, None, keep_open=True)
    with pytest.raises(MeshError) as known:
        parse_mesh(text, 8)
    assert str(open_size.value) == str(known.value)
    assert text in str(open_size.value)


def test_a_topology_is_named_as_where_the_devices_are() -> None:
    with pytest.raises(MeshError, match="needs 8 devices and topology v5p:4x4x4 has 64; 16x4"):
        parse_mesh("4x2", 64, topology="v5p:4x4x4")
    with pytest.raises(MeshError, match="3 does not divide the 64 devices of topology v5p:4x4x4;"):
        parse_mesh("-1x3", 64, topology="v5p:4x4x4")


def test_one_device_is_one() -> None:
    with pytest.raises(MeshError, match="2 does not divide the 1 device that is visible; 1x1 fits"):
        parse_mesh("-1x2", 1)


def test_a_number_of_devices_that_nobody_has_is_refused_at_once() -> None:
    with pytest.raises(MeshError, match="and 2147483646 are visible; "):
        parse_mesh("4x2", 2**31 - 2)


def test_nothing_is_inferred_without_a_device_count() -> None:
    with pytest.raises(MeshError, match="leaves data open, and the number of devices is not known"):
        parse_mesh("-1x2", None)


@given(text=st.text(alphabet="0123456789x=-,. datmoelstg", max_size=24), devices=st.integers(1, 64))
def test_any_text_is_a_mesh_of_the_devices_or_a_mesh_error(text, devices) -> None:
    try:
        sizes = parse_mesh(text, devices)
    except MeshError:
        return
    assert math.prod(sizes.values()) == devices
    assert min(sizes.values()) >= 1
