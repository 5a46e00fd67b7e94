"""The end of a worker: finished, as declared by itself, or otherwise, as described by its agent.

An exit code of 0 does not prove completion: a library that calls `quit()` or `os._exit(0)` has it as well. So a worker
announces its work, and declares it finished at the end, in a page of memory that its agent reads. Until then an exit
code of 0 is a failure. A program that announces nothing is judged by its exit code.

Without an agent nobody reads the page. So Python's own `os._exit` is guarded in between, in the announcing process.

A killed worker cannot report. So while it lives it names, in the page, a file in which its agent notes how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn, Protocol

PAGE = "ELASTIC_WORKER_PAGE"
"""Environment variable with the path of a worker's page; removed once the worker has read it."""
ANNOUNCED, FINISHED = b"announced", b"finished!"
UNFINISHED_CODE = 70
"""Replaces exit code 0 of a worker that has announced its work and not finished it (sysexits: EX_SOFTWARE)."""
FAILURE_CODE = 1
IN_GOOD_ORDER = frozenset({0, 74, 75, 77, 79})
"""Exit codes that agents and schedulers accept as an orderly exit."""
LONGEST_PAGE = 1 << 14
NOTED_WITHIN_S = 2.0
"""Seconds that an ending agent waits for its notes: the folder may hang."""
RECENT_S = 15.0
"""Seconds for which a process that the kernel kills for memory may take to end."""
_NOTES = "note of an end"
_REASONS = {
    signal.SIGBUS: "memory behind a mapped file is gone: shared memory (/dev/shm) is full, or a file was cut",
    signal.SIGILL: "an instruction that this CPU does not have: a library was built for another one",
    signal.SIGKILL: "by the system, or by hand",
}


class Process(Protocol):
    """The interface used of a worker's process, e.g. a Popen."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Handler(Protocol):
    """A worker as TorchElastic has it."""

    @property
    def proc(self) -> Process: ...

    def close(self, death_sig: signal.Signals | None = None) -> None: ...


class _Work:
    """This process's announcement: its page, and the original `os._exit` while that is guarded."""

    page: Path | None = None
    pid = 0
    note = b""
    where: Callable[[], str] | None = None
    exit_now = staticmethod(os._exit)


def announce(where: Callable[[], str] | None = None) -> None:
    """Announce that this process declares its work finished: until then, ending with 0 is a failure.

    With `where`, which describes the progress, `os._exit` is guarded from now on until `release`.
    """
    path = os.environ.pop(PAGE, None)  # child processes must not use it
    if path is not None:
        _Work.page, _Work.pid = Path(path), os.getpid()
    _say(ANNOUNCED)
    if where is not None:
        _Work.where, _Work.pid = where, os.getpid()
        os._exit = _guarded_exit


def declare_finished() -> None:
    """Declare the work done: an exit code of 0 counts as success."""
    _say(FINISHED)


def note_end_in(folder: str | Path, name: str, **facts: object) -> None:
    """Make the agent append a JSON line with these facts to <folder>/<name>-<agent>.jsonl, unless this process does so.

    The line has the time as `t`, the `exit_code` (a signal negated) and `why`, the predicate of a sentence about this
    process. It is written for a worker that neither finishes nor leaves in good order, if the folder exists.
    """
    path = Path(folder).absolute() / f"{name}-{os.getppid()}.jsonl"
    _Work.note = json.dumps({"path": str(path), "facts": facts}).encode()
    _say(ANNOUNCED)


def has_noted_end() -> None:
    """Note that this process has recorded its end itself."""
    _Work.note = b""
    _say(ANNOUNCED)


def release() -> None:
    """Stop guarding `os._exit`."""
    _Work.where, os._exit = None, _Work.exit_now


def _say(word: bytes) -> None:
    if _Work.page is not None and _Work.pid == os.getpid():
        with contextlib.suppress(OSError):  # the agent has ended, and this process will
            _Work.page.write_bytes(word + _Work.note)


def _guarded_exit(status: int) -> NoReturn:
    """End this process, but not as if its work were finished; forked children end normally."""
    if _Work.where is None or _Work.pid != os.getpid() or status not in IN_GOOD_ORDER:
        _Work.exit_now(status)
    text = f"error: os._exit({status}) was called {_Work.where()} without finishing: code of the task, or a library\n"
    os.write(2, text.encode())
    _Work.exit_now(FAILURE_CODE)


class Worker:
    """A worker's handler; exit code 0 counts only if the worker has finished what it announced."""

    def __init__(self, start: Callable[[Mapping[str, str]], Handler]) -> None:
        """Start the worker with its own page, named in the environment that `start` adds."""
        self._page = new_page()
        path = "" if self._page is None else f"/proc/{os.getpid()}/fd/{self._page}"
        try:
            self._handler = start({PAGE: path} if path else {})
        except BaseException:
            self._close_page()
            raise
        self._code: int | None = None
        self._kills = RecentMemoryKills()
        self._asked_with: signal.Signals | None = None
        self._named: Mapping[str, Any] | None = None

    @property
    def proc(self) -> Worker:
        return self

    @property
    def pid(self) -> int:
        return self._handler.proc.pid

    def poll(self) -> int | None:
        """Return the exit code, a signal negated, UNFINISHED_CODE for a false 0; None while it runs."""
        if self._code is None and (code := self._handler.proc.poll()) is not None:
            self._code = self._judged(code)
        if self._code is None:
            self._kills.look()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the result of `poll`; raises TimeoutExpired."""
        self._handler.proc.wait(timeout)
        code = self.poll()
        if code is None:
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self._asked_with = death_sig or signal.SIGTERM
        self._handler.close(death_sig)

    def how_it_ended(self) -> str:
        """Describe its end, as the predicate of a sentence."""
        code = self.poll()
        assert code is not None, "it has ended"
        return described(code, self._kills.before)

    def note_that_its_node_leaves(self, why: str) -> None:
        """Add to the note of its end that it is not replaced."""
        note_end(self._named, self.poll() or 0, f"{self.how_it_ended()}, and {why}", node_leaves=True)

    def _judged(self, code: int) -> int:
        code = judged(code, self._page)
        self._named = named_on(self._page)
        if self._asked_with is None:
            note_end(self._named, code, described(code, self._kills.before))
        elif code == -signal.SIGKILL:
            note_end(self._named, code, "was killed by its launcher: it had not left in the time that it was given")
        self._close_page()
        return code

    def _close_page(self) -> None:
        if self._page is not None:
            os.close(self._page)
            self._page = None

    def __del__(self) -> None:
        self._close_page()


def judged(code: int, page: int | None) -> int:
    """Return the exit code of a process with this page: UNFINISHED_CODE for a 0 with unfinished work."""
    said = b"" if page is None else os.pread(page, len(FINISHED), 0)
    return UNFINISHED_CODE if code == 0 and said == ANNOUNCED else code


def named_on(page: int | None) -> Mapping[str, Any] | None:
    """Return a worker's request to `note_end_in`; None if it has recorded its end, finished, or made no request."""
    content = b"" if page is None else os.pread(page, LONGEST_PAGE, 0)
    if content.startswith(ANNOUNCED) and len(content) > len(ANNOUNCED):
        with contextlib.suppress(ValueError):  # it was killed while writing
            return dict(json.loads(content[len(ANNOUNCED) :]))
    return None


def note_end(named: Mapping[str, Any] | None, code: int, how: str, **more: object) -> None:
    """Write the note that a worker requested, on a thread, because the folder may hang."""
    if named is not None and code not in IN_GOOD_ORDER:
        line = {**named["facts"], "t": time.time(), "exit_code": code, "why": how, **more}
        with contextlib.suppress(RuntimeError):  # no thread can be started now
            threading.Thread(target=_append, args=(named["path"], line), name=_NOTES, daemon=True).start()


def await_notes() -> None:
    """Wait briefly for pending notes."""
    deadline = time.monotonic() + NOTED_WITHIN_S
    for thread in threading.enumerate():
        if thread.name == _NOTES:
            thread.join(max(0.0, deadline - time.monotonic()))


def _append(path: str, line: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError), Path(path).open("ab") as file:  # the folder is gone, full or read-only
        file.write(json.dumps(line).encode() + b"\n")


def new_page() -> int | None:
    """Return a page that a child of this process can write to by its path; None if not available (not on Linux)."""
    try:
        page = os.memfd_create("worker")
    except (AttributeError, OSError):
        return None
    if os.access(f"/proc/{os.getpid()}/fd/{page}", os.W_OK):
        return page
    os.close(page)
    return None


def how_it_ended(worker: object, code: int) -> str:
    """Describe the end of an agent's worker."""
    return worker.how_it_ended() if isinstance(worker, Worker) else described(code)


def described(code: int, kills_before: int | None = None) -> str:
    """Describe the end of a process by its exit code, a signal negated, and `memory_kills` shortly before."""
    if code == UNFINISHED_CODE:
        return "exited with 0 without finishing"
    if code >= 0:
        return f"ended with code {code}"
    now = memory_kills()
    if code == -signal.SIGKILL and None not in (now, kills_before) and (num := now - kills_before) > 0:  # type: ignore[operator]
        return f"was killed for memory (cgroup: {num} kill{'s' if num > 1 else ''})"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    reason = _REASONS.get(name)
    return f"was killed by {name.name}" + (f" ({reason})" if reason else "")


class RecentMemoryKills:
    """`memory_kills` as of shortly before now, so that an old kill for memory does not explain a new end."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self.before = now, memory_kills()
        self._next, self._next_at = self.before, now()

    def look(self) -> None:
        """Call this often while a process runs: `before` is then from its start, or from RECENT_S to twice that ago."""
        if self._now() - self._next_at >= RECENT_S:
            self.before, self._next, self._next_at = self._next, memory_kills(), self._now()


def memory_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes killed for memory so far, in this process's cgroup or else on this machine."""
    for file in _memory_files(root):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(" ") for line in lines):
            if name == "oom_kill" and value.isdecimal():
                return int(value)
    return None


def _memory_files(root: Path) -> list[Path]:
    """Return the files that count kills, the most specific first: of cgroups v2 and v1, then of the machine.

    A container sees its own cgroup at the root, whatever path the kernel names.
    """
    files: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        below = path.lstrip("/")
        if kinds == "":
            top = root / "sys/fs/cgroup"
            files += [top / below / "memory.events", top / "memory.events", top / "unified" / below / "memory.events"]
        elif "memory" in kinds.split(","):
            top = root / "sys/fs/cgroup/memory"
            files += [top / below / "memory.oom_control", top / "memory.oom_control"]
    return [*files, root / "proc/vmstat"]
