"""Files written with O_DIRECT hold the written bytes, or raise an error."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.stores import disk
from elastic_train.checkpoint.stores.disk import DirectFile, Runs

pytestmark = pytest.mark.slow

RUN_BYTES = 8192


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RUN_BYTES", RUN_BYTES)


class Calls:
    """Counts the calls of `os.pwrite`, and makes some fail."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int, failing: range) -> None:
        self._code, self._failing, self.num_made = code, failing, 0
        self._write = os.pwrite
        patch.setattr(os, "pwrite", self._count)

    def _count(self, descriptor: int, content: memoryview, offset: int) -> int:
        self.num_made += 1
        if self.num_made in self._failing:
            raise OSError(self._code, "injected")
        return self._write(descriptor, content, offset)


sizes = st.sampled_from([0, 1, 100, 4095, 4096, 4097, RUN_BYTES - 1, RUN_BYTES, RUN_BYTES + 1, 5 * RUN_BYTES + 7])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sizes, st.booleans()), max_size=6), st.booleans())
def test_bytes_are_written_in_order_whatever_the_piece_sizes(pieces: list[tuple[int, bool]], is_known: bool) -> None:
    """Any piece may be followed by a flush, and the file system may lack direct writes."""
    runs, whole, set_flags = Runs(), b"", fcntl.fcntl

    def without_direct(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return set_flags(descriptor, command, flags)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not is_known:
            patch.setattr(fcntl, "fcntl", without_direct)
        for name in ("first", "second"):  # the second is written from the first one's memory
            path = Path(folder) / name
            with DirectFile(path, runs) as file:
                whole = b""
                for number, (size, is_flushed) in enumerate(pieces):
                    content = bytes([number + 1]) * size
                    assert file.write(content) == size
                    whole += content
                    if is_flushed:
                        file.flush()
                        assert path.read_bytes() == whole
            assert path.read_bytes() == whole


@pytest.mark.parametrize("failing", range(1, 7))
def test_a_full_disk_is_reported(tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails, on any thread, the error is raised before the file counts as written."""
    calls = Calls(monkeypatch, errno.ENOSPC, range(failing, failing + 1))
    with pytest.raises(OSError, match="injected"), DirectFile(tmp_path / "file", Runs()) as file:
        for _ in range(5):
            file.write(bytes(RUN_BYTES))
        file.write(b"the end")
        file.flush()
    assert calls.num_made >= failing


def test_a_refused_direct_write_falls_back_to_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that supports direct writes may refuse one, which then goes through the page cache."""
    Calls(monkeypatch, errno.EINVAL, range(2, 3))
    content = os.urandom(5 * RUN_BYTES + 5)
    with DirectFile(tmp_path / "file", Runs()) as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


def test_an_abandoned_file_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's error is raised unchanged, even if the disk raises another."""
    calls = Calls(monkeypatch, errno.ENOSPC, range(1, 1000))
    with pytest.raises(KeyError), DirectFile(tmp_path / "file", Runs()) as file:
        file.write(b"not wanted")
        raise KeyError
    assert calls.num_made == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fileno())


def test_buffers_are_reused_and_bounded(tmp_path: Path) -> None:
    """Files written one after another, or at once, and closed twice, leave a few different buffers."""
    runs = Runs()
    files = [DirectFile(tmp_path / str(number), runs) for number in range(4)]
    for file in files:
        file.write(bytes(7 * RUN_BYTES))
        file.close()
        file.close()
    assert len(runs._kept) <= disk.MOST_RUNS
    kept = [runs.take() for _ in range(disk.MOST_RUNS)]
    assert len({run.ctypes.data for run in kept}) == disk.MOST_RUNS
    assert [(tmp_path / str(number)).stat().st_size for number in range(4)] == [7 * RUN_BYTES] * 4


def test_a_process_can_end_while_the_disk_hangs(tmp_path: Path) -> None:
    """Saves that hang in a write or in a sync are abandoned: not even the interpreter's exit waits for them."""
    program = f"""
import os, pathlib, threading
from elastic_train.checkpoint.stores import disk
disk.RUN_BYTES = {RUN_BYTES}
hung = threading.Semaphore(0)
def hang(*_):
    hung.release()
    threading.Event().wait()
def save(num_runs):
    real = disk.RealDisk()
    with real.create(pathlib.Path({str(tmp_path)!r}) / str(num_runs)) as file:
        file.write(bytes(num_runs * {RUN_BYTES}))
        real.sync([file], [])
os.pwrite = os.fsync = hang
for num_runs in (0, 7):
    threading.Thread(target=save, args=(num_runs,), daemon=True).start()
    hung.acquire()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0
