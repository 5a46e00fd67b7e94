"""Files that training writes without waiting: a thread opens them, appends lines and replaces small files.

Whatever the folder's state (read-only, full, server away), no call here raises or blocks. Calls return before anything
is written; the thread wakes at once, so a SIGKILL costs the lines of the last milliseconds. One thread serves all files
of a process, in call order: a folder that hangs costs one thread and a bounded number of bytes, however many worlds
come and go, and queued lines are written when it answers again.
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

from elastic_train.system.files import write_atomically
from rendezvous.waiting import Call, GivenUp, begin

log = logging.getLogger(__name__)

T = TypeVar("T")
Act = Callable[[], None]

MOST_BYTES = 8 << 20
"""Most bytes queued for the thread: lines of some ten thousand steps."""
ANSWER_S = 2.0
"""Seconds that training waits for an optional look at the run's folder."""
IDLE_S = 5.0
OPEN_AGAIN_S = 1.0
_FULL = "it does not answer, and too much waits for it"


class BackgroundFiles:
    """The thread that writes a process's files below `run.dir`; it starts with the first call, and ends when idle.

    Only the first failure is logged: training continues, and what could not be written is lost.
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
        """Open files; for the thread only."""

    def put(self, act: Act) -> None:
        """Queue an action after all earlier ones."""
        with self._putting:
            self._waiting.put(act)
            if not self._is_served:
                with contextlib.suppress(RuntimeError):  # no thread can be started now; the next call tries again
                    threading.Thread(target=self._serve, name="run's files", daemon=True).start()
                    self._is_served = True

    def take(self, num_bytes: int) -> bool:
        """Reserve bytes in the queue, which the thread returns; False if there is no room."""
        with self._putting:
            if self._num_bytes_taken - self._num_bytes_done + num_bytes > self._most_bytes:
                return False
            self._num_bytes_taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return reserved bytes that have been written; for the thread only."""
        self._num_bytes_done += num_bytes

    def lines(self, path: Path, most_bytes: int | None = None) -> LineFile:
        """Return a file to append to, opened for its first line."""
        return LineFile(self, path, most_bytes)

    def replace(self, path: Path, text: str) -> None:
        self.attempt(path, lambda: write_atomically(path, text))

    def attempt(self, path: Path, act: Act) -> None:
        """Queue an action on a file or folder; an OSError is reported."""

        def attempted() -> None:
            try:
                act()
            except OSError as error:
                self.report(path, error)

        self.put(attempted)

    def reopen_removed(self) -> None:
        """Make the thread restart files that were removed or moved; returns at once."""
        self.put(self._reopen_removed)

    def _reopen_removed(self) -> None:
        for file in tuple(self._open):
            file.reopen_if_removed()

    def flush(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until everything queued so far is done; return True if it is.

        After a timeout, later calls do not wait until the thread has caught up: a folder that hangs costs the wait
        once.
        """
        was_in_vain = self._awaited is not None and not self._awaited.is_set()
        done = threading.Event()
        self.put(done.set)
        if done.wait(0.0 if was_in_vain else timeout_s):
            return True
        self._awaited = done
        return False

    def ask(self, look: Callable[[], T], otherwise: T) -> T:
        """Return the result of a look at a folder; `otherwise` if it fails, or takes longer than `ANSWER_S`.

        While one look hangs no other is started.
        """
        if self._look is not None and not self._look.ended.is_set():
            return otherwise
        with contextlib.suppress(GivenUp, OSError, RuntimeError):  # the latter if no thread can be started
            call = self._look = begin("look at the run's folder", look)
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
            except Exception:  # the thread also serves all other files
                log.exception("a file of the run could not be written")


class LineFile:
    """A file of whole lines, append only; lines that cannot be written are counted in `num_lost`.

    With `most_bytes` it is split into parts of half of that, X.jsonl, X.p000001.jsonl and so on, of which the newest
    two are kept. Every part but the first begins with the `again` lines.
    """

    def __init__(self, files: BackgroundFiles, path: Path, most_bytes: int | None = None) -> None:
        self.path, self.num_lost = path, 0
        self._files, self._most_bytes = files, most_bytes
        # Only bytes: queued closures would make the garbage collector walk the whole process, for 0.2 s.
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
        self._files.put(self._act)  # one per line, though one writes all: the caller may be interrupted in between

    def close(self) -> None:
        """Close the file after its last line; returns at once, and may be called again."""
        self._files.put(self._close)

    def _write_all(self) -> None:
        while self._lines:
            line, again = self._lines.popleft()
            self._attempt(line, again)
            self._files.give_back(len(line))

    def _attempt(self, line: bytes, again: bytes | None) -> None:
        """Write a line; a failed open is not repeated for every line."""
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
        """Open the part of the next line if necessary; return False if that failed a moment ago."""
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
        """Restart the part if its name no longer refers to it; for the thread."""
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
