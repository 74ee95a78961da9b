"""The token cache is made once, is whole or does not count, and never shows how it was made."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console
from tiny_tokenizers import hugging_face

from jaxpar.data import building, cache, contents, progress, sealed, sources, streams, tokenizers
from jaxpar.data.errors import DataError
from jaxpar.data.store import TokenStore

BYTES = tokenizers.load("bytes")


class Counting(tokenizers.Bytes):
    """Byte tokens, and how often somebody asked for them."""

    calls = 0

    def encode_batch(self, texts):
        """`encode` of each text."""
        Counting.calls += 1
        return super().encode_batch(texts)


@pytest.fixture
def counting(monkeypatch) -> Counting:
    monkeypatch.setattr(Counting, "calls", 0)
    return Counting()


def corpus(folder: Path, rows: int = 400) -> Path:
    """Lines of many lengths; every third has a prompt."""
    path = folder / "corpus.jsonl"
    pick = random.Random(0)
    with path.open("w") as file:
        for i in range(rows):
            words = " ".join(f"naïve{pick.randrange(99)}" for _ in range(pick.randrange(1, 40)))
            row = {"prompt": f"q{i}", "completion": words} if i % 3 == 0 else {"text": words}
            file.write(json.dumps(row) + "\n")
    return path


def read(source: Path, folder: Path, tokenizer=BYTES, **options) -> tuple[TokenStore, list[str]]:
    said: list[str] = []
    options = {"heldout": False, **options}
    store, _ = sources.read(str(source), tokenizer, cache=str(folder), say=said.append, **options)
    return store, said


def folders(folder: Path) -> list[Path]:
    """Caches that count."""
    return [p for p in (folder / "tokens").iterdir() if p.is_dir() and "." not in p.name]


def content(store: TokenStore) -> tuple[bytes, bytes, bytes | None, str]:
    mask = None if store.mask is None else store.mask.tobytes()
    return store.tokens.tobytes(), store.offsets.tobytes(), mask, store.fingerprint


def raw(folder: Path) -> dict[str, bytes]:
    (place,) = folders(folder)
    return {path.name: path.read_bytes() for path in place.iterdir()}


# ---- made once ----------------------------------------------------------------------------------


@pytest.mark.core
def test_the_second_time_nothing_is_tokenised(tmp_path, counting) -> None:
    path = corpus(tmp_path)
    first, _ = read(path, tmp_path / "cache", counting)
    assert Counting.calls > 0
    Counting.calls = 0
    second, said = read(path, tmp_path / "cache", counting)
    assert (Counting.calls, said) == (0, [])
    assert content(first) == content(second)
    assert len(folders(tmp_path / "cache")) == 1


@pytest.mark.core
def test_a_change_that_keeps_size_and_time_is_seen(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    info = path.stat()
    first, _ = read(path, tmp_path / "cache")
    path.write_text("after!")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    second, _ = read(path, tmp_path / "cache")
    assert (first.tokens.tobytes(), second.tokens.tobytes()) == (b"before\0", b"after!\0")
    assert first.fingerprint != second.fingerprint


def test_everything_that_decides_tokens_is_in_the_key(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "two"}\n' * 9)
    bpe = tokenizers.load(str(hugging_face(tmp_path / "t")))
    stores = [
        read(path, tmp_path / "cache", tokenizer, text_key=key)[0]
        for tokenizer in (BYTES, bpe)
        for key in ("text", "body")
    ]
    assert len({store.fingerprint for store in stores}) == 4
    assert len(folders(tmp_path / "cache")) == 4


def test_names_are_in_the_key_and_not_in_the_fingerprint(tmp_path) -> None:
    """The data of a resumed run is the same after its folder has moved; errors name the new one."""
    (tmp_path / "here").mkdir()
    path = corpus(tmp_path / "here")
    first, _ = read(path, tmp_path / "cache")
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = (tmp_path / "there" / path.name).rename(tmp_path / "there" / "b.jsonl")
    second, _ = read(moved, tmp_path / "cache")
    assert first.fingerprint == second.fingerprint
    assert (first.where(0), second.where(0)) == ("corpus.jsonl, row 1", "b.jsonl, row 1")


def test_the_default_folder_follows_the_specification(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root(None) == tmp_path / "xdg" / "jaxpar"
    for no in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", no)
        assert cache.root(None) == tmp_path / ".cache" / "jaxpar"
    assert cache.root("~/c") == tmp_path / "c"


# ---- notes about large files --------------------------------------------------------------------


def test_large_files_at_rest_are_not_read_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(contents, "SMALL", 3)
    path = tmp_path / "a.txt"
    path.write_text("at rest")
    reads: list[str] = []
    inner = contents._read
    monkeypatch.setattr(contents, "_read", lambda p: (reads.append(p), inner(p))[1])

    def digest() -> str:
        return contents.digests([str(path)], tmp_path / "cache")[0]

    # Noted within two seconds of its last change: it could change again within the same tick.
    first = digest()
    assert digest() == first
    assert len(reads) == 2
    old = time.time_ns() - 10**10
    os.utime(path, ns=(old, old))
    assert digest() == digest() == first
    assert len(reads) == 3
    path.write_text("changed")
    assert digest() != first
    notes = list((tmp_path / "cache" / "contents").iterdir())
    assert len(notes) == 1
    os.utime(path, ns=(old, old))
    notes[0].write_text("{")
    assert digest() == digest() != first


# ---- how it was made does not show --------------------------------------------------------------


@pytest.mark.core
def test_pieces_and_batches_do_not_show(tmp_path, monkeypatch) -> None:
    path = corpus(tmp_path)
    read(path, tmp_path / "one")
    monkeypatch.setattr(streams, "PIECE", 777)
    read(path, tmp_path / "many")
    assert raw(tmp_path / "one") == raw(tmp_path / "many")


def test_the_number_of_workers_does_not_show(tmp_path, monkeypatch) -> None:
    path = corpus(tmp_path, 2000)
    tokenizer = tokenizers.load(str(hugging_face(tmp_path / "t")))
    monkeypatch.setattr(streams, "PIECE", 40_000)
    monkeypatch.setattr(building, "PIECE", 40_000)
    monkeypatch.setattr(building, "IN_PROCESS", 0)
    started: list[int] = []
    inner = building._in_processes
    monkeypatch.setattr(building, "_in_processes", lambda *a: (started.append(a[-1]), inner(*a))[1])
    for workers in (1, 3):
        read(path, tmp_path / str(workers), tokenizer, workers=workers)
    assert started == [3]
    assert raw(tmp_path / "1") == raw(tmp_path / "3")


def test_errors_of_workers_name_file_and_row(tmp_path, monkeypatch) -> None:
    path = corpus(tmp_path, 300)
    path.write_bytes(path.read_bytes() + b'{"text": 3}\n')
    monkeypatch.setattr(streams, "PIECE", 20_000)
    monkeypatch.setattr(building, "PIECE", 20_000)
    monkeypatch.setattr(building, "IN_PROCESS", 0)
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 301: field 'text' is int 3"):
        read(path, tmp_path / "cache", workers=2)
    assert not folders(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob("*.tmp-*"))


def test_a_worker_does_not_import_jax() -> None:
    """That would take seconds and memory in each of them, and may touch an accelerator."""
    code = (
        "import sys, jaxpar.data.building, jaxpar.data.formats.text, jaxpar.data.formats.jsonl, "
        "jaxpar.data.formats.parquet, jaxpar.data.formats.arrayrecord, jaxpar.data.formats."
        "huggingface, jaxpar.data.formats.megatron, jaxpar.data.formats.nanogpt, datasets, "
        "array_record.python.array_record_module, sentencepiece, tokenizers; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('jax', 'jaxlib', 'grain')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---- damage -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.core
@pytest.mark.parametrize("damage", [flip, shorten, Path.unlink])
@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "mask.bin", "meta.json"])
def test_damage_is_found_said_and_made_good(tmp_path, counting, damage, name: str) -> None:
    path = corpus(tmp_path, 50)
    good = content(read(path, tmp_path / "cache", counting)[0])
    whole = raw(tmp_path / "cache")
    (place,) = folders(tmp_path / "cache")
    damage(place / name)
    Counting.calls = 0
    store, said = read(path, tmp_path / "cache", counting)
    assert Counting.calls > 0
    assert content(store) == good
    assert len(said) == 1
    assert name in said[0]
    assert "is damaged" in said[0]
    assert (place.parent / f"{place.name}.damaged").is_dir()
    assert raw(tmp_path / "cache") == whole
    # Again, where an earlier one was set aside already.
    damage(place / name)
    assert content(read(path, tmp_path / "cache", counting)[0]) == good


def test_large_caches_are_read_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sealed, "BIG", 10)
    path = corpus(tmp_path, 50)
    read(path, tmp_path / "cache")
    (place,) = folders(tmp_path / "cache")
    reads: list[Path] = []
    inner = sealed._crc32
    monkeypatch.setattr(sealed, "_crc32", lambda p, pool: (reads.append(p), inner(p, pool))[1])
    read(path, tmp_path / "cache")
    assert reads == []
    os.utime(place / "tokens.bin")  # somebody was there
    read(path, tmp_path / "cache")
    assert len(reads) == 3
    time.sleep(0.01)
    flip(place / "tokens.bin")
    _, said = read(path, tmp_path / "cache")
    assert "tokens.bin has other content" in said[0]


# ---- disks --------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named(tmp_path) -> None:
    path = corpus(tmp_path, 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the token cache in .*file.*data\.cache"):
        read(path, tmp_path / "file")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, workers: int) -> None:
    """A limit on the size of files, which the kernel enforces, in a process of its own."""
    path = corpus(tmp_path, 3000)
    code = f"""
    import resource, signal
    from jaxpar.data import building, sources, streams, tokenizers
    if __name__ == "__main__":
        streams.PIECE = building.PIECE = 100_000
        building.IN_PROCESS = 0
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        sources.read({str(path)!r}, tokenizers.load("bytes"), cache={str(tmp_path / "cache")!r},
                     workers={workers})
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert out.returncode == 1
    last = out.stderr.strip().splitlines()[-1]
    assert "DataError: cannot write the token cache in" in last
    assert os.strerror(errno.EFBIG) in last
    assert sorted(p.suffix for p in (tmp_path / "cache" / "tokens").iterdir()) == [".lock"]


# ---- several processes --------------------------------------------------------------------------

BUILDER = """
import sys
from jaxpar.data import building, sources, streams, tokenizers
if __name__ == "__main__":
    streams.PIECE = building.PIECE = 20_000
    building.IN_PROCESS = 0
    source, cache, workers = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    store, _ = sources.read(
        source, tokenizers.load("bytes"), cache=cache, heldout=False, workers=int(workers)
    )
    print(store.fingerprint, len(store.tokens))
"""


@pytest.fixture
def builder(tmp_path):
    """Starts processes that wait for a line before they build."""
    script = tmp_path / "builder.py"
    script.write_text(BUILDER)
    running: list[subprocess.Popen[str]] = []

    def start(source: Path, folder: Path, workers: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, script, source, folder, str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_two_processes_at_once_make_one_cache(tmp_path, builder) -> None:
    path = corpus(tmp_path, 1000)
    both = [builder(path, tmp_path / "cache", 1) for _ in range(2)]
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    outs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outs[0][-1] == outs[1][-1]
    assert len(folders(tmp_path / "cache")) == 1
    store, _ = read(path, tmp_path / "clean")
    assert outs[0][-1] == f"{store.fingerprint} {len(store.tokens)}"


def test_the_second_waits_and_uses_what_the_first_made(tmp_path, counting) -> None:
    path = corpus(tmp_path, 50)
    begun, go = threading.Event(), threading.Event()

    class Slow(Counting):
        def encode_batch(self, texts):
            """`encode` of each text."""
            begun.set()
            assert go.wait(30)
            return super().encode_batch(texts)

    said: list[str] = []

    def second() -> None:
        sources.read(str(path), counting, cache=str(tmp_path / "cache"), say=said.append)

    first = threading.Thread(target=lambda: read(path, tmp_path / "cache", Slow()))
    waiting = threading.Thread(target=second)
    first.start()
    assert begun.wait(30)
    waiting.start()
    while not said and waiting.is_alive():
        time.sleep(0.005)
    go.set()
    first.join(30)
    waiting.join(30)
    assert len(said) == 1
    assert "waiting for another process" in said[0]
    assert Counting.calls == 1


def test_a_builder_that_is_killed_leaves_nothing_that_counts(tmp_path, builder) -> None:
    """At several moments of a build, with and without workers."""
    path = corpus(tmp_path, 3000)
    clean, _ = read(path, tmp_path / "clean")
    folder = tmp_path / "cache"
    pick = random.Random(1)
    interrupted = 0
    for workers in (1, 2):
        process = builder(path, tmp_path / f"timed{workers}", workers)
        begin = time.monotonic()
        process.communicate("\n", timeout=60)
        taken = time.monotonic() - begin
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            process = builder(path, folder, workers)
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(pick.uniform(0.1, 0.8) * taken)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            interrupted += not (folder / "tokens").exists() or not folders(folder)
            _check_rebuild(path, folder, clean)
    assert interrupted > 0


def _check_rebuild(path: Path, folder: Path, clean: TokenStore) -> None:
    again, said = read(path, folder)
    assert content(again) == content(clean)
    assert said == []
    assert sorted(p.suffix for p in (folder / "tokens").iterdir()) == ["", ".lock"]


def test_workers_end_with_the_process_that_started_them(tmp_path, builder) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("children are found under /proc")
    path = corpus(tmp_path, 30_000)
    process = builder(path, tmp_path / "cache", 2)
    process.stdin.write("\n")
    process.stdin.flush()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    workers: list[str] = []
    while len(workers) < 3 and time.monotonic() < deadline:  # and the resource tracker
        workers = children.read_text().split()
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(workers) >= 3
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


class Dying(tokenizers.Bytes):
    """Ends its process, as the system does when memory runs out."""

    def encode_batch(self, texts):
        """Nothing."""
        os._exit(9)


def test_a_worker_that_dies_is_an_error_and_no_hang(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(building, "IN_PROCESS", 0)
    monkeypatch.setattr(building, "PIECE", 20_000)
    monkeypatch.setattr(streams, "PIECE", 20_000)
    with pytest.raises(DataError, match=r"ended without a word.*data\.workers"):
        read(corpus(tmp_path), tmp_path / "cache", Dying(), workers=2)
    assert sorted(p.suffix for p in (tmp_path / "cache" / "tokens").iterdir()) == [".lock"]


# ---- progress and memory ------------------------------------------------------------------------


def test_progress_is_shown_when_it_takes_long(monkeypatch) -> None:
    said: list[str] = []
    with progress.shown("reading", 10_000_000, said.append) as advance:
        advance(5_000_000)
    assert said == []
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.shown("reading", 10_000_000, said.append) as advance:
        time.sleep(0.01)
        advance(5_000_000)
        advance(5_000_000)
    assert len(said) == 2
    assert said[0].startswith("reading: 5 of 10 MB, ")
    assert said[1].startswith("reading: 10 MB in 0 s, ")


def test_on_a_terminal_there_is_a_bar(monkeypatch) -> None:
    out = io.StringIO()
    terminal = rich.console.Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(progress.rich.console, "Console", lambda stderr: terminal)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    said: list[str] = []
    with progress.shown("reading", 10_000_000, said.append) as advance:
        advance(5_000_000)
        advance(5_000_000)
    assert "reading" in out.getvalue()
    assert "10.0/10.0 MB" in out.getvalue()
    assert len(said) == 1  # what it took, when it is done


def test_memory_does_not_grow_with_the_corpus(tmp_path) -> None:
    """A file of 160 MB in one process, against one of 16 MB: the difference is noise."""
    code = """
    import re, sys
    from jaxpar.data import building, sources, tokenizers
    if __name__ == "__main__":
        store, _ = sources.read(sys.argv[1], tokenizers.load("bytes"), cache=sys.argv[2],
                                heldout=False, workers=1, say=lambda line: None)
        # Of this program: ru_maxrss would begin with that of the process that started it.
        status = open("/proc/self/status").read()
        print(len(store.tokens), int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    peaks = []
    for megabytes in (16, 160):
        path = tmp_path / f"{megabytes}.txt"
        line = b"a line of text that is fifty bytes long, nearly...\n"
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(line * (1_000_000 // len(line)))
        command = [sys.executable, script, path, tmp_path / "cache"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(out[0]) == path.stat().st_size + 1
        peaks.append(int(out[1]))
        path.unlink()
    # The finished cache is mapped once to be verified, in blocks; nothing else is left to count.
    assert peaks[1] - peaks[0] < 60
    assert np.less(peaks, 700).all()
