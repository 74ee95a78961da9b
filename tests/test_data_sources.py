"""Every format reads back what its own library wrote, whole or in pieces; the split; errors by name."""

from __future__ import annotations

import gzip
import itertools
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import hugging_face

from jaxpar.data import sources, splits, streams, tokenizers
from jaxpar.data.errors import DataError
from jaxpar.data.formats import text
from jaxpar.data.stdlib import stdlib_files
from jaxpar.data.store import TokenStore

BYTES = tokenizers.load("bytes")
TEXTS = [f"document {i}: naïve\n" * (1 + i % 7) + "end" for i in range(90)]


@pytest.fixture
def read(tmp_path) -> Callable[..., TokenStore]:
    """All documents of a source as one store."""

    def run(source: object, tokenizer=BYTES, **options) -> TokenStore:
        options = {"cache": str(tmp_path / "cache"), "heldout": False, **options}
        store, none = sources.read(str(source), tokenizer, say=lambda line: None, **options)
        assert none is None
        return store

    return run


def documents(store: TokenStore) -> list[list[int]]:
    return [
        store.tokens[start:stop].tolist()
        for start, stop in zip(store.offsets, store.offsets[1:], strict=False)
    ]


def expected(texts: list[str], tokenizer=BYTES) -> list[list[int]]:
    return [[*tokenizer.encode(text).tolist(), tokenizer.end] for text in texts]


def small_pieces(monkeypatch) -> None:
    """Work on tiny files as on large ones."""
    monkeypatch.setattr(streams, "PIECE", 200)
    monkeypatch.setattr(text, "BIG", 100)
    monkeypatch.setattr(tokenizers, "LONGEST", 64)


# ---- one writer a format ------------------------------------------------------------------------


def write_jsonl(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"id": 3, "text": t}) + "\n" for t in TEXTS))
    return path


def write_jsonl_gz(folder: Path) -> Path:
    """Two members, one behind the other, as `cat a.gz b.gz` leaves them."""
    raw = write_jsonl(folder).read_bytes()
    path = folder / "a.json.gz"
    path.write_bytes(gzip.compress(raw[:500]) + gzip.compress(raw[500:]))
    return path


def write_jsonl_zst(folder: Path) -> Path:
    raw = write_jsonl(folder).read_bytes()
    path = folder / "a.jsonl.zst"
    pack = zstandard.ZstdCompressor().compress
    path.write_bytes(pack(raw[:500]) + pack(raw[500:]))
    return path


def write_parquet(folder: Path) -> Path:
    path = folder / "a.parquet"
    table = pa.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pq.write_table(table, path, row_group_size=7, write_page_checksum=True)
    return path


def write_array_record(folder: Path) -> Path:
    """Half of the records are plain text, half JSON objects."""
    module = pytest.importorskip("array_record.python.array_record_module")
    path = folder / "a.array_record"
    writer = module.ArrayRecordWriter(str(path), "group_size:4")
    for i, one in enumerate(TEXTS):
        writer.write((one if i % 2 else json.dumps({"text": one})).encode())
    writer.close()
    return path


def write_saved_dataset(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = folder / "saved"
    datasets.Dataset.from_dict({"text": TEXTS, "n": [1] * len(TEXTS)}).save_to_disk(str(path))
    return path


WRITERS = [
    write_jsonl,
    write_jsonl_gz,
    write_jsonl_zst,
    write_parquet,
    write_array_record,
    write_saved_dataset,
]


def megatron(folder: Path, docs: list[list[int]], *, code: int = 8, cut: int = 3) -> Path:
    """Documents of several sequences of `cut` tokens, as Megatron's IndexedDatasetBuilder does."""
    dtype = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    path = folder / "a.bin"
    np.array([i for doc in docs for i in doc], dtype).tofile(path)
    lengths: list[int] = []
    bounds = [0]
    for doc in docs:
        lengths += [len(doc[i : i + cut]) for i in range(0, len(doc), cut)]
        bounds.append(len(lengths))
    places = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    body = [np.array(lengths, "<i4"), np.array(places, "<i8"), np.array(bounds, "<i8")]
    path.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in body))
    return path


def llm_c(path: Path, ids: list[int], magic: int = 20240520, version: int = 1) -> Path:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids)
    dtype = "<u2" if version == 1 else "<u4"
    path.write_bytes(head.tobytes() + np.array(ids, dtype).tobytes())
    return path


DOCS = [[5, 300, 7, 0], [0], [65535, 1, 2, 3, 4, 5, 6, 0], [9, 0]]


# ---- reading back -------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("pieces", ["one", "many"])
def test_documents_come_back(read, tmp_path, monkeypatch, write, pieces: str) -> None:
    path = write(tmp_path)
    if pieces == "many":
        small_pieces(monkeypatch)
    store = read(path)
    assert documents(store) == expected(TEXTS)
    assert store.mask is None
    assert store.files == (path.name,)
    assert (store.where(0), store.where(89)) == (f"{path.name}, row 1", f"{path.name}, row 90")
    assert store.tokens.dtype == np.uint8
    assert store.largest == max(max(doc) for doc in expected(TEXTS))


@pytest.mark.core
def test_text_files_are_a_document_each(read, tmp_path, monkeypatch) -> None:
    for i, one in enumerate(TEXTS[:30]):
        (tmp_path / f"{i:02}.txt").write_text(one)
    small_pieces(monkeypatch)
    store = read(tmp_path / "*.txt")
    by_name = dict(zip(store.files, documents(store), strict=True))
    assert [by_name[f"{i:02}.txt"] for i in range(30)] == expected(TEXTS[:30])
    assert store.first == tuple(range(30))


@pytest.mark.core
def test_a_hugging_face_tokenizer_reads_the_same_from_every_format(read, tmp_path) -> None:
    tokenizer = tokenizers.load(str(hugging_face(tmp_path / "tokenizer")))
    wanted = expected(TEXTS, tokenizer)
    for write in (write_jsonl, write_parquet):
        store = read(write(tmp_path), tokenizer)
        assert documents(store) == wanted
        assert store.tokens.dtype == np.uint16


def test_a_big_text_in_pieces_is_one_document(read, tmp_path, monkeypatch) -> None:
    """Pieces are cut at line ends; a byte tokenizer shows every one of them."""
    small_pieces(monkeypatch)
    whole = "é" * 450 + "\n" + "".join(f"line {i}\n" for i in range(200)) + "x" * 700
    (tmp_path / "a.txt").write_text(whole)
    assert documents(read(tmp_path / "a.txt")) == expected([whole])


def test_compressed_text_is_text(read, tmp_path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXTS[5].encode()))
    assert documents(read(tmp_path / "a.txt.gz")) == expected([TEXTS[5]])


@given(st.lists(st.text("ab\n\r é", max_size=40), min_size=1, max_size=12), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_lines_do_not_depend_on_where_blocks_and_pieces_end(tmp_path_factory, parts, size) -> None:
    raw = "\n".join(parts).encode()
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(raw)
    wanted = raw.removesuffix(b"\n").split(b"\n") if raw else []
    blocks = [raw[i : i + size] for i in range(0, len(raw), size)]
    assert list(streams.lines(blocks)) == wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "PIECE", size)
        cuts = streams.line_cuts(str(path), len(raw))
    assert cuts == sorted(set(cuts)) or not raw
    assert all(raw[cut - 1 : cut] == b"\n" for cut in cuts[1:-1])
    pieces = itertools.pairwise(cuts)
    found = [line for a, b in pieces for line in streams.lines(streams.blocks(str(path), a, b))]
    assert found == wanted


def test_blank_lines_and_a_byte_order_mark_are_passed_over(read, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b", "score": NaN}')
    assert documents(read(path)) == expected(["a", "b"])


# ---- records ------------------------------------------------------------------------------------


def masked(store: TokenStore) -> list[list[int]]:
    assert store.mask is not None
    bounds = zip(store.offsets, store.offsets[1:], strict=False)
    return [store.mask[start:stop].tolist() for start, stop in bounds]


RECORDS = [
    {"prompt": "ab", "completion": "c"},
    {"text": "xy"},
    {"tokens": [1, 2, 0], "loss_mask": [0, 1, 1]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, -100]},
    {"tokens": []},
    {"prompt": "q", "completion": ""},
]
RECORD_IDS = [[97, 98, 99, 0], [120, 121, 0], [1, 2, 0], [1, 2, 3, 0], [0], [113, 0]]
RECORD_MASKS = [[0, 0, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 0, 0], [1], [0, 1]]


@pytest.mark.core
def test_prompts_and_ignored_labels_are_no_targets(read, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    store = read(path)
    assert documents(store) == RECORD_IDS
    assert masked(store) == RECORD_MASKS


def test_pieces_without_a_mask_are_trained_on_whole(read, tmp_path, monkeypatch) -> None:
    small_pieces(monkeypatch)
    rows = [{"text": t} for t in TEXTS[:20]]
    rows += [{"prompt": "p", "completion": "c"}, *({"text": t} for t in TEXTS[20:40])]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    masks = masked(read(path))
    assert masks[20] == [0, 1, 1]
    assert all(all(mask) for i, mask in enumerate(masks) if i != 20)
    assert [len(m) for m in masks] == [len(d) for d in documents(read(path))]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_columns_of_ids_and_labels(read, tmp_path, kind: str) -> None:
    columns = {"input_ids": [[1, 2, 3], [], [4, 0]], "labels": [[-100, 2, 3], [], [4, -100]]}
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table(columns), path)
    else:
        path = tmp_path / "saved"
        pytest.importorskip("datasets").Dataset.from_dict(columns).save_to_disk(str(path))
    store = read(path)
    assert documents(store) == [[1, 2, 3, 0], [0], [4, 0]]
    assert masked(store) == [[0, 1, 1, 1], [1], [1, 0]]


def test_the_text_may_be_in_any_field(read, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "a", "text": 3}\n')
    assert documents(read(path, text_key="content")) == expected(["a"])


# ---- token files --------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("half", [".bin", ".idx"])
@pytest.mark.parametrize("code", [8, 4])
def test_megatron_is_mapped_with_its_documents(read, tmp_path, half: str, code: int) -> None:
    path = megatron(tmp_path, DOCS, code=code)
    store = read(path.with_suffix(half))
    assert documents(store) == DOCS
    assert store.tokens.itemsize == {8: 2, 4: 4}[code]
    base = store.tokens
    while not isinstance(base, np.memmap) and base.base is not None:
        base = base.base
    assert Path(base.filename) == path
    assert not (tmp_path / "cache" / "tokens").exists()


@pytest.mark.core
@pytest.mark.parametrize("header", [None, (20240520, 1), (20240801, 7)])
def test_nanogpt_is_mapped_and_cut_behind_end_tokens(read, tmp_path, header) -> None:
    path = tmp_path / "train.bin"
    tokenizer = tokenizers.load(str(hugging_face(tmp_path / "t")))
    ids = [5, 6, tokenizer.end, tokenizer.end, 399, 7]
    if header:
        llm_c(path, ids, *header)
    else:
        np.array(ids, "<u2").tofile(path)
    assert documents(read(path)) == [ids]  # byte tokens made none of these files
    store = read(path, tokenizer)
    assert documents(store) == [ids[:3], ids[3:4], ids[4:]]
    assert store.largest == 399


@pytest.mark.parametrize("pieces", ["one", "many"])
def test_several_token_files_are_one_array(read, tmp_path, monkeypatch, pieces: str) -> None:
    if pieces == "many":
        monkeypatch.setattr(streams, "PIECE", 8)
    (tmp_path / "m").mkdir()
    megatron(tmp_path / "m", DOCS, code=4)
    llm_c(tmp_path / "m" / "b.bin", [1, 2, 3])
    np.array([4] * 30, "<u2").tofile(tmp_path / "m" / "c.bin")
    store = read(tmp_path / "m")
    assert documents(store) == [*DOCS, [1, 2, 3], [4] * 30]
    assert store.files == ("a.bin", "b.bin", "c.bin")
    assert store.where(5) == "c.bin, row 1"


def test_damaged_token_files_are_named(read, tmp_path) -> None:
    path = megatron(tmp_path, DOCS)
    index = path.with_suffix(".idx")
    good, ids = index.read_bytes(), path.read_bytes()
    path.write_bytes(ids[:-2])
    with pytest.raises(DataError, match=r"a\.idx does not match its \.bin: it counts 15 tokens"):
        read(path)
    path.write_bytes(ids)
    for bad, message in (
        (good[:-8], "its header asks for"),
        (good[:20], "not a Megatron index"),
        (b"TNTIDX\0\0" + good[8:], "not a Megatron index"),
        (good[:34] + b"\x02" + good[35:], "does not begin where the one before it ends"),
        (good[:-8] + struct.pack("<q", 2), "its documents do not cover"),
        (good[:17] + b"\x05" + good[18:], "ids int64; what can be read"),
        (good[:17] + b"\x63" + good[18:], "unknown type"),
    ):
        index.write_bytes(bad)
        with pytest.raises(DataError, match=message):
            read(path)
    path.unlink()
    index.write_bytes(good)
    with pytest.raises(DataError, match=r"is the index of .*a\.bin, which is not there"):
        read(index)


def test_damaged_nanogpt_files_are_named(read, tmp_path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(b"\1\2\3")
    with pytest.raises(DataError, match=r"b\.bin holds 3 bytes of tokens, .* no whole number"):
        read(path)
    llm_c(path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"holds 2 tokens and its header says 3"):
        read(path)
    llm_c(path, [1, 2, 3], 20240520, 2)
    with pytest.raises(DataError, match="20240520 version 2; known are"):
        read(path)


# ---- remote paths -------------------------------------------------------------------------------


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize("write", [w for w in WRITERS if w is not write_saved_dataset])
def test_paths_go_through_fsspec(read, tmp_path, memory, write) -> None:
    (tmp_path / "w").mkdir()
    path = write(tmp_path / "w")
    memory.pipe(f"/corpus/deep/{path.name}", path.read_bytes())
    memory.pipe("/corpus/other.txt", b"other")
    url = f"memory://corpus/deep/{path.name}"
    for source in (url, "memory://corpus/deep", f"memory://corpus/deep/{path.name[:1]}*"):
        store = read(source)
        assert documents(store) == expected(TEXTS)
        assert store.files == (path.name,)
    assert read(f"file://{path}").fingerprint == read(url).fingerprint


def test_remote_token_files_are_copied(read, tmp_path, memory) -> None:
    path = megatron(tmp_path, DOCS)
    for half in (path, path.with_suffix(".idx")):
        memory.pipe(f"/m/{half.name}", half.read_bytes())
    assert documents(read("memory://m/a.bin")) == DOCS


def test_a_remote_file_that_changes_is_read_again(read, memory) -> None:
    memory.pipe("/a.txt", b"one")
    first = read("memory://a.txt")
    memory.pipe("/a.txt", b"two")
    assert documents(read("memory://a.txt")) == expected(["two"])
    assert documents(first) == expected(["one"])


def test_unknown_and_missing_filesystems_are_named(read, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"nosuch://x/a\.txt: .*nosuch.*local path"):
        read("nosuch://x/a.txt")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"gs:// needs a package that is not installed.*gcsfs"):
        read("gs://bucket/a.txt")


def test_the_home_folder_is_expanded(read, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("home")
    assert documents(read("~/a.txt")) == expected(["home"])


# ---- what is held out ---------------------------------------------------------------------------


def halves(source: object, cache: Path, tokenizer=BYTES) -> tuple[TokenStore, TokenStore]:
    train, heldout = sources.read(str(source), tokenizer, cache=str(cache), say=lambda line: None)
    assert heldout is not None
    return train, heldout


@pytest.mark.core
def test_stdlib_is_the_text_of_this_python(tmp_path) -> None:
    train, heldout = halves("stdlib", tmp_path)
    assert "argparse.py" in train.files + heldout.files
    assert not set(train.files) & set(heldout.files)
    assert len(train.tokens) > 5_000_000
    assert 0.003 < len(heldout.tokens) / len(train.tokens) < 0.05
    names = train.files + heldout.files
    assert not [n for n in names if "site-packages" in n or n.startswith("test/")]
    paths = {file.name: file.path for file in stdlib_files()}
    for store in (train, heldout):
        for i in (0, len(store) // 2, len(store) - 1):
            name = store.where(i).removesuffix(", row 1")
            wanted = Path(paths[name]).read_bytes() + b"\0"
            assert store.tokens[store.offsets[i] : store.offsets[i + 1]].tobytes() == wanted


def test_stdlib_without_source_says_so(tmp_path) -> None:
    with pytest.raises(DataError, match=r"no \.py file under"):
        stdlib_files(tmp_path)


def test_the_split_moves_no_other_file_when_one_is_added() -> None:
    names = [f"f{i}" for i in range(200)]
    kept, held = splits.by_name(names, one_in=10)
    assert sorted(kept + held) == list(range(200))
    _, after = splits.by_name([*names, "new"], one_in=10)
    assert set(held) == set(after) - {200}
    assert 5 < len(held) < 40
    # The rule of earlier versions, by the numbers of one of them.
    assert splits.by_name([f"{i}.txt" for i in range(40)], one_in=20)[1] == [15, 39]


def test_whole_files_are_held_out(tmp_path) -> None:
    (tmp_path / "t").mkdir()
    for i in range(40):
        (tmp_path / "t" / f"{i}.txt").write_text(f"text {i}")
    train, heldout = halves(tmp_path / "t", tmp_path / "cache")
    assert heldout.files == ("15.txt", "39.txt")
    assert documents(heldout) == expected([f"text {i}" for i in (15, 39)])
    assert len(train) == 38
    assert train.where(37) == "9.txt, row 1"
    whole, none = sources.read(
        str(tmp_path / "t"), BYTES, cache=str(tmp_path / "cache"), heldout=False
    )
    assert none is None
    assert documents(whole) == documents(train) + documents(heldout)


def test_one_document_is_cut_in_two(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(33 + i % 90) for i in range(1999)))
    train, heldout = halves(path, tmp_path / "cache")
    whole = np.concatenate([train.tokens, heldout.tokens])
    assert bytes(whole[:-1]).decode() == path.read_text()
    assert len(heldout.tokens) == 100
    assert (len(train), len(heldout)) == (1, 1)
    assert train.files == heldout.files == ("a.txt",)
    assert train.where(0) == heldout.where(0) == "a.txt, row 1"
    assert len({train.fingerprint, heldout.fingerprint}) == 2


def test_the_last_documents_of_one_file_are_held_out(tmp_path) -> None:
    train, heldout = halves(write_jsonl(tmp_path), tmp_path / "cache")
    assert documents(train) + documents(heldout) == expected(TEXTS)
    assert len(heldout) == 90 // 20
    assert heldout.where(0) == "a.jsonl, row 87"


def test_of_files_that_no_hash_picks_the_end_of_the_last_is_held_out(tmp_path) -> None:
    (tmp_path / "t").mkdir()
    for name in ("1.txt", "2.txt"):
        (tmp_path / "t" / name).write_text("x" * 999)
    train, heldout = halves(tmp_path / "t", tmp_path / "cache")
    assert [len(doc) for doc in documents(train)] == [1000, 950]
    assert [len(doc) for doc in documents(heldout)] == [50]
    assert heldout.files == ("2.txt",)


def test_one_token_cannot_be_split(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}')
    with pytest.raises(DataError, match=r"has 1 token .* data\.heldout"):
        halves(tmp_path / "a.jsonl", tmp_path / "cache")


# ---- the store ----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_parts_of_a_store_are_views_of_its_documents(lengths: list[int], data) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    count = len(lengths)
    first = sorted({0, *data.draw(st.lists(st.integers(0, count - 1), max_size=3))})
    store = TokenStore(
        tokens=np.arange(offsets[-1]).astype(np.uint16),
        offsets=offsets,
        mask=np.arange(offsets[-1]).astype(np.uint8) % 2,
        name="s",
        fingerprint="f",
        files=tuple(f"file{i}" for i in range(len(first))),
        first=tuple(first),
    )
    low = data.draw(st.integers(0, count - 1))
    high = data.draw(st.integers(low + 1, count))
    part = store.part(low, high)
    assert documents(part) == documents(store)[low:high]
    assert [part.where(i) for i in range(len(part))] == [store.where(i) for i in range(low, high)]
    assert np.shares_memory(part.tokens, store.tokens)
    assert part.mask is not None
    assert (part.mask == part.tokens % 2).all()
    assert (part.fingerprint == store.fingerprint) == (part is store)
    if len(store.tokens) > 1:
        token = data.draw(st.integers(1, len(store.tokens) - 1))
        left, right = store.cut(token)
        assert [*left.tokens, *right.tokens] == list(store.tokens)
        inside = token not in offsets
        assert len(left) + len(right) == count + inside
        assert (left.offsets[-1], right.offsets[-1]) == (len(left.tokens), len(right.tokens))
        assert right.where(0) == store.where(len(left) - inside)


def test_places_outside_a_store_are_refused(read, tmp_path) -> None:
    store = read(write_jsonl(tmp_path))
    for call in (lambda: store.where(90), lambda: store.part(3, 91), lambda: store.cut(0)):
        with pytest.raises(IndexError, match=r"a\.jsonl"):
            call()


@pytest.mark.core
def test_ids_outside_the_vocabulary_are_found_before_training(read, tmp_path) -> None:
    store = read(megatron(tmp_path, DOCS))
    store.check_vocab(65536)
    with pytest.raises(
        DataError,
        match=r"a\.bin, row 3: token 0 has id 65535, .*\(0 to 49999\).*vocab to at least 65536",
    ):
        store.check_vocab(50000)
    with pytest.raises(DataError, match=r"a\.bin, row 1: token 1 has id 300"):
        store.check_vocab(256)
    store.part(3, 4).check_vocab(10)
    with pytest.raises(DataError, match=r"a\.bin, row 4: token 0 has id 9"):
        store.part(3, 4).check_vocab(9)


# ---- errors name file and row -------------------------------------------------------------------


@pytest.mark.core
def test_errors_name_the_file(read, tmp_path) -> None:
    with pytest.raises(DataError, match=r"no file is there at .*absent\.txt"):
        read(tmp_path / "absent.txt")
    with pytest.raises(DataError, match=r"no file matches .*\*\.md"):
        read(tmp_path / "*.md")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        read(tmp_path / "empty.txt")
    (tmp_path / "none.txt.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"none\.txt\.gz holds no text"):
        read(tmp_path / "none.txt.gz")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"blank\.jsonl holds no record"):
        read(tmp_path / "blank.jsonl")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with pytest.raises(DataError, match=r"cannot read .*loop\.txt"):
        read(tmp_path / "loo[p].txt")
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    with pytest.raises(DataError, match="without another compression"):
        read(tmp_path / "a.parquet.gz")


@pytest.mark.parametrize("offset", [0, 2, 450, 1 << 20])
def test_bad_utf8_is_named_with_its_offset(read, tmp_path, monkeypatch, offset: int) -> None:
    """Also where a character is cut by a block, or the file by pieces."""
    if offset < 1000:
        small_pieces(monkeypatch)
    raw = ("é\n" * offset).encode()[:offset]
    raw = raw[:-1] + b"x" if offset and raw[-1] == 0xC3 else raw
    path = tmp_path / "a.txt"
    path.write_bytes(raw + b"\xff" + b"ok\n" * 50)
    with pytest.raises(
        DataError, match=rf"a\.txt is not UTF-8 text: byte 0xff at offset {offset};"
    ):
        read(path)
    path.write_bytes(raw + b"\xc3")  # half a character
    with pytest.raises(DataError, match=rf"byte 0xc3 at offset {offset};"):
        read(path)


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize("pieces", ["one", "many"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 31 is not JSON: .*one object a line"),
        (b'{"text": "\xff"}', "line 31 is not UTF-8 text: byte 0xff at offset 10"),
        (b'{"texts": "a"}', "line 31: no field 'text'; did you mean texts.*has 'texts'"),
        (b'{"text": 3}', "line 31: field 'text' is int 3; it must be text"),
        (b'{"text": null}', "line 31: field 'text' is null"),
        (b"[1, 2]", r"line 31: a record is an object such as {'text': '...'}, not list \[1, 2\]"),
        (b'{"prompt": "a", "completion": 1}', "line 31: field 'completion' is int 1"),
        (b'{"tokens": [1, 256]}', r"line 31: tokens\[1\] is 256, outside .* bytes \(0 to 255\)"),
        (b'{"tokens": [-1]}', r"line 31: tokens\[0\] is -1, outside the vocabulary"),
        (b'{"tokens": [1.5]}', r"line 31: field 'tokens' is list \[1.5\]; it must be a list of"),
        (b'{"tokens": "ab"}', "line 31: field 'tokens' is str 'ab'; it must be a list of ints"),
        (b'{"tokens": [[1], [2, 3]]}', "line 31: field 'tokens' is list"),
        (b'{"tokens": [1, 2], "loss_mask": [1]}', "line 31: 2 tokens and 1 loss_mask"),
        (b'{"tokens": [1], "loss_mask": [2]}', r"line 31: loss_mask\[0\] is 2; it must be 0"),
        (b'{"input_ids": [1], "labels": [3]}', r"line 31: labels\[0\] is 3; it must be -100"),
        (rb'{"text": "\ud800"}', r"line 31: the text holds half of a surrogate pair \(U\+D800\)"),
    ],
)
def test_bad_lines_are_named(read, tmp_path, monkeypatch, pieces, line, message) -> None:
    if pieces == "many":
        small_pieces(monkeypatch)
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 30 + line + b"\n" + GOOD * 30)
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}"):
        read(path)


def test_a_json_array_is_told_from_json_lines(read, tmp_path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}], indent=1))
    with pytest.raises(DataError, match=r"a\.json, line 1 is not JSON.*one object a line"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("write", [write_jsonl_gz, write_jsonl_zst])
@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damaged_compressed_files_are_named(read, tmp_path, write, damage: str) -> None:
    path = write(tmp_path)
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        del raw[-20:]
    elif damage == "flip":
        raw[len(raw) // 2] ^= 0x55
    else:
        raw[:] = b"plain text"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"{path.name}.*(not a whole|cut short|is not)"):
        read(path)


@pytest.mark.parametrize(
    ("write", "damage"),
    [
        (write_parquet, "cut"),
        (write_parquet, "flip"),
        (write_parquet, "other"),
        (write_array_record, "cut"),
        (write_array_record, "flip"),
        (write_array_record, "other"),
        # Arrow files have no checksums: a flipped bit in a text is another text.
        (write_saved_dataset, "cut"),
        (write_saved_dataset, "other"),
    ],
)
def test_damaged_containers_are_named(read, tmp_path, write, damage: str) -> None:
    path = write(tmp_path)
    inside = path if path.is_file() else next(path.glob("*.arrow"))
    raw = bytearray(inside.read_bytes())
    if damage == "cut":
        del raw[len(raw) // 2 :]
    elif damage == "flip":
        # In what the first documents became, behind the headers of file and column.
        raw[raw.index(b"document") if write is write_parquet else 200] ^= 0x55
    else:
        raw[:] = b"plain text"
    inside.write_bytes(raw)
    with pytest.raises(DataError, match=rf"{path.name} is not a whole"):
        read(path)


def test_missing_parts_of_a_saved_dataset_are_named(read, tmp_path) -> None:
    path = write_saved_dataset(tmp_path)
    next(path.glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="saved is not a whole dataset on disk"):
        read(path)


def test_a_folder_of_splits_asks_for_one(read, tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"holds the splits train, test; name one, such as .*train"):
        read(tmp_path / "d")
    assert documents(read(tmp_path / "d" / "train")) == expected(["a", "b"])


def test_without_the_extra_a_saved_dataset_names_it(read, tmp_path, monkeypatch) -> None:
    path = write_saved_dataset(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets: pip install 'jaxpar\[hf\]'"):
        read(path)


def test_bad_columns_are_named(read, tmp_path) -> None:
    path = tmp_path / "a.parquet"
    for columns, message in (
        ({"body": ["a"]}, r"a\.parquet: no field 'text'; .*has 'body'"),
        ({"text": [1]}, r"a\.parquet: column 'text' is int64; it must be text"),
        ({"tokens": ["a"]}, r"a\.parquet: column 'tokens' is string; it must be lists of integers"),
        ({"text": ["a", None]}, r"a\.parquet, row 2: field 'text' is null"),
        ({"text": [b"a", b"\xff"]}, r"a\.parquet, row 2 is not UTF-8 text: byte 0xff at offset 0"),
        ({"tokens": [[1], [300]]}, r"a\.parquet, row 2: tokens\[0\] is 300, outside"),
        ({"text": pa.array([], pa.string())}, r"a\.parquet holds no row"),
    ):
        pq.write_table(pa.table(columns), path)
        with pytest.raises(DataError, match=message):
            read(path)


def test_bad_records_of_array_record_are_named(read, tmp_path) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a.arrayrecord"
    for record, message in ((b"\xff", "row 2 is not UTF-8"), (b'{"x": 1}', "row 2: no field")):
        writer = module.ArrayRecordWriter(str(path), "group_size:1")
        writer.write(b"{not json, so text}")
        writer.write(record)
        writer.close()
        with pytest.raises(DataError, match=rf"a\.arrayrecord, {message}"):
            read(path)


# ---- sets of files ------------------------------------------------------------------------------


def test_missing_shards_are_named(read, tmp_path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in (0, 1, 4):
        (folder / f"x-{i:05}-of-00005-{i * 77:x}.jsonl").write_text('{"text": "a"}\n')
    message = r"2 of 5 shards are missing: .*x-00002-of-00005\.jsonl, .*x-00003-of-00005\.jsonl"
    for source in (folder, folder / "*.jsonl"):
        with pytest.raises(DataError, match=message):
            read(source)
    # One that was asked for by its name is what was asked for.
    assert len(read(folder / "x-00001-of-00005-4d.jsonl")) == 1
    for i in (2, 3):
        (folder / f"x-{i:05}-of-00005-{i * 77:x}.jsonl").write_text('{"text": "a"}\n')
    assert len(read(folder)) == 5
    # Those that are there and not asked for were left out on purpose.
    assert len(read(folder / "x-0000[0-2]-*.jsonl")) == 3


def test_glob_and_folder_read_the_same_files(read, tmp_path) -> None:
    (tmp_path / "t" / "sub").mkdir(parents=True)
    for i in range(30):
        (tmp_path / "t" / "sub" / f"{i}.txt").write_text(f"text {i}\n" * 10)
    by_glob, by_folder = read(tmp_path / "t" / "**" / "*.txt"), read(tmp_path / "t")
    assert sorted(by_glob.files) == sorted(by_folder.files)
    assert documents(by_glob) == documents(by_folder)


def test_formats_may_be_mixed_but_not_with_token_files(read, tmp_path) -> None:
    (tmp_path / "m").mkdir()
    write_jsonl(tmp_path / "m")
    (tmp_path / "m" / "b.txt").write_text("b")
    store = read(tmp_path / "m")
    assert documents(store) == expected([*TEXTS, "b"])
    assert store.where(90) == "b.txt, row 1"
    llm_c(tmp_path / "m" / "c.bin", [1])
    with pytest.raises(DataError, match=r"token files \(c\.bin\) and text .*\(a\.jsonl\).*weights"):
        read(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a/c4-train.00000-of-01024.json.gz", "jsonl"),
        ("x.array_record-00003-of-00010", "arrayrecord"),
        ("train-00000-of-00002-abc.parquet", "parquet"),
        ("README", "text"),
        ("a.b/c", "text"),
        ("a.txt.zst", "text"),
        ("A.JSONL", "jsonl"),
        ("a.bin", "nanogpt"),
    ],
)
def test_the_name_decides_the_format(name: str, kind: str) -> None:
    assert sources.kind_of(name) == kind
