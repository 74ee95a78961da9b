"""Batches: every window once an epoch, a pure function of (seed, step), and errors by name."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar import data
from jaxpar.data.files import split
from jaxpar.data.windows import IGNORED, permute


def windows(count: int = 10, seq: int = 4, rows: int = 3, seed: int = 0) -> data.Windows:
    tokens = np.arange(count * seq + 1)
    return data.Windows(tokens=tokens, seq=seq, rows=rows, seed=seed, vocab=len(tokens))


# ---- order --------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert sorted(images.tolist()) == list(range(size))


def test_permute_shuffles_like_a_random_order() -> None:
    """Neighbours end up far apart: mean distance n/3, correlation near 0."""
    n = 10_000
    images = permute(np.arange(n), size=n, seed=1, epoch=0)
    assert abs(np.abs(np.diff(images)).mean() / n - 1 / 3) < 0.02
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.05
    assert len(np.unique(np.diff(images))) > n / 2  # an affine order would have a handful


def test_other_seeds_and_epochs_are_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(50), size=50, seed=seed, epoch=epoch).tolist())
        for seed in (0, 1, 2**40)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 9


@given(count=st.integers(1, 40), rows=st.integers(1, 50), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_window_once_an_epoch(count: int, rows: int, seed: int) -> None:
    """Also where batches straddle epochs, or one batch holds several."""
    source = windows(count, rows=rows, seed=seed)
    epochs = 3
    steps = -(-epochs * count // rows)
    ids = np.concatenate([source.ids(step) for step in range(steps)])[: epochs * count]
    for epoch in ids.reshape(epochs, count):
        assert sorted(epoch.tolist()) == list(range(count))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first, second = windows(), windows()
    late = second.batch(7)
    for step in range(8):
        batch = first.batch(step)
    for name in ("tokens", "targets", "row_id"):
        np.testing.assert_array_equal(batch[name], late[name])
    assert not np.array_equal(windows(seed=1).batch(7)["tokens"], late["tokens"])


def test_step_a_million_million_is_as_near_as_step_zero() -> None:
    source = windows(1000)
    begin = time.perf_counter()
    batch = source.batch(10**12)
    assert time.perf_counter() - begin < 0.1
    assert batch["row_id"].dtype == np.int32
    assert len(set(batch["row_id"].tolist())) == source.rows


def test_targets_are_the_tokens_one_later() -> None:
    batch = windows().batch(0)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 4)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(batch["tokens"][:, 0] % 4, 0)


def test_too_few_tokens_for_a_window() -> None:
    with pytest.raises(data.DataError, match="4 tokens do not fill one window of 4"):
        data.Windows(tokens=np.arange(4), seq=4, rows=1, seed=0, vocab=9)


# ---- held-out tokens ----------------------------------------------------------------------------


@given(tokens=st.integers(2, 100), seq=st.integers(1, 9), rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_heldout_covers_every_target_once(tokens: int, seq: int, rows: int) -> None:
    source = data.HeldOut(tokens=np.arange(tokens), seq=seq, rows=rows, vocab=tokens)
    batches = [source.batch(i) for i in range(len(source))]
    targets = np.concatenate([b["targets"].ravel() for b in batches])
    inputs = np.concatenate([b["tokens"].ravel() for b in batches])
    valid = targets != IGNORED
    assert targets[valid].tolist() == list(range(1, tokens))
    assert inputs[valid].tolist() == list(range(tokens - 1))
    assert {b["tokens"].shape for b in batches} == {(rows, seq)}
    assert all((b["targets"] != IGNORED).any() for b in batches)
    row_ids = np.concatenate([b["row_id"] for b in batches])
    assert row_ids.tolist() == list(range(len(row_ids)))


# ---- ids outside the vocabulary (case T11) ------------------------------------------------------


@pytest.mark.parametrize("bad", [64, -1, 10**6])
@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_an_id_outside_the_vocabulary_is_named(name: str, bad: int) -> None:
    batch = {k: np.zeros((4, 8), np.int32) for k in ("tokens", "targets")}
    batch[name][2, 5] = bad
    with pytest.raises(
        data.DataError, match=rf"batch 3, row 2: {name}\[5\] is {bad}, outside .*63"
    ):
        data.check_tokens(batch, 64, where="batch 3")


def test_ignored_targets_pass_and_ignored_tokens_do_not() -> None:
    batch = {k: np.zeros((2, 2), np.int32) for k in ("tokens", "targets")}
    batch["targets"][1, 1] = IGNORED
    data.check_tokens(batch, 1, where="batch 0")
    batch["tokens"][1, 1] = IGNORED
    with pytest.raises(data.DataError, match="row 1: tokens"):
        data.check_tokens(batch, 1, where="batch 0")


def test_batches_are_checked_and_say_what_vocabulary_would_do() -> None:
    source = data.Windows(tokens=np.array([0, 1, 2, 70, 1]), seq=4, rows=1, seed=0, vocab=64)
    with pytest.raises(data.DataError, match=r"batch 5, row 0.*at least 71"):
        source.batch(5)
    with pytest.raises(data.DataError, match="held-out batch 0, row 0"):
        data.HeldOut(tokens=np.array([0, 70]), seq=4, rows=1, vocab=64).batch(0)


# ---- sources ------------------------------------------------------------------------------------


def test_stdlib_is_the_text_of_this_python() -> None:
    corpus = data.load("stdlib")
    assert "argparse.py" in corpus.train_files + corpus.heldout_files
    assert not set(corpus.train_files) & set(corpus.heldout_files)
    assert len(corpus.train) > 5_000_000
    assert 0.003 < len(corpus.heldout) / len(corpus.train) < 0.05
    text = data.decode(corpus.heldout[:400].tolist())
    assert "�" not in text[:-1]
    names = corpus.train_files + corpus.heldout_files
    assert not [n for n in names if "site-packages" in n or n.startswith("test/")]
    assert str(len(corpus.heldout_files)) in str(corpus)


def test_stdlib_without_source_says_so(tmp_path) -> None:
    with pytest.raises(data.DataError, match=r"no \.py file under"):
        data.read_stdlib(tmp_path)


def test_the_split_moves_no_other_file_when_one_is_added() -> None:
    texts = {f"f{i}": b"x" for i in range(200)}
    before = split(texts, one_in=10)
    after = split(texts | {"new": b"y"}, one_in=10)
    assert set(before.heldout_files) == set(after.heldout_files) - {"new"}
    assert 5 < len(before.heldout_files) < 40


def test_one_file_is_cut_in_two(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(33 + i % 90) for i in range(1999)))
    corpus = data.load(str(path))
    whole = np.concatenate([corpus.train, corpus.heldout])
    assert bytes(whole[:-1]).decode() == path.read_text()
    assert whole[-1] == 0
    assert len(corpus.heldout) == 100
    assert corpus.train_files == corpus.heldout_files == ("a.txt",)


def test_glob_and_folder_read_the_same_files(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    for i in range(30):
        (tmp_path / "sub" / f"{i}.txt").write_text(f"text {i}\n" * 10)
    by_glob = data.load(str(tmp_path / "**" / "*.txt"))
    by_folder = data.load(str(tmp_path))
    assert sorted(by_glob.train_files + by_glob.heldout_files) == sorted(
        name.removeprefix("sub" + os.sep)
        for name in by_folder.train_files + by_folder.heldout_files
    )
    assert len(by_glob.train) + len(by_glob.heldout) == sum(
        p.stat().st_size + 1 for p in (tmp_path / "sub").iterdir()
    )


def test_errors_name_the_file(tmp_path) -> None:
    with pytest.raises(data.DataError, match=r"no file is there at .*absent\.txt"):
        data.load(str(tmp_path / "absent.txt"))
    with pytest.raises(data.DataError, match=r"no file matches .*\*\.md"):
        data.load(str(tmp_path / "*.md"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(data.DataError, match=r"empty\.txt is empty"):
        data.load(str(tmp_path / "empty.txt"))
    (tmp_path / "binary.bin").write_bytes(b"ok\xff")
    with pytest.raises(
        data.DataError, match=r"binary\.bin is not UTF-8 text: byte 0xff at offset 2"
    ):
        data.load(str(tmp_path / "binary.bin"))
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with pytest.raises(data.DataError, match=r"cannot read .*loop\.txt"):
        data.load(str(tmp_path / "loo[p].txt"))


@given(st.text())
def test_encode_and_decode_are_inverse(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates are not text that a file can hold
        return
    assert data.decode(data.encode(text)) == text


def test_ids_that_are_no_bytes_show_as_lost() -> None:
    """A model with a larger vocabulary than 256 may sample them."""
    assert data.decode([97, 256, 98, 255]) == "a�b�"


# ---- prefetch -----------------------------------------------------------------------------------


def test_prefetch_keeps_order_and_runs_one_ahead() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 1:
            ahead.set()
        return step * 10

    stream = data.prefetch(make, range(4))
    assert next(stream) == 0
    assert ahead.wait(5)  # batch 1 is made though nobody asked for it yet
    assert 3 not in made
    assert list(stream) == [10, 20, 30]


def test_prefetch_raises_at_its_own_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise data.DataError("batch 2 is bad")
        return step

    stream = data.prefetch(make, range(4))
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(data.DataError, match="batch 2"):
        next(stream)


def test_prefetch_of_nothing() -> None:
    assert list(data.prefetch(lambda step: step, [])) == []
