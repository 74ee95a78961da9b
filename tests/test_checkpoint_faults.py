"""What can go wrong while a checkpoint is written: said, and the one before stays whole."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy as np
import pytest
from test_checkpoint import assert_same, plain, tree

from jaxpar.checkpoint import CheckpointError, Checkpoints, report

BIG = {"params": {"w": np.random.default_rng(0).normal(size=(1 << 18,)).astype(np.float32)}}


@contextlib.contextmanager
def files_up_to(nbytes: int):
    """No file may grow beyond: a write fails in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def nobody():
    """The rights of a user who owns nothing; root may write to a read-only folder."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that every user may enter."""
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("where", ["wait", "save", "check", "close"])
def test_a_disk_that_is_full_is_said_at_the_next_call(where, tmp_path) -> None:
    """Case C7: an asynchronous failure is not swallowed, the checkpoint before is whole, the part is gone."""
    store = Checkpoints(tmp_path)
    store.save(10, BIG, {})
    store.wait()
    with files_up_to(300_000):
        store.save(20, BIG, {})
        store._thread.join()  # check() never waits: the failure has to be there
        call = {"wait": store.wait, "check": store.check, "close": store.close}.get(
            where, lambda: store.save(30, tree(30), {})
        )
        with pytest.raises(CheckpointError) as error:
            call()
    text = str(error.value)
    assert text.startswith(f"checkpoint of step 20 could not be written to {tmp_path / '20'}: ")
    assert "File too large" in text
    assert text.endswith("; checkpoint 10 is the newest")
    assert [p.name for p in tmp_path.iterdir()] == ["10"]
    assert_same(store.restore(plain(BIG)).state, BIG)
    store.save(30, BIG, {})  # the disk has room again
    store.close()
    assert store.steps() == [10, 30]


def test_a_small_disk_that_is_full(tmp_path) -> None:
    """The same with a file system that has no room, where one can be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        store = Checkpoints(tmp_path)
        store.save(10, BIG, {})
        store.save(20, BIG, {})
        store.save(30, BIG, {})
        with pytest.raises(CheckpointError, match=r"step 30 .*No space left"):
            store.wait()
        assert store.steps() == [10, 20]
        assert_same(store.restore(plain(BIG)).state, BIG)
        store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_may_only_be_read(open_folder) -> None:
    """The run hears of it; what is there can still be read, also where the newest is damaged."""
    store = Checkpoints(open_folder / "checkpoints")
    for step in (10, 20):
        store.save(step, tree(step), {})
    store.wait()
    (store.folder / "20" / "meta" / "metadata").write_text("{}")
    store.folder.chmod(0o555)
    with nobody():
        store.save(30, tree(30), {})
        with pytest.raises(CheckpointError, match=r"step 30 could not be written .*Permission"):
            store.wait()
        restored = Checkpoints(store.folder).restore(plain(tree(10)))
    assert restored.step == 10
    assert "it stays under its name: Permission denied" in restored.notes[0]
    store.close()


def test_a_folder_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = Checkpoints(tmp_path / "file")
    store.save(1, tree(1), {})
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        store.wait()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.restore(plain(tree(1)))
    store.close()


def test_old_checkpoints_that_cannot_be_deleted_fail_no_save(tmp_path, monkeypatch) -> None:
    from jaxpar.checkpoint import files

    def refuse(folder, step) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "remove", refuse)
    said: list[str] = []
    store = Checkpoints(tmp_path, keep=1, say=said.append)
    for step in (1, 2):
        store.save(step, tree(step), {})
    store.close()
    assert store.steps() == [1, 2]
    assert said == ["checkpoint 2 is complete, but old ones stay: [Errno 13] Permission denied"]


WRITER = """
    import sys
    import numpy as np
    from jaxpar.checkpoint import Checkpoints

    def tree(step):
        random = np.random.default_rng(step)
        return {name: random.normal(size=(1 << 17,)).astype(np.float32) for name in "abcdefgh"}

    store = Checkpoints(sys.argv[1], keep=2)
    for step in range(1, 1000):
        store.save(step, tree(step), {})
        print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_moment_leaves_a_newest_that_is_whole(seed, tmp_path) -> None:
    """Case C6: SIGKILL in the middle of a save, of its commit or of a deletion."""
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER))
    space: dict = {}
    exec(textwrap.dedent(WRITER).split("store =")[0], space)
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen(
        [sys.executable, script, folder], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    at = 3 + seed
    last = 0
    for line in process.stdout:
        last = int(line)
        if last == at:
            break
    time.sleep(random.Random(seed).uniform(0, 0.15))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    store = Checkpoints(folder, keep=0)
    newest = store.steps()[-1]
    assert newest >= at - 1  # save(at) waited for the one before
    assert report.wrong_leaves(folder, newest) == (8, {})
    expected = space["tree"](newest)
    assert_same(store.restore(plain(expected)).state, expected)
    assert store.restore(plain(expected)).notes == []
    store.save(2000, expected, {})
    store.close()
    assert store.incomplete() == []
