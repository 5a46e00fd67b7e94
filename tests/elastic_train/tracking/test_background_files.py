"""Files that a thread writes: no folder, whatever is wrong with it, holds up or ends who has something to write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic_train.tracking import background_files
from elastic_train.tracking.background_files import BackgroundFiles
from tests.conftest import PATIENCE_S, eventually, no_thread
from tests.elastic_train.tracking.unqueued import Unqueued

LINES = [b"line %d" % number for number in range(1000)]
ALL_S = PATIENCE_S


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A file that nobody can open, as on a server that is away, until `thaw` does from the other side."""
    os.mkfifo(tmp_path / "lines")
    return tmp_path / "lines"


def thaw(fifo: Path, num_lines: int) -> list[bytes]:
    with fifo.open("rb") as file:
        return [file.readline().rstrip(b"\n") for _ in range(num_lines)]


def test_lines_come_in_order_and_whole(tmp_path: Path) -> None:
    """All files of a process are written by one thread; a flush says when what was put is there."""
    files = BackgroundFiles()
    first, second = files.lines(tmp_path / "a" / "first"), files.lines(tmp_path / "b" / "second")
    for line in LINES:
        first.append(line)
        second.append(line)
    first.close()
    files.replace(tmp_path / "c" / "text", "text")
    assert files.flush(ALL_S)
    assert first.path.read_bytes().splitlines() == second.path.read_bytes().splitlines() == LINES
    assert (tmp_path / "c" / "text").read_text() == "text"


def test_a_file_that_hangs_holds_up_nobody(fifo: Path) -> None:
    """Nothing blocks while a file cannot even be opened; all comes, in order, when it can."""
    files = BackgroundFiles()
    lines = files.lines(fifo)
    for line in LINES:
        lines.append(line)
    assert not files.flush(0.05)
    assert not files.flush(ALL_S), "who has waited in vain does not wait again"
    assert thaw(fifo, len(LINES)) == LINES
    while not files.flush(ALL_S):  # until the thread has noted that it has caught up
        pass


def test_what_waits_is_bounded(fifo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines that find the queue full are lost, counted, and reported once; later ones come again."""
    files = BackgroundFiles(most_bytes=100)
    lines = files.lines(fifo)
    for line in LINES[:20]:
        lines.append(line)
    assert lines.num_lost == 5  # ten lines have six bytes, the others seven: 15 of them fit
    assert caplog.text.count("does not answer") == 1
    assert thaw(fifo, 15) == LINES[:15]
    assert files.flush(ALL_S)


def test_one_thread_hangs_however_many_files_there_are(fifo: Path) -> None:
    """Worlds that come and go while a folder hangs leave no thread each."""
    files = BackgroundFiles()
    before = {*threading.enumerate()}  # of earlier tests, which may have threads of any name that still begin or end
    for number in range(20):
        lines = files.lines(fifo if number == 0 else fifo.with_name(str(number)))
        lines.append(b"form")
        lines.close()
    assert [thread.name for thread in threading.enumerate() if thread not in before].count("run's files") == 1
    assert thaw(fifo, 1) == [b"form"] and files.flush(ALL_S)
    assert fifo.with_name("19").read_bytes() == b"form\n"


def test_a_look_that_hangs_is_given_up_once(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is late is unknown, and while the folder hangs nobody waits again."""
    monkeypatch.setattr(background_files, "ANSWER_S", 0.05)
    files, looks = BackgroundFiles(), list[int]()

    def look() -> bytes:
        looks.append(1)
        return fifo.read_bytes()

    assert files.ask(look, b"unknown") == b"unknown"
    eventually(lambda: looks != [], "the look")
    assert files.ask(look, b"unknown") == b"unknown" and len(looks) == 1
    with fifo.open("wb") as file:
        file.write(b"known")
    monkeypatch.setattr(background_files, "ANSWER_S", ALL_S)
    while files.ask(lambda: b"again", b"unknown") != b"again":
        pass
    assert files.ask(lambda: fifo.with_name("none").read_bytes(), b"unknown") == b"unknown"


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever cannot be opened below it, its lines are lost; when it can, they come."""
    (tmp_path / "run").write_text("not a folder")
    files = Unqueued()
    many = [files.lines(tmp_path / "run" / str(number)) for number in range(3)]
    for lines in many:
        lines.append(b"lost")
        lines.append(b"lost")
        lines.close()
    files.replace(tmp_path / "run" / "config.yaml", "")
    assert [lines.num_lost for lines in many] == [2, 2, 2]
    assert len(caplog.records) == 1 and "make room on the disk" in caplog.text
    (tmp_path / "run").unlink()
    again = files.lines(tmp_path / "run" / "4")
    again.append(b"kept")
    assert again.path.read_bytes() == b"kept\n"


def test_a_disk_that_is_full_for_a_while_costs_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that is refused, or cut, is counted; what comes later is whole again."""
    lines = Unqueued().lines(tmp_path / "lines")
    lines.append(b"one")
    write = os.write

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        lines.append(b"two")
        patch.setattr(os, "write", lambda file, content: write(file, content[:2]))
        lines.append(b"three")
    lines.append(b"four")
    assert lines.num_lost == 2 and len(caplog.records) == 1
    assert lines.path.read_bytes() == b"one\n\nt\nfour\n"


@pytest.mark.slow
def test_a_kill_costs_the_lines_of_the_last_moment(tmp_path: Path) -> None:
    """Lines that were appended a moment before a SIGKILL are whole in the file."""
    program = (
        "import sys; from pathlib import Path\n"
        "from elastic_train.tracking.background_files import BackgroundFiles\n"
        f"lines = BackgroundFiles().lines(Path({str(tmp_path / 'lines')!r}))\n"
        "for number in range(200): lines.append(b'line %d' % number)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    (tmp_path / "lines").touch()
    eventually(lambda: (tmp_path / "lines").read_bytes().count(b"\n") == 200, "all lines are written")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "lines").read_bytes().splitlines() == LINES[:200]


def test_a_thread_that_cannot_be_started_costs_nothing_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the step that had a line to write, and no line of the process was written after it."""
    files = BackgroundFiles()
    lines = files.lines(tmp_path / "lines")
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        lines.append(LINES[0])
        assert files.ask(lambda: 1, 0) == 0
    lines.append(LINES[1])
    assert files.flush(ALL_S) and lines.path.read_bytes().splitlines() == LINES[:2]
