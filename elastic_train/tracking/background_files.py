"""Files that training writes and never waits for: a thread opens them, appends lines and replaces small files.

Whatever a folder is (read-only, full, away with its server), no call here raises or blocks. Calls return before
anything is written; the thread wakes at once, so a SIGKILL costs the lines of its last milliseconds. One thread serves
all files of a process, in the order of the calls: a folder that hangs holds up one thread and a bounded number of
bytes, however many worlds come and go meanwhile, and what was queued is written when it answers again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from elastic_train.system.atomic_files import write_atomically
from rendezvous.waiting import Call, GivenUp, begin

log = logging.getLogger(__name__)

T = TypeVar("T")
Act = Callable[[], None]

MOST_BYTES = 8 << 20
"""What may wait for the thread: some ten thousand steps' lines."""
ANSWER_S = 2.0
"""How long training waits for a look at the run's folder, which it can do without."""
IDLE_S = 5.0
OPEN_AGAIN_S = 1.0
_FULL = "it does not answer, and too much waits for it"


class BackgroundFiles:
    """The thread that writes a process's own files below `run.dir`; it begins with the first call, and ends when idle.

    The first failure is logged, and none after it: training continues, and what could not be written is lost.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._waiting: SimpleQueue[Act] = SimpleQueue()
        self._num_bytes_taken = self._num_bytes_done = 0
        self._putting = threading.Lock()  # the thread takes it only to end
        self._is_served = self._has_reported = False
        self._awaited: threading.Event | None = None
        self._look: Call[object] | None = None
        self._open: set[LineFile] = set()
        """The files that are open; for the thread alone."""

    def put(self, act: Act) -> None:
        """Let the thread do something after all that was put before."""
        with self._putting:
            self._waiting.put(act)
            if not self._is_served:
                self._is_served = True
                threading.Thread(target=self._serve, name="run's files", daemon=True).start()

    def take(self, num_bytes: int) -> bool:
        """Make room for bytes that are to wait for the thread, which gives them back; False if there is none."""
        with self._putting:
            if self._num_bytes_taken - self._num_bytes_done + num_bytes > self._most_bytes:
                return False
            self._num_bytes_taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return the room of bytes that have been dealt with; for the thread alone."""
        self._num_bytes_done += num_bytes

    def lines(self, path: Path, most_bytes: int | None = None) -> LineFile:
        """Return a file to append to; it is opened for its first line."""
        return LineFile(self, path, most_bytes)

    def replace(self, path: Path, text: str) -> None:
        """Replace a small file in one step."""
        self.attempt(path, lambda: write_atomically(path, text))

    def attempt(self, path: Path, act: Act) -> None:
        """Let the thread do something to a file or folder; an OSError is reported."""

        def attempted() -> None:
            try:
                act()
            except OSError as error:
                self.report(path, error)

        self.put(attempted)

    def reopen_removed(self) -> None:
        """Let the thread begin the files again that somebody has removed or moved; returns at once."""
        self.put(self._reopen_removed)

    def _reopen_removed(self) -> None:
        for file in tuple(self._open):
            file.reopen_if_removed()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put so far is done, `timeout_s` seconds at most; return whether it is.

        After a wait in vain, later ones do not wait until the thread has caught up: a folder that hangs costs it once.
        """
        was_in_vain = self._awaited is not None and not self._awaited.is_set()
        done = threading.Event()
        self.put(done.set)
        if done.wait(0.0 if was_in_vain else timeout_s):
            return True
        self._awaited = done
        return False

    def ask(self, look: Callable[[], T], otherwise: T) -> T:
        """Return what a look at a folder finds; `otherwise` if it fails, or does not answer within `ANSWER_S`.

        While one look hangs no other is begun.
        """
        if self._look is not None and not self._look.ended.is_set():
            return otherwise
        call = self._look = begin("look at the run's folder", look)
        with contextlib.suppress(GivenUp, OSError):
            return call.result(ANSWER_S)  # type: ignore[return-value]
        return otherwise

    def report(self, path: Path, why: object) -> None:
        """Log the first failure of this process."""
        if not self._has_reported:
            self._has_reported = True
            log.warning(
                "%s cannot be written (%s): training continues, and what this process has to say (history, metrics) "
                "has gaps from here on; make room on the disk, or make the folder writable",
                path,
                why,
            )

    def _serve(self) -> None:
        while True:
            try:
                act = self._waiting.get(timeout=IDLE_S)
            except Empty:
                with self._putting:
                    if self._waiting.empty():
                        self._is_served = False
                        return
                continue
            try:
                act()
            except Exception:  # the thread serves every other file, too
                log.exception("a file of the run could not be written")


class LineFile:
    """A file to which whole lines are appended; a line that cannot be written is counted in `num_lost`.

    With `most_bytes` it is in parts of half of that, X.jsonl, X.p000001.jsonl and so on, of which the newest two are
    kept. Every part but the first begins with the lines that are to be said `again`.
    """

    def __init__(self, files: BackgroundFiles, path: Path, most_bytes: int | None = None) -> None:
        self.path, self.num_lost = path, 0
        self._files, self._most_bytes = files, most_bytes
        # Only bytes: closures that pile up would make the garbage collector walk the whole process, for 0.2 s.
        self._lines: deque[tuple[bytes, bytes | None]] = deque()
        self._act: Act = self._write_all
        self._file: int | None = None
        self._part = self._size = 0
        self._again: list[bytes] = []
        self._is_torn = False
        self._refused_at: float | None = None

    def append(self, line: bytes, again: bytes | None = None) -> None:
        """Append a line, without its end, after all earlier ones; returns at once. Later parts begin with `again`."""
        if not self._files.take(len(line)):
            self._lose(_FULL)
            return
        self._lines.append((line, again))
        self._files.put(self._act)  # one for each line, though one writes all: a caller may be interrupted in between

    def close(self) -> None:
        """Close the file after its last line; returns at once, and may be called again."""
        self._files.put(self._close)

    def _write_all(self) -> None:
        """Write the lines that wait, on the thread."""
        while self._lines:
            line, again = self._lines.popleft()
            self._attempt(line, again)
            self._files.give_back(len(line))

    def _attempt(self, line: bytes, again: bytes | None) -> None:
        """Write a line; a failed opening is not repeated for every line."""
        try:
            if self._is_open(len(line)):
                self._write(line)
            else:
                self.num_lost += 1
        except OSError as error:
            self._lose(error)
        if again is not None:
            self._again.append(again)

    def _is_open(self, num_bytes: int) -> bool:
        """Have the part open that the next line belongs to; False if that was refused a moment ago."""
        if self._most_bytes is not None and self._size and self._size + num_bytes > self._most_bytes // 2:
            self._close()
            self._part, self._size = self._part + 1, 0
            if self._part > 1:
                self._path_of(self._part - 2).unlink(missing_ok=True)
        if self._file is None:
            now = time.monotonic()
            if self._refused_at is not None and now - self._refused_at < OPEN_AGAIN_S:
                return False
            self._refused_at = now
            self._open()
            self._refused_at = None
        return True

    def _open(self) -> None:
        path = self._path_of(self._part)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._file).st_size
        self._files._open.add(self)
        self._is_torn = self._size > 0
        for line in self._again if self._size == 0 else ():
            self._write(line)

    def reopen_if_removed(self) -> None:
        """Begin the part again, on the thread, if its name does not lead to it any more."""
        path = self._path_of(self._part)
        assert self._file is not None, "it is open"
        try:
            if os.path.samestat(os.fstat(self._file), path.stat()):
                return
        except FileNotFoundError:
            pass
        except OSError as error:
            self._files.report(path, error)
            return
        log.warning("%s was removed while this process writes it: it is begun again, without its earlier lines", path)
        self._close()
        try:
            self._open()
        except OSError as error:
            self._files.report(path, error)

    def _path_of(self, part: int) -> Path:
        return self.path if part == 0 else self.path.with_name(f"{self.path.stem}.p{part:06d}{self.path.suffix}")

    def _write(self, line: bytes) -> None:
        assert self._file is not None, "it is open"
        # Readers skip an empty line; it keeps this line whole if the one before it was torn.
        content = b"\n" * self._is_torn + line + b"\n"
        self._is_torn = True
        num_written = os.write(self._file, content)
        self._size += num_written
        if num_written != len(content):
            raise OSError(f"a line was cut after {num_written} bytes; the disk is full")
        self._is_torn = False

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            self._files._open.discard(self)
            with contextlib.suppress(OSError):
                os.close(file)

    def _lose(self, why: object) -> None:
        self.num_lost += 1
        self._files.report(self.path, why)
