"""Fingerprints: equal on every mesh and in numpy, and changed by every change."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar import fingerprint
from jaxpar.plan import hlo

DTYPES = (
    np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int32, np.uint8, np.int16, np.uint32, np.bool_,
    np.complex64,
)  # fmt: skip
WIDE = (np.float64, np.int64, np.complex128)
MESHES = ("1x1", "8x1", "4x2", "2x4")


def bits(shape: tuple[int, ...], dtype: type, seed: int = 0) -> np.ndarray:
    """Random bit patterns: not-a-number with payloads, negative zeros, denormals."""
    random = np.random.default_rng(seed)
    if dtype is np.bool_:
        return random.integers(0, 2, shape).astype(dtype)
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return np.frombuffer(random.bytes(size), dtype).reshape(shape)


def mesh(text: str) -> jaxpar.Mesh:
    return jaxpar.make_mesh(text, devices=jax.devices()[: 1 if text == "1x1" else 8])


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_every_dtype_equals_numpy(dtype) -> None:
    for shape in ((), (1,), (7,), (3, 5, 2), (0, 4)):
        x = bits(shape, dtype)
        assert fingerprint.named({"x": jnp.asarray(x)}) == {"x": fingerprint.on_host(x)}


@pytest.mark.parametrize("dtype", WIDE, ids=lambda d: d.__name__)
def test_elements_of_64_bits_equal_numpy(dtype, x64) -> None:
    x = bits((3, 5), dtype)
    assert fingerprint.named({"x": jnp.asarray(x)}) == {"x": fingerprint.on_host(x)}


def test_every_mesh_and_split_gives_the_same() -> None:
    arrays = {
        "matrix": bits((16, 24), np.float32),
        "stack": bits((3, 8, 16), ml_dtypes.bfloat16),
        "row": bits((65,), np.int32),
        "scalar": bits((), np.int32),
    }
    expected = {name: fingerprint.on_host(x) for name, x in arrays.items()}
    specs = [
        {"matrix": PartitionSpec("data", "model"), "stack": PartitionSpec(None, ("data", "model"))},
        {"matrix": PartitionSpec(None, "data"), "stack": PartitionSpec(None, "model", "data")},
    ]
    for text in MESHES:
        on = mesh(text)
        for spec in specs if text != "1x1" else [{}]:
            known = {a for a in ("data", "model") if on.size(a) > 1}
            placed = {}
            for name, x in arrays.items():
                entries = [
                    tuple(a for a in ((e,) if isinstance(e, str) else e or ()) if a in known)
                    for e in spec.get(name, ())
                ]
                split = NamedSharding(on.jax_mesh, PartitionSpec(*(e or None for e in entries)))
                placed[name] = jax.device_put(x, split)
            assert fingerprint.named(placed) == expected, (text, spec)


@pytest.mark.core
def test_no_device_waits_for_another() -> None:
    """Many programs with collectives under way at once lock up on simulated devices."""
    on = mesh("4x2").jax_mesh
    for spec in (PartitionSpec("data", "model"), PartitionSpec(None, "data"), PartitionSpec()):
        x = jax.device_put(bits((64, 64), np.float32), NamedSharding(on, spec))
        text = fingerprint._of_shards.lower(x, on, spec).compile().as_text()
        assert "xor" in text
        assert hlo.collectives(text, on) == []


def changed(x: np.ndarray, data: st.DataObject) -> np.ndarray:
    """A copy with one bit flipped, two elements or two rows changed over, or the rows rolled."""
    y = x.copy()
    flat = y.reshape(-1)
    kind = data.draw(st.sampled_from(["flip", "swap", "rows", "roll"]))
    if kind == "flip":
        raw = flat.view(np.uint8)
        at = data.draw(st.integers(0, raw.size - 1))
        raw[at] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    elif kind == "swap":
        i, j = (data.draw(st.integers(0, flat.size - 1)) for _ in range(2))
        flat[[i, j]] = flat[[j, i]]
    elif kind == "rows":
        y[:] = y[data.draw(st.permutations(range(len(y))))]
    else:
        y[:] = np.roll(y, data.draw(st.integers(1, len(y) - 1)), axis=0)
    return y


@pytest.mark.core
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.sampled_from([np.float32, ml_dtypes.bfloat16, np.uint8, np.float64]),
    st.integers(0, 1000),
    st.data(),
)
def test_any_bit_any_swap_any_order_changes_it(dtype, seed, data) -> None:
    x = bits((6, 7), dtype, seed)
    y = changed(x, data)
    same = x.tobytes() == y.tobytes()
    assert (fingerprint.on_host(x) == fingerprint.on_host(y)) == same


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(st.integers(0, 1000), st.data())
def test_the_device_sees_the_same_changes(seed, data) -> None:
    x = bits((6, 7), np.float32, seed)
    y = changed(x, data)
    prints = fingerprint.named({"x": jnp.asarray(x), "y": jnp.asarray(y)})
    assert (prints["x"] == prints["y"]) == (x.tobytes() == y.tobytes())


def test_zeros_of_two_lengths_differ() -> None:
    """A truncated array of zeros has another fingerprint: places count, not only values."""
    assert fingerprint.on_host(np.zeros(8)) != fingerprint.on_host(np.zeros(9))


@pytest.mark.core
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, (1 << 31) - 1), min_size=1, max_size=4).filter(
        lambda s: (1 << 32) < int(np.prod(s, dtype=object)) < (1 << 63)
    ),
    st.data(),
)
def test_the_index_of_an_array_of_more_than_32_bits_is_exact(shape, data) -> None:
    """Too large to make: the coordinates of a few elements, against Python's integers."""
    columns = [data.draw(st.lists(st.integers(0, n - 1), min_size=3, max_size=3)) for n in shape]
    low, high = fingerprint._index(shape, lambda d: np.array(columns[d], np.uint32))
    for k, place in enumerate(zip(*columns, strict=True)):
        index = 0
        for n, i in zip(shape, place, strict=True):
            index = index * n + i
        assert (int(high[k]) << 32) + int(low[k]) == index


def test_chunks_of_numpy_do_not_show() -> None:
    x = bits((3, (1 << 18) + 11), np.uint8)
    assert fingerprint.named({"x": jnp.asarray(x)}) == {"x": fingerprint.on_host(x)}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(4, ml_dtypes.int4), "not whole bytes"),
        (np.array([object()]), "not whole bytes"),
    ],
    ids=["int4", "object"],
)
def test_what_has_no_bytes_is_refused(x, message) -> None:
    with pytest.raises(TypeError, match=message):
        fingerprint.on_host(x)


def test_a_random_key_is_refused_and_its_data_are_not() -> None:
    key = jax.random.key(3)
    with pytest.raises(TypeError, match="key_data"):
        fingerprint.of([key])
    data = jax.random.key_data(key)
    assert fingerprint.named({"k": data})["k"] == fingerprint.on_host(np.asarray(data))
