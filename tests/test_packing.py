"""Packed rows: every target once, documents apart, and only what was asked for is read."""

from __future__ import annotations

import pathlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import numbered, store

from jaxpar.data import DataError, best_fit
from jaxpar.data.packing import IGNORED, BestFit, Concatenated, Rows, Stream, gather
from jaxpar.data.store import TokenStore

NAMES = ("tokens", "targets", "positions", "segments")


def make_rows(packing: str, source: TokenStore, seq: int) -> Rows:
    if packing == "best_fit":
        return BestFit(source, seq, best_fit.make(source, seq))
    return {"stream": Stream, "concatenate": Concatenated}[packing](source, seq, tail=True)


def whole(rows: Rows) -> dict[str, np.ndarray]:
    return rows.read(np.arange(len(rows)))


def some_pairs(lengths: list[int]) -> bool:
    return any(length > 1 for length in lengths)


documents = st.lists(st.integers(0, 14), min_size=1, max_size=12).filter(some_pairs)


def pairs_of(source: TokenStore) -> list[tuple[int, int]]:
    """(token, target) of every place whose next token is of the same document and not masked."""
    out = []
    for begin, end in zip(source.offsets[:-1].tolist(), source.offsets[1:].tolist(), strict=True):
        for place in range(begin, end - 1):
            if source.mask is None or source.mask[place + 1]:
                out.append((int(source.tokens[place]), int(source.tokens[place + 1])))
    return out


# ---- all packings -------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@given(lengths=documents, seq=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_target_of_every_document_once(packing: str, lengths, seq: int, data) -> None:
    """Also where documents are empty, of one token, longer than a row, and partly masked."""
    if packing == "best_fit" and sum(lengths) < seq:
        seq = sum(lengths)
    mask = None
    if data.draw(st.booleans()):
        mask = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    source = numbered(lengths, mask=mask)
    batch = whole(make_rows(packing, source, seq))
    valid = batch["targets"] != IGNORED
    found = zip(batch["tokens"][valid].tolist(), batch["targets"][valid].tolist(), strict=True)
    assert sorted(found) == pairs_of(source)
    assert {batch[name].dtype for name in NAMES} == {np.dtype(np.int32)}


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@given(lengths=documents, seq=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_segment_is_a_run_of_one_document(packing: str, lengths, seq: int) -> None:
    """Positions count from 0, tokens are successive, segments count from 1, padding is behind."""
    seq = min(seq, sum(lengths))
    source = numbered(lengths)
    document = np.repeat(np.arange(len(source)), np.diff(source.offsets))
    batch = whole(make_rows(packing, source, seq))
    for row in range(len(batch["tokens"])):
        tokens, targets, positions, segments = (batch[name][row] for name in NAMES)
        used = int((segments > 0).sum())
        assert used > 0
        assert (segments[used:] == 0).all()
        assert (targets[used:] == IGNORED).all()
        assert not tokens[used:].any()
        assert not positions[used:].any()
        assert list(dict.fromkeys(segments[:used].tolist())) == list(range(1, segments.max() + 1))
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert positions[here].tolist() == list(range(here.sum()))
            assert np.ptp(tokens[here] - positions[here]) == 0
            assert len(set(document[tokens[here]].tolist())) == 1


@pytest.mark.core
@pytest.mark.parametrize("packing", ["stream", "concatenate", "best_fit"])
def test_rows_are_read_alone_as_together(packing: str) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 40, 60).tolist()
    mask = [generator.integers(0, 2, n).tolist() for n in lengths]
    rows = make_rows(packing, numbered(lengths, mask=mask), 16)
    batch = whole(rows)
    order = generator.permutation(len(rows))
    shuffled = rows.read(order)
    for name, array in batch.items():
        np.testing.assert_array_equal(shuffled[name], array[order])
        for row in range(len(rows)):
            np.testing.assert_array_equal(rows.read(np.array([row]))[name][0], array[row])
        assert rows.read(np.array([], np.int64))[name].shape == (0, 16)


@pytest.mark.parametrize("packing", ["stream", "concatenate", "best_fit"])
def test_nothing_else_is_read(packing: str) -> None:
    """The store hands out slices and single tokens near the rows asked for, and nothing more."""

    touched: set[int] = set()

    class Watched(np.ndarray):
        def __getitem__(self, key):
            touched.update(np.atleast_1d(np.arange(len(self))[key]).tolist())
            return np.asarray(self)[key]

    source = numbered([5, 20, 3, 9, 30, 8, 1, 2, 11] * 4)
    rows = make_rows(packing, source, 8)
    rows._tokens = source.tokens.view(Watched)
    wanted = np.array([3, 7])
    batch = rows.read(wanted)
    seen = set(batch["tokens"].ravel().tolist()) | set(batch["targets"].ravel().tolist())
    # The token behind a document's end is looked at, and left out.
    assert touched - seen <= {token + 1 for token in seen}
    assert seen - {IGNORED, 0} <= touched


def test_mask_of_a_stream() -> None:
    source = store([[1, 2, 3, 4, 5]], mask=[[1, 1, 0, 1, 0]])
    batch = whole(Stream(source, 2))
    assert batch["tokens"].tolist() == [[1, 2], [3, 4]]
    assert batch["targets"].tolist() == [[2, IGNORED], [4, IGNORED]]


# ---- concatenate, against a loop ----------------------------------------------------------------


@given(lengths=documents, seq=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_concatenate_is_the_stream_cut_into_rows(lengths, seq: int) -> None:
    source = numbered(lengths)
    total = len(source.tokens)
    rows = Concatenated(source, seq, tail=True)
    assert len(rows) == -(-(total - 1) // seq)
    document = np.repeat(np.arange(len(source)), np.diff(source.offsets)).tolist()
    expected = {name: np.zeros((len(rows), seq), np.int32) for name in NAMES}
    expected["targets"][:] = IGNORED
    for row in range(len(rows)):
        position = segment = 0
        for column, place in enumerate(range(row * seq, min((row + 1) * seq, total))):
            begins = column == 0 or document[place] != document[place - 1]
            position = 0 if begins else position + 1
            segment += begins
            expected["tokens"][row, column] = place
            expected["positions"][row, column] = position
            expected["segments"][row, column] = segment
            if place + 1 < total and document[place + 1] == document[place]:
                expected["targets"][row, column] = place + 1
    batch = whole(rows)
    for name in NAMES:
        np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)


# ---- best fit -----------------------------------------------------------------------------------


def best_fit_one_by_one(lengths: list[int], seq: int) -> list[list[int]]:
    """The algorithm as it is defined: longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if seq - sum(row) >= length]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(lengths=st.lists(st.integers(1, 30), max_size=60), seq=st.integers(30, 40))
@settings(max_examples=80, deadline=None)
def test_pack_is_best_fit_decreasing(lengths: list[int], seq: int) -> None:
    row, count = best_fit.pack(np.array(lengths, np.int32), seq)
    rows: list[list[int]] = [[] for _ in range(count)]
    for length, place in zip(lengths, row.tolist(), strict=True):
        rows[place].append(length)
    expected = best_fit_one_by_one(lengths, seq)
    assert sorted(map(sum, rows)) == sorted(map(sum, expected))
    assert all(sum(row) <= seq for row in rows)
    assert all(rows)


def test_best_fit_keeps_whole_what_fits_in_a_row() -> None:
    lengths = np.random.default_rng(1).integers(2, 60, 400).tolist()
    source = numbered(lengths)
    plan = best_fit.make(source, 32)
    pieces = dict(zip(plan.start.tolist(), plan.length.tolist(), strict=True))
    for begin, length in zip(source.offsets[:-1].tolist(), lengths, strict=True):
        if length - 1 <= 32:
            assert pieces[begin] == length - 1
        else:
            assert [pieces[begin], pieces[begin + 32]] == [32, length - 1 - 32]
    # Little is lost to padding: Ding et al. report under one in ten thousand at scale.
    assert plan.length.sum() / (len(plan) * 32) > 0.98


def test_a_plan_of_many_documents_takes_seconds() -> None:
    generator = np.random.default_rng(2)
    lengths = np.minimum(generator.lognormal(6, 1.2, 200_000), 50_000).astype(np.int64) + 2
    source = TokenStore(
        tokens=np.broadcast_to(np.uint16(1), lengths.sum()), mask=None, name="many",
        offsets=np.append(0, np.cumsum(lengths)), fingerprint="many", files=("x",), first=(0,),
    )  # fmt: skip
    begin = time.perf_counter()
    plan = best_fit.make(source, 2048)
    assert time.perf_counter() - begin < 10
    assert plan.length.sum() == (lengths - 1).sum()
    assert plan.length.sum() / (len(plan) * 2048) > 0.999


def same(a: best_fit.Plan, b: best_fit.Plan) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("first", "start", "length"))


def test_a_plan_is_kept_and_made_once(tmp_path: pathlib.Path, monkeypatch) -> None:
    source, said = numbered([5, 9, 2, 17, 4]), []
    made = best_fit.load_or_make(source, 8, folder=tmp_path, say=said.append)
    assert same(made, best_fit.make(source, 8))
    other = best_fit.load_or_make(source, 6, folder=tmp_path, say=said.append)
    assert same(other, best_fit.make(source, 6))

    monkeypatch.setattr(best_fit, "make", lambda *_: pytest.fail("made again"))
    assert same(best_fit.load_or_make(source, 8, folder=tmp_path, say=said.append), made)
    assert same(best_fit.load_or_make(source, 6, folder=tmp_path, say=said.append), other)
    assert said == []


@pytest.mark.parametrize("name", ["first", "start", "length"])
def test_a_damaged_plan_is_said_and_made_anew(tmp_path: pathlib.Path, name: str) -> None:
    source, said = numbered([5, 9, 2, 17, 4] * 40), []
    made = best_fit.make(source, 8)
    best_fit.load_or_make(source, 8, folder=tmp_path, say=said.append)
    (path,) = tmp_path.glob(f"*/{name}.npy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert same(best_fit.load_or_make(source, 8, folder=tmp_path, say=said.append), made)
    assert len(said) == 1
    assert f"{name}.npy has other content" in said[0]
    assert same(best_fit.load_or_make(source, 8, folder=tmp_path, say=said.append), made)
    assert len(said) == 1


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file"):
        best_fit.load_or_make(numbered([5]), 4, folder=tmp_path / "file", say=print)


# ---- several sources, and errors ----------------------------------------------------------------


@pytest.mark.parametrize("packing", ["stream", "concatenate", "best_fit"])
def test_gather_takes_rows_of_several_sources(packing: str) -> None:
    sources = [make_rows(packing, numbered(lengths), 4) for lengths in ([9, 12], [30], [6, 6, 6])]
    source = np.array([2, 0, -1, 2, 1, 0])
    row = np.array([1, 0, 99, 0, 3, 2])
    batch = gather(sources, source, row)
    for name, array in batch.items():
        for i, (s, r) in enumerate(zip(source.tolist(), row.tolist(), strict=True)):
            if s >= 0:
                np.testing.assert_array_equal(array[i], sources[s].read(np.array([r]))[name][0])
    assert (batch["targets"][2] == IGNORED).all()
    assert not batch["tokens"][2].any()
    if packing != "stream":
        assert not batch["segments"][2].any()


def test_too_little_text_is_an_error_by_name() -> None:
    few = numbered([3, 2], name="few")
    with pytest.raises(DataError, match="few: 5 tokens do not fill one window of 5"):
        Stream(few, 5)
    with pytest.raises(DataError, match="few: 5 tokens do not fill one row of 6"):
        Concatenated(few, 6)
    with pytest.raises(DataError, match="few: 5 tokens do not fill one row of 6"):
        BestFit(few, 6, best_fit.make(few, 6))
    with pytest.raises(DataError, match="ones: no document of 3 has two tokens"):
        Concatenated(numbered([1, 1, 1], name="ones"), 2)
    with pytest.raises(DataError, match="one: 1 tokens do not give one target"):
        Stream(numbered([1], name="one"), 2, tail=True)
