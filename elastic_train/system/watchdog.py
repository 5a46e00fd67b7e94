"""A watchdog over a process's own progress: a hung worker reports where and exits, so that the others continue.

Waiting for peers does not count: a rank that waits for a hung one is not hung. The limit is learned from the longest
stretch of work so far, once there was a whole step. There are two watchers. A thread dumps all stacks and ends the
process with the exit code for a hang. An observer, a separate process, catches hangs that hold the interpreter's lock:
the thread sends it signs of life, and it kills the process once no thread has run for longer than the limit.

Both count only time in which the process could run, in small steps: a process that was stopped, alone or with its node,
continues where it was. Whether the others continue without it is their decision.

While it enters a world a process makes no steps: then every storage answer and every wait for peers is progress, and
the time between two of them is short, whatever the size of the state. While it prepares, before it has asked for a
world, whatever computes, reads or writes makes progress: nothing is known about the user's code that runs then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elastic_train.errors import HungError
from elastic_train.system import hang_observer
from rendezvous.orphans import bound_command

T = TypeVar("T")

TIMES_LONGEST = 10.0
LEAST_S, MOST_S = 20.0, 600.0
ENTERING_S = 30.0
"""Least limit in seconds before a world's first step; calls to etcd and storage have shorter deadlines."""
PREPARING_S = 1800.0
"""Longest idle time in seconds before a process asks for a world: another rank may be downloading what it waits for."""
BUSY_SHARE, BUSY_BYTES = 0.01, 65_536
"""Least share of a core, or bytes read and written, between two looks that count as progress while preparing."""
BACKSTOP_S = 5.0
MOST_LOOK_S = 2.0
"""Most seconds that count between two looks, which are a second apart: in more, this process did not run."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """A phase without beats, limited to `times` a step's limit, at least `least_s`; `unknown_s` before any step."""

    least_s: float
    unknown_s: float
    times: float = 1.0


_PREPARING = _Stage(MOST_S, PREPARING_S, TIMES_LONGEST)
_ENTERING = _Stage(ENTERING_S, ENTERING_S)
_FIRST = _Stage(ENTERING_S, MOST_S)
_WARMING = _Stage(ENTERING_S, MOST_S, TIMES_LONGEST)
_COPYING = _LEAVING = _WAITING = _Stage(MOST_S, MOST_S)


class _Resting:
    """A wait, several per step: not a generator, which costs ten times as much."""

    __slots__ = ("_was_working", "_watchdog")

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def __enter__(self) -> None:
        self._watchdog._learn()
        self._was_working, self._watchdog._since = self._watchdog._since is not None, None

    def __exit__(self, *error: object) -> None:
        self._watchdog._since = time.monotonic() if self._was_working else None


class Watchdog:
    """Watches one process; `limit_s` is the longest stretch of work without progress, None to learn it."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._fixed_s = limit_s
        self._longest_s, self._has_stepped = 0.0, False
        self._since: float | None = None
        self._stage: _Stage | None = None
        self._thread: threading.Thread | None = None
        self._observer: Observer | None = None
        self._seen: float | None = None
        self._seen_at = self._worked_s = 0.0
        """Stretch of work at the last look, the look's time, and the seconds worked by then."""
        self._work_before = (0.0, 0)
        self._arming = threading.Lock()
        self._is_closed = False

    @property
    def limit_s(self) -> float:
        """Current limit in seconds on work without progress."""
        known_s = self._fixed_s
        if known_s is None and self._has_stepped:
            known_s = min(MOST_S, max(LEAST_S, TIMES_LONGEST * self._longest_s))
        stage = self._stage
        if stage is None:
            return MOST_S if known_s is None else known_s
        return max(stage.least_s, stage.unknown_s if known_s is None else stage.times * known_s)

    def beat(self) -> None:
        """Report progress; work continues."""
        self._learn()
        was_working = self._since is not None
        self._since = time.monotonic()  # before the stage: the watcher must not measure an old stretch by a new limit
        was_staged, self._stage = self._stage is not None, None
        self._has_stepped |= was_working and not was_staged
        self._start()
        if was_staged:
            self._arm()

    def prepare(self) -> None:
        """Report that this process begins to load its data and model, before it asks for a world."""
        self._work_before = _work_done()
        self._begin(_PREPARING)

    def warm_up(self) -> None:
        """Report a first batch before there is a world: it loads and compiles what steps need."""
        self._begin(_WARMING)

    def enter(self) -> None:
        """Report that a world begins: up to the first batch, `moved` and waits are progress."""
        self._begin(_ENTERING)

    def await_first(self) -> None:
        """Report that the first batch is requested, whose duration is unknown."""
        self._begin(_FIRST)

    def leave(self) -> None:
        """Report that a world ends; trackers and results take their time."""
        self._begin(_LEAVING)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Allow the longest limit inside: a large state is copied, the first time to fresh memory."""
        if self._since is None:
            yield
            return
        self._learn()
        self._begin(_COPYING)
        try:
            yield
        finally:
            self._since = time.monotonic()  # before the stage, as in `beat`
            self._stage = None
            self._arm()

    def moved(self) -> None:
        """Report progress of a stage, from any thread; between steps, only steps are progress."""
        if self._stage is not None and self._since is not None:
            self._since = time.monotonic()

    def _begin(self, stage: _Stage) -> None:
        self._since, self._stage = time.monotonic(), stage
        self._start()
        self._arm()

    def beating(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; each is progress."""
        for item in items:
            self.beat()
            yield item

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the time inside: it is a peer's, or has its own limit."""
        return _Resting(self)

    def _learn(self) -> None:
        if self._since is not None and self._stage is None:
            self._longest_s = max(time.monotonic() - self._since, self._longest_s)

    def rest(self) -> None:
        """Stop counting until the next beat; meanwhile a process may be frozen for the longest limit."""
        self._since, self._stage = None, _WAITING
        if self._thread is not None:
            self._arm()

    def close(self) -> None:
        """Stop watching for good: the interpreter's shutdown may take its time."""
        with self._arming:
            self._is_closed, self._since = True, None
            if self._observer is not None:
                self._observer.close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        self._begin_to_observe()
        while not self._is_closed:
            self._arm()
            time.sleep(min(1.0, self.limit_s / 4))
            self.look()

    def look(self) -> None:
        """End the process if it has worked longer than the limit without progress; called by the thread."""
        limit_s = self.limit_s  # first: a stretch that begins meanwhile is too short for any limit
        if self._stage is _PREPARING:
            self._notice_work()
        since, now = self._since, time.monotonic()
        if since is not None:
            before_s = self._worked_s if since == self._seen else 0.0
            self._worked_s = before_s + min(MOST_LOOK_S, now - max(since, self._seen_at))
        self._seen, self._seen_at = since, now
        if since is not None and self._worked_s > limit_s:
            self._end(self._worked_s)

    def _notice_work(self) -> None:
        """Count what this process has computed, read or written since the last look as progress."""
        before, self._work_before = self._work_before, _work_done()
        elapsed_s = max(0.0, time.monotonic() - self._seen_at)
        cpu_s, num_bytes = (now - then for now, then in zip(self._work_before, before, strict=True))
        if cpu_s > BUSY_SHARE * elapsed_s or num_bytes > BUSY_BYTES:
            self.moved()

    def _begin_to_observe(self) -> None:
        with self._arming:
            if self._is_closed:
                return
            try:
                self._observer = Observer()
            except OSError as error:
                with contextlib.suppress(ValueError, OSError):
                    sys.stderr.write(f"warning: a hang in native code would not be noticed: no observer: {error}\n")

    def _arm(self) -> None:
        with self._arming:
            if self._observer is not None and not self._is_closed:
                self._observer.alive(self.limit_s + BACKSTOP_S)

    def _end(self, stuck_s: float) -> None:
        with contextlib.suppress(ValueError, OSError):
            sys.stderr.write(
                f"error: no progress for {stuck_s:.0f} s (limit {self.limit_s:.0f} s): this process hangs and exits; "
                "the stacks of its threads:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
        os._exit(HungError.exit_code)


def _work_done() -> tuple[float, int]:
    """Return the CPU seconds of this process, and the bytes that it has read and written."""
    num_bytes = 0
    with contextlib.suppress(OSError), Path("/proc/self/io").open() as file:
        num_bytes = sum(int(line.split()[1]) for line in file if line.startswith(("rchar:", "wchar:")))
    return time.process_time(), num_bytes


DUMP_SIGNAL = signal.SIGRTMAX
READ_BY_THE_LOADER = ("LD_LIBRARY_PATH",)
"""Variables without which this interpreter may not find its own library, e.g. one from an environment module."""
ENDS_WITHIN_S = 1.0


class Observer:
    """A process that ends this one if `alive` is not called for too long; raise OSError if it cannot be started.

    It ends with this process, even a stopped one, or on `close`.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            bound_command(
                sys.executable, "-I", "-S", hang_observer.__file__, str(os.getpid()), str(_dump_at_a_signal())
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={name: os.environ[name] for name in READ_BY_THE_LOADER if name in os.environ},
            cwd="/",
        )
        assert self._process.stdin is not None, "it was asked for"
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def alive(self, limit_s: float) -> None:
        """Send a sign of life, with the most seconds until the next one."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the observer is stopped, or was killed
            os.write(self._pipe, f"{limit_s:.3f}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)


def _dump_at_a_signal() -> int:
    """Let a signal write all threads' stacks to stderr, and return its number; 0 if there is no stderr."""
    try:
        faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)
    except (ValueError, OSError, AttributeError, RuntimeError):
        return 0
    return int(DUMP_SIGNAL)
