"""Forms of a checkpoint: stacked, a leaf a layer, weights alone, safetensors; bitwise there and back."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from test_checkpoint import flip_a_value, tree
from test_checkpoint_restore import as_asked, assert_bitwise, on_host, parallel, random_state

from jaxpar import checkpoint
from jaxpar.checkpoint import CheckpointError, Checkpoints, Damaged, forms, report
from jaxpar.checkpoint.restoring import layer_name


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """(folder, host state) of a decoder of three layers with masters, saved on 4x2."""
    folder = tmp_path_factory.mktemp("narrow")
    par = parallel("4x2", 1, "bf16_params", "adamw")
    host = random_state(par)
    checkpoint.save(folder, 5, par.unpad(par.pad(host)), {"data": {"position": 5}}, metric=1.5)
    return folder, host


def stored(folder) -> dict:
    return report.opened(folder, None).meta["fingerprints"]


@pytest.mark.core
def test_a_leaf_a_layer_and_back(narrow, tmp_path) -> None:
    """Case C15: moments and masters are taken apart like their parameters, and come back bitwise."""
    folder, host = narrow
    layers = forms.convert(folder / "5", tmp_path / "layers", "layers")
    assert layers == tmp_path / "layers" / "5"
    names = stored(tmp_path / "layers")
    for prefix in ("params", "masters", "opt_state/0/mu", "opt_state/0/nu"):
        for i in range(3):
            assert f"{prefix}/blocks/{i}/mlp/up" in names
        assert f"{prefix}/blocks/mlp/up" not in names
    opened = report.opened(tmp_path / "layers", 5)
    one = report.forms.read(
        opened.path,
        checkpoint.restoring.Source(
            ("masters/blocks/1/mlp/up",),
            checkpoint.arrays.metadata(opened.path)["masters/blocks/1/mlp/up"],
        ),
        opened.meta["fingerprints"],
    )
    np.testing.assert_array_equal(one, host.masters["blocks"]["mlp"]["up"][1])
    forms.convert(layers, tmp_path / "back", "stacked")
    assert stored(tmp_path / "back") == stored(folder)
    meta = report.opened(tmp_path / "back", None).meta
    assert (meta["data"], meta["metric"], meta["step"]) == ({"position": 5}, 1.5, 5)


def test_restore_reads_a_leaf_a_layer(narrow, tmp_path) -> None:
    folder, host = narrow
    forms.convert(folder / "5", tmp_path, "layers")
    par = parallel("2x4", 3, "bf16_params", "adamw")
    state = Checkpoints(tmp_path).restore(par).state
    as_asked(par, state)
    assert_bitwise(on_host(par, state), host)


def test_weights_alone(narrow, tmp_path) -> None:
    folder, host = narrow
    forms.convert(folder / "5", tmp_path, "weights")
    assert {n.split("/")[0] for n in stored(tmp_path)} == {"params", "masters"}
    par = parallel("4x2", 1, "bf16_params")
    store = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="weights only: a new run can start from them"):
        store.restore(par)
    got = on_host(par, store.restore(par, weights_only=True).state)
    assert_bitwise(got.masters, host.masters)
    assert_bitwise(got.params, host.params)


def test_weights_of_another_dtype_come_from_the_masters(narrow, tmp_path) -> None:
    folder, host = narrow
    forms.convert(folder / "5", tmp_path, "weights", "float32")
    assert {n.split("/")[0] for n in stored(tmp_path)} == {"params"}
    par = parallel("1x1")
    got = on_host(par, Checkpoints(tmp_path).restore(par, weights_only=True).state)
    assert_bitwise(got.params, host.masters)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_safetensors(dtype, narrow, tmp_path) -> None:
    """The oracle is the package that reads the file."""
    folder, host = narrow
    file = forms.convert(folder / "5", tmp_path / "out" / "w.safetensors", "safetensors", dtype)
    assert [p.name for p in file.parent.iterdir()] == ["w.safetensors"]
    tensors = safetensors.numpy.load_file(file)
    kind = np.float32 if dtype is None else ml_dtypes.bfloat16
    blocks = host.masters["blocks"]["mlp"]["down"]
    for i in range(3):
        x = tensors[f"blocks.{i}.mlp.down"]
        assert x.dtype == kind
        np.testing.assert_array_equal(x, blocks[i].astype(kind))
    np.testing.assert_array_equal(
        tensors["embed.tokens"], host.masters["embed"]["tokens"].astype(kind)
    )
    assert len(tensors) == 3 * len(jax.tree.leaves(host.masters["blocks"])) + 1
    with pytest.raises(CheckpointError, match="is there already"):
        forms.convert(folder / "5", file, "safetensors")


def test_what_is_refused(narrow, tmp_path) -> None:
    path = narrow[0] / "5"
    for form, dtype, message in [
        ("layer", None, "'layer' is not one of stacked, layers, weights, safetensors"),
        ("layers", "bfloat16", "would part parameters from their moments"),
        ("weights", "bf17", "--dtype bf17 is no element type"),
        ("weights", "int8", "weights are floating point"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            forms.convert(path, tmp_path / "out", form, dtype)
    with pytest.raises(CheckpointError, match=r"the file's name ends in \.safetensors"):
        forms.convert(path, tmp_path / "out.bin", "safetensors")
    forms.convert(path, tmp_path / "out", "layers")
    with pytest.raises(CheckpointError, match="is there already"):
        forms.convert(path, tmp_path / "out", "layers")


def test_a_damaged_source_is_not_converted(tmp_path) -> None:
    path = checkpoint.save(tmp_path, 20, tree(20))
    flip_a_value(path)
    with pytest.raises(Damaged, match="params/w is not what was saved"):
        forms.convert(path, tmp_path / "out", "layers")
    assert not (tmp_path / "out").exists()


def test_a_leaf_that_has_as_many_rows_by_chance_comes_back_too(tmp_path) -> None:
    """Adafactor's means of a stack may drop the layers and keep a dimension of their size."""
    random = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    state = {
        "params": {"blocks": {"w": values(4, 4, 6)}, "head": values(4, 2)},
        "opt_state": {"v_row": {"blocks": {"w": values(4, 6)}}, "v": {"blocks": {"w": values(1)}}},
    }
    checkpoint.save(tmp_path / "a", 1, state)
    forms.convert(tmp_path / "a" / "1", tmp_path / "b", "layers")
    assert set(stored(tmp_path / "b")) >= {"params/head", "opt_state/v/blocks/w"}
    forms.convert(tmp_path / "b" / "1", tmp_path / "c", "stacked")
    assert stored(tmp_path / "c") == stored(tmp_path / "a")


def test_names_of_layers() -> None:
    assert layer_name("params/blocks/mlp/up", 0) == "params/blocks/0/mlp/up"
    assert layer_name("params/subblocks/blocks/w", 7) == "params/subblocks/blocks/7/w"
