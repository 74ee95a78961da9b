"""Checkpoints: from any mesh to any other bitwise, strict, never written over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import checkpoint


def params() -> dict:
    random = np.random.default_rng(0)
    return {
        "embed": {"tokens": random.normal(size=(65, 16)).astype(np.float32)},
        "blocks": {"up": random.normal(size=(2, 16, 32)).astype(ml_dtypes.bfloat16)},
    }


def state() -> dict:
    """Parameters, a chain with named tuples, masks and holes, and scalars."""
    optimizer = optax.chain(
        optax.clip(1.0),
        optax.adamw(1e-3, mask={"embed": False, "blocks": True}),
    )
    tree = params()
    moments = optimizer.init(jax.tree.map(jnp.asarray, tree))
    return {"step": jnp.int32(7), "params": tree, "opt_state": moments, "masters": None}


def devices(shape: tuple[int, ...], *names: str) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def abstract(tree, mesh=None, axis=None):
    """Shapes of a tree; matrices with an even first dimension split over `axis`."""

    def one(x):
        even = x.ndim > 1 and x.shape[0] % 2 == 0
        sharding = NamedSharding(mesh, PartitionSpec(axis) if even else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    mesh = mesh or devices((1,), "data")
    return jax.tree.map(one, tree)


def assert_same(one, other) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other
    )
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.map(lambda a: a.dtype, one) == jax.tree.map(lambda a: a.dtype, other)


def test_round_trip_onto_another_mesh_is_bitwise(tmp_path) -> None:
    tree = state()
    eight = devices((2, 4), "data", "model")
    target = abstract(tree, eight, "data")
    placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)
    checkpoint.save(tmp_path, 7, placed, {"seed": 3})
    two = devices((2,), "model")
    for wanted in (abstract(tree), abstract(tree, two, "model"), target):
        restored, meta = checkpoint.restore(tmp_path, wanted)
        assert_same(restored, tree)
        assert meta == {"seed": 3}
        assert jax.tree.map(lambda a: a.sharding, restored) == jax.tree.map(
            lambda a: a.sharding, wanted
        )


def test_differences_are_listed_by_path(tmp_path) -> None:
    tree = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32), "c": np.zeros(1)}
    checkpoint.save(tmp_path, 0, {"params": tree})
    other = {"a": np.zeros((2, 4), np.float32), "b": np.zeros(4, np.int32), "d": np.zeros(1)}
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.restore(tmp_path, abstract({"params": other}))
    text = str(error.value)
    assert "params/a: float32[2, 3] in the checkpoint, float32[2, 4] here" in text
    assert "params/b: float32[4] in the checkpoint, int32[4] here" in text
    assert "params/c: only in the checkpoint" in text
    assert "params/d: not in the checkpoint" in text


def test_many_differences_are_counted(tmp_path) -> None:
    checkpoint.save(tmp_path, 0, {str(i): np.zeros(1, np.float32) for i in range(9)})
    with pytest.raises(checkpoint.CheckpointError, match="and 4 more"):
        checkpoint.restore(tmp_path, abstract({str(i): np.zeros(2, np.float32) for i in range(9)}))


def test_an_existing_step_is_never_written_over(tmp_path) -> None:
    """Case C5: Orbax's manager would return False and say nothing."""
    checkpoint.save(tmp_path, 3, {"a": np.zeros(2)})
    with pytest.raises(checkpoint.CheckpointError, match="3 is there already"):
        checkpoint.save(tmp_path, 3, {"a": np.ones(2)})


def test_only_complete_checkpoints_count(tmp_path) -> None:
    """Case C6: an empty folder with the name of a step is not a checkpoint."""
    tree = {"a": np.arange(4, dtype=np.float32)}
    for step in (2, 10, 4):
        checkpoint.save(tmp_path, step, tree)
    (tmp_path / "90").mkdir()
    (tmp_path / "91.orbax-checkpoint-tmp").mkdir()
    assert checkpoint.steps(tmp_path) == [2, 4, 10]
    restored, _ = checkpoint.restore(tmp_path, abstract(tree))
    assert_same(restored, jax.tree.map(np.asarray, tree))
    with pytest.raises(checkpoint.CheckpointError, match=r"step 90 .*\[2, 4, 10\]"):
        checkpoint.restore(tmp_path, abstract(tree), step=90)


def test_nothing_to_restore_says_so(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(checkpoint.CheckpointError, match="no complete checkpoint under"):
            checkpoint.restore(folder, {})


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(checkpoint.CheckpointError, match="cannot write"):
        checkpoint.save(tmp_path / "file", 0, {"a": np.zeros(2)})


class Padded:
    """A vocabulary of 65 stored as 68 rows over model=4, as `jaxpar.parallelize` does it."""

    def __init__(self, ways: int):
        self.rows = -(-65 // ways) * ways
        self.split = NamedSharding(devices((ways,), "model"), PartitionSpec("model"))
        stored = jax.ShapeDtypeStruct((self.rows, 16), np.float32, sharding=self.split)
        even = jax.ShapeDtypeStruct((8, 2), np.float32, sharding=self.split)
        self.abstract_state = {"table": stored, "even": even}

    def unpad(self, tree):
        return {**tree, "table": tree["table"][:65]}

    def pad(self, tree):
        table = jnp.pad(tree["table"], ((0, self.rows - 65), (0, 0)))
        return jax.device_put({**tree, "table": table}, self.split)


def test_a_padded_vocabulary_is_stored_in_its_true_size(tmp_path) -> None:
    """Case T1: written with 68 rows over 4 devices, read with 72 over 8."""
    four, eight = Padded(4), Padded(8)
    table = np.random.default_rng(0).normal(size=(65, 16)).astype(np.float32)
    even = np.arange(16, dtype=np.float32).reshape(8, 2)
    stored = four.pad({"table": jnp.asarray(table), "even": jnp.asarray(even)})
    checkpoint.save(tmp_path, 1, four.unpad(stored))
    wanted = checkpoint.true_state(eight)
    assert wanted["table"].shape == (65, 16)
    assert wanted["even"].sharding.spec == PartitionSpec("model", None)
    restored, _ = checkpoint.restore(tmp_path, wanted)
    assert_same(restored, {"table": table, "even": even})
    back = eight.pad(restored)
    assert back["table"].shape == (72, 16)
    assert back["table"].sharding == eight.split
