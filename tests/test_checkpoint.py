"""A folder of checkpoints: complete or absent, strict, verified, kept and deleted as asked, never written over."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import time

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import checkpoint
from jaxpar.checkpoint import CheckpointError, Checkpoints, Damaged, retained


class Plain:
    """What `restore` asks of a `Parallel`, for a tree that nothing pads."""

    def __init__(self, abstract):
        self.abstract_state = abstract

    def unpad(self, tree):
        return tree

    def pad(self, tree):
        return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), tree, self.abstract_state)


def devices(shape: tuple[int, ...], *names: str) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def plain(tree, mesh=None, axis=None) -> Plain:
    """Matrices with an even first dimension are split over `axis`."""

    def one(x):
        even = x.ndim > 1 and x.shape[0] % 2 == 0
        sharding = NamedSharding(mesh, PartitionSpec(axis) if even else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    mesh = mesh or devices((1,), "data")
    return Plain(jax.tree.map(one, tree))


def state() -> dict:
    """Parameters, a chain with named tuples, masks and holes, and scalars."""
    random = np.random.default_rng(0)
    params = {
        "embed": {"tokens": random.normal(size=(65, 16)).astype(np.float32)},
        "blocks": {"up": random.normal(size=(2, 16, 32)).astype(ml_dtypes.bfloat16)},
    }
    optimizer = optax.chain(
        optax.clip(1.0),
        optax.adamw(1e-3, mask={"embed": False, "blocks": True}),
    )
    moments = optimizer.init(jax.tree.map(jnp.asarray, params))
    return {"step": jnp.int32(7), "params": params, "opt_state": moments, "masters": None}


def tree(step: int) -> dict:
    """Other arrays at each step, each large enough for a place of its own in a file."""
    random = np.random.default_rng(step)
    return {
        "params": {"w": random.normal(size=(64, 128)).astype(np.float32)},
        "opt_state": {"mu": random.normal(size=(64, 128)).astype(np.float32)},
        "step": np.int32(step),
    }


def assert_same(one, other) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other
    )
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.map(lambda a: a.dtype, one) == jax.tree.map(lambda a: a.dtype, other)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path, said):
    store = Checkpoints(tmp_path / "checkpoints", keep=0, say=said.append)
    yield store
    store.close()


def filled(store: Checkpoints, *steps: int) -> Checkpoints:
    for step in steps:
        store.save(step, tree(step), {})
    store.wait()
    return store


# ---- round trips --------------------------------------------------------------------------------


@pytest.mark.core
def test_round_trip_onto_another_mesh_is_bitwise(store) -> None:
    """Case C1: values, structure and shardings as asked, whatever mesh wrote them."""
    whole = state()
    eight = devices((2, 4), "data", "model")
    target = plain(whole, eight, "data")
    placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), whole, target.abstract_state)
    store.save(7, placed, {"seed": 3}, metric=0.5)
    two = devices((2,), "model")
    for par in (plain(whole), plain(whole, two, "model"), target):
        restored = store.restore(par)
        assert_same(restored.state, whole)
        assert (restored.step, restored.notes) == (7, [])
        assert restored.meta["seed"] == 3
        assert jax.tree.map(lambda a: a.sharding, restored.state) == jax.tree.map(
            lambda a: a.sharding, par.abstract_state
        )


def test_what_is_added_to_the_meta(store) -> None:
    filled(store, 4)
    meta = store.restore(plain(tree(4))).meta
    assert meta["step"] == 4
    assert meta["metric"] is None
    assert meta["versions"]["jax"] == jax.__version__
    assert set(meta["versions"]) >= {
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "jaxpar",
        "python",
    }
    assert set(meta["fingerprints"]) == {"params/w", "opt_state/mu", "step"}
    assert meta["saved_at"].endswith("+00:00")


@pytest.mark.parametrize("key", ["fingerprints", "versions", "saved_at", "metric"])
def test_a_key_of_ours_in_the_meta_is_refused(key, store) -> None:
    with pytest.raises(ValueError, match=f"meta '{key}'"):
        store.save(1, tree(1), {key: 1})


def test_meta_of_another_step_or_no_json_is_refused(store) -> None:
    with pytest.raises(ValueError, match="says step 2 in the checkpoint of step 1"):
        store.save(1, tree(1), {"step": 2})
    with pytest.raises(TypeError):
        store.save(1, tree(1), {"data": object()})
    assert store.steps() == []


def test_64_bits_come_back_where_jax_has_none(store) -> None:
    """Written with x64 on, read with it off: verified as float64, then cast as asked."""
    wide = {"params": {"w": np.random.default_rng(0).normal(size=(4, 8))}}
    store.save(1, wide, {})
    narrow = {"params": {"w": wide["params"]["w"].astype(np.float32)}}
    with pytest.raises(
        CheckpointError, match=r"float64\[4, 8\] in the checkpoint, float32\[4, 8\] here"
    ):
        store.restore(plain(narrow))
    restored = store.restore(plain(narrow), allow_cast=True)
    assert_same(restored.state, narrow)
    assert restored.notes == ["1 leaves cast from float64 to float32: params/w"]


# ---- strictness ---------------------------------------------------------------------------------


@pytest.mark.core
def test_differences_are_listed_by_path(store) -> None:
    """Case C2: dtypes are compared, not cast."""
    there = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(4, np.float32),
        "c": np.zeros(1, np.float32),
    }
    store.save(0, {"params": there}, {})
    here = {
        "a": np.zeros((2, 4), np.float32),
        "b": np.zeros(4, np.int32),
        "d": np.zeros(1, np.float32),
    }
    with pytest.raises(CheckpointError) as error:
        store.restore(plain({"params": here}))
    text = str(error.value)
    assert "params/a: float32[2, 3] in the checkpoint, float32[2, 4] here" in text
    assert "params/b: float32[4] in the checkpoint, int32[4] here" in text
    assert "params/c: only in the checkpoint" in text
    assert "params/d: not in the checkpoint" in text
    assert store.steps() == [0]


def test_many_differences_are_counted(store) -> None:
    store.save(0, {str(i): np.zeros(1, np.float32) for i in range(9)}, {})
    with pytest.raises(CheckpointError, match="and 4 more"):
        store.restore(plain({str(i): np.zeros(2, np.float32) for i in range(9)}))


def test_integers_are_never_cast(store) -> None:
    store.save(0, {"params": {"w": np.zeros(3, np.int32)}}, {})
    with pytest.raises(CheckpointError, match=r"int32\[3\] in the checkpoint, float32\[3\] here"):
        store.restore(plain({"params": {"w": np.zeros(3, np.float32)}}), allow_cast=True)


def test_a_checkpoint_that_does_not_fit_is_never_passed_over(store) -> None:
    filled(store, 10)
    store.save(20, {"params": {"w": np.zeros(3, np.float32)}}, {})
    store.wait()
    with pytest.raises(CheckpointError, match="20 does not fit this run") as error:
        store.restore(plain(tree(10)))
    assert not isinstance(error.value, Damaged)
    assert store.steps() == [10, 20]


@pytest.mark.core
def test_an_existing_step_is_never_written_over(store) -> None:
    """Case C5: Orbax's manager would return False and say nothing."""
    filled(store, 3)
    with pytest.raises(CheckpointError, match="3 is there already"):
        store.save(3, tree(4), {})
    assert_same(store.restore(plain(tree(3))).state, tree(3))


def test_an_earlier_step_can_be_saved(store) -> None:
    """Case C5, the other half: after going back, steps come again."""
    filled(store, 30, 10)
    assert store.steps() == [10, 30]


# ---- what counts --------------------------------------------------------------------------------


@pytest.mark.core
def test_only_complete_checkpoints_count(store) -> None:
    """Case C6: an empty folder with the name of a step is not a checkpoint."""
    filled(store, 2, 10, 4)
    (store.folder / "90").mkdir()
    (store.folder / "007").mkdir()
    (store.folder / "91.orbax-checkpoint-tmp").mkdir()
    (store.folder / "5.deleting").mkdir()
    (store.folder / "6.damaged").mkdir()
    assert store.steps() == [2, 4, 10]
    assert checkpoint.steps(store.folder) == [2, 4, 10]
    lines = dict(line.split(": ", 1) for line in store.incomplete())
    assert lines == {
        "90": "an empty folder",
        "007": "an empty folder",
        "91.orbax-checkpoint-tmp": "a save under way, or cut short",
        "5.deleting": "a deletion that was cut short",
        "6.damaged": "set aside as damaged",
    }
    assert store.damaged() == ["6.damaged", "90"]
    restored = store.restore(plain(tree(10)))
    assert restored.step == 10
    assert len(restored.notes) == 1
    assert "checkpoint 90 is damaged" in restored.notes[0]
    assert restored.notes[0].endswith("an empty folder; going back to 10")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 95 .*\[2, 4, 10\]"):
        store.restore(plain(tree(10)), step=95)


def test_a_writer_deletes_what_killed_ones_left(tmp_path) -> None:
    for name in ("8.orbax-checkpoint-tmp", "7.deleting", "6.damaged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    store = filled(Checkpoints(tmp_path), 9)
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["6.damaged", "9"]


def test_an_empty_folder_in_the_way_is_set_aside(store, said) -> None:
    (store.folder / "5").mkdir(parents=True)
    filled(store, 5)
    assert store.steps() == [5]
    assert said == ["checkpoint 5 is set aside as 5.damaged: an empty folder"]


def test_setting_aside_twice_keeps_both(store, said) -> None:
    filled(store, 5)
    store.set_aside(5, "abandoned", "its losses were not finite")
    filled(store, 5)
    store.set_aside(5, "abandoned", "again")
    assert store.steps() == []
    assert sorted(p.name for p in store.folder.iterdir()) == ["5.2.abandoned", "5.abandoned"]
    assert said[0] == "checkpoint 5 is set aside as 5.abandoned: its losses were not finite"


def test_nothing_to_restore_says_so(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="no complete checkpoint under"):
            Checkpoints(folder).restore(plain({}))


# ---- damage -------------------------------------------------------------------------------------


def largest_file(path: pathlib.Path) -> pathlib.Path:
    return max(
        (p for p in (path / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def flip(file: pathlib.Path, at: int, bit: int = 0) -> None:
    raw = bytearray(file.read_bytes())
    raw[at % len(raw)] ^= 1 << bit
    file.write_bytes(raw)


def rewrite(path: pathlib.Path, change) -> None:
    file = path / "meta" / "metadata"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


def flip_a_value(path: pathlib.Path) -> None:
    """One bit of one weight, which no format has a checksum for."""
    raw = tree(20)["params"]["w"].tobytes()
    for file in (p for p in (path / "state").rglob("*") if p.is_file()):
        at = file.read_bytes().find(raw)
        if at >= 0:
            return flip(file, at + 100)
    raise AssertionError("the values of params/w are in no file as they are")


DAMAGE = {
    "truncated": lambda p: os.truncate(largest_file(p), largest_file(p).stat().st_size // 2),
    "emptied": lambda p: os.truncate(largest_file(p), 0),
    "array file gone": lambda p: largest_file(p).unlink(),
    "arrays gone": lambda p: shutil.rmtree(p / "state"),
    "manifest gone": lambda p: [m.unlink() for m in (p / "state").rglob("manifest.ocdbt")],
    "value flipped": flip_a_value,
    "tree metadata garbled": lambda p: (p / "state" / "_METADATA").write_text("{"),
    "meta gone": lambda p: shutil.rmtree(p / "meta"),
    "meta no JSON": lambda p: (p / "meta" / "metadata").write_text('{"step"'),
    "meta of another type": lambda p: (p / "meta" / "metadata").write_text("[]"),
    "meta changed": lambda p: rewrite(p, lambda m: m.update(step=19)),
    "fingerprint changed": lambda p: rewrite(p, lambda m: m["fingerprints"].update(step="0" * 16)),
    "empty folder": lambda p: [shutil.rmtree(p), p.mkdir()],
    "renamed": lambda p: [shutil.rmtree(p), shutil.copytree(p.parent / "10", p)],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(damage, store) -> None:
    """Case C6: said, renamed, not deleted; and by name it is an error."""
    filled(store, 10, 20)
    path = store.folder / "20"
    DAMAGE[damage](path)
    with pytest.raises(CheckpointError):
        store.restore(plain(tree(20)), step=20)
    assert path.is_dir()
    restored = store.restore(plain(tree(20)))
    assert restored.step == 10
    assert_same(restored.state, tree(10))
    assert len(restored.notes) == 1
    assert restored.notes[0].startswith("checkpoint 20 is damaged: ")
    assert restored.notes[0].endswith("; going back to 10")
    assert (store.folder / "20.damaged").is_dir()
    assert store.steps() == [10]
    filled(store, 20)  # the run comes to step 20 again
    assert_same(store.restore(plain(tree(20))).state, tree(20))


def test_all_damaged_is_an_error_that_lists_all(store) -> None:
    filled(store, 10, 20)
    for step in (10, 20):
        flip(store.folder / str(step) / "meta" / "metadata", 40)
    with pytest.raises(CheckpointError) as error:
        store.restore(plain(tree(20)))
    assert "checkpoint 10 is damaged" in str(error.value)
    assert "checkpoint 20 is damaged" in str(error.value)
    assert "20.damaged: set aside as damaged" in str(error.value)


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("one")
    return checkpoint.save(folder, 20, tree(20), {"data": {"position": 20}})


@hypothesis.settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(which=st.integers(0, 1 << 16), at=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_seen_or_changes_nothing(
    one_saved, tmp_path, which, at, bit
) -> None:
    """Silent wrong restores: none, wherever the bit is."""
    copy = tmp_path / f"{which}-{at}-{bit}" / "20"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(one_saved, copy)
    files = sorted(p for p in copy.rglob("*") if p.is_file() and p.stat().st_size)
    flip(files[which % len(files)], at, bit)
    try:
        restored = Checkpoints(copy.parent).restore(plain(tree(20)), step=20)
    except Damaged:
        return
    assert_same(restored.state, tree(20))
    assert restored.meta["data"] == {"position": 20}


# ---- asynchronous -------------------------------------------------------------------------------


@pytest.mark.core
def test_a_state_that_is_donated_at_once_is_written_as_it_was(tmp_path) -> None:
    """On the CPU what Orbax reads is the device's own buffer, which the next step writes over."""
    mesh = devices((8,), "data")
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    make = jax.jit(
        lambda: {"a": jnp.arange(1 << 20, dtype=jnp.float32), "b": jnp.ones((1 << 18,))},
        out_shardings={"a": split, "b": whole},
    )
    step = jax.jit(lambda t: jax.tree.map(lambda x: x * 2 + 1, t), donate_argnums=0)
    state, expected = make(), jax.device_get(make())
    store = Checkpoints(tmp_path)
    for n in range(3):
        store.save(n, state, {})
        for _ in range(5):
            state = step(state)
    store.close()
    for n in range(3):
        restored = store.restore(plain(expected), step=n)
        assert_same(restored.state, expected)
        for _ in range(5):
            expected = jax.device_get(step(jax.device_put(expected)))


def test_numpy_arrays_may_change_at_once(store) -> None:
    x = {"a": np.zeros(1 << 20, np.float32)}
    store.save(1, x, {})
    x["a"][:] = 1
    assert float(jnp.sum(store.restore(plain(x)).state["a"])) == 0.0


def test_save_does_not_wait_for_the_disk(tmp_path, monkeypatch) -> None:
    """The rename that completes a checkpoint is held up; the call returns all the same."""
    from jaxpar.checkpoint import arrays

    make = arrays.Writer.wait

    def slow(self) -> None:
        time.sleep(1.0)
        make(self)

    monkeypatch.setattr(arrays.Writer, "wait", slow)
    store = Checkpoints(tmp_path)
    store.save(1, tree(1), {})
    since = time.perf_counter()
    store.save(2, tree(2), {})  # waits for the first
    assert time.perf_counter() - since > 0.5
    since = time.perf_counter()
    store.check()
    assert time.perf_counter() - since < 0.5
    store.close()
    assert store.steps() == [1, 2]


def test_a_synchronous_save_is_complete_when_it_returns(tmp_path) -> None:
    store = Checkpoints(tmp_path, asynchronous=False)
    store.save(1, tree(1), {})
    assert checkpoint.steps(tmp_path) == [1]
    store.close()


# ---- retention ----------------------------------------------------------------------------------


@pytest.mark.core
@hypothesis.given(
    st.dictionaries(
        st.integers(0, 100),
        st.one_of(st.none(), st.floats(-1, 1), st.just(float("nan"))),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 30),
)
def test_what_stays(metrics, keep, keep_best, keep_every) -> None:
    """Case C4: latest, best and spaced are kept each for itself, and the newest always."""
    steps = sorted(metrics)
    stays = retained(steps, metrics, keep, keep_best, keep_every)
    assert stays <= set(steps)
    assert steps[-1] in stays
    assert set(steps[-keep:]) <= stays
    ranked = sorted(m for m in metrics.values() if m is not None and m == m)
    for step, metric in metrics.items():
        if keep_every and step % keep_every == 0:
            assert step in stays
        if metric is not None and metric == metric and metric < (ranked + [2.0] * 5)[keep_best]:
            better = sum(m < metric for m in ranked) + sum(m == metric for m in ranked)
            assert step in stays or better > keep_best
    if keep:
        spaced = sum(bool(keep_every) and s % keep_every == 0 for s in steps)
        assert len(stays) <= keep + keep_best + spaced


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_worsening_metric_never_evicts_the_newest(asynchronous, tmp_path) -> None:
    """Case C4: Orbax with max_to_keep=2 and best_fn kept [1, 2] after saving 4."""
    store = Checkpoints(tmp_path, keep=1, keep_best=1, keep_every=3, asynchronous=asynchronous)
    for step in range(1, 6):
        store.save(step, tree(step), {}, metric=float(step))
    store.wait()
    assert store.steps() == [1, 3, 5]
    store.close()
    again = filled(Checkpoints(tmp_path, keep=2), 6)
    again.close()
    assert again.steps() == [5, 6]


def test_a_deletion_cut_short_leaves_nothing_that_counts(store, monkeypatch) -> None:
    from jaxpar.checkpoint import files

    filled(store, 1, 2)

    def killed(path) -> None:
        (path / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
        raise OSError("killed here")

    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(OSError, match="killed here"):
        files.remove(store.folder, 1)
    monkeypatch.undo()
    assert store.steps() == [2]
    assert store.incomplete() == ["1.deleting: a deletion that was cut short"]
    assert store.clean() == ["1.deleting"]


def test_counts_below_zero_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        Checkpoints(tmp_path, keep=-1)
