"""Ends of workers: exit code 0 counts only if the announced work was finished; signals are named."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rendezvous.agent import worker_end
from rendezvous.agent.worker_end import (
    FAILURE_CODE,
    RECENT_S,
    UNFINISHED_CODE,
    RecentMemoryKills,
    Worker,
    announce,
    await_notes,
    declare_finished,
    described,
    has_noted_end,
    memory_kills,
    note_end_in,
    release,
)
from rendezvous.torchelastic.standby import ForkedWorker
from tests.conftest import PATIENCE_S


def worker(work: Callable[[], object]) -> Worker:
    """Start a worker that does some work, and exits with 0 in a way that Python does not notice."""

    def start(more: Mapping[str, str]) -> ForkedWorker:
        if pid := os.fork():
            return ForkedWorker(pid)
        os.environ.update(more)
        try:
            work()
        finally:
            ctypes.CDLL(None)._exit(0)
        raise AssertionError

    return Worker(start)


def in_a_child(work: Callable[[], object]) -> None:
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    work()
    worker_end._Work.exit_now(0)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("work", "code"),
    [
        (lambda: None, 0),
        (announce, UNFINISHED_CODE),
        (lambda: (announce(), declare_finished()), 0),
        (lambda: (announce(), declare_finished(), announce()), UNFINISHED_CODE),
        (lambda: (announce(), in_a_child(declare_finished)), UNFINISHED_CODE),
        (lambda: in_a_child(announce), UNFINISHED_CODE),
        (lambda: (announce(), worker_end._Work.exit_now(3)), 3),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    ],
)
def test_a_worker_that_ends_with_0_has_finished_what_it_announced(work: Callable[[], object], code: int) -> None:
    """It may exit in any way, here through the C library. A worker that announces nothing is believed."""
    ended = worker(work)
    assert (ended.wait(PATIENCE_S), ended.poll()) == (code, code)
    assert ended.how_it_ended() == described(code)


@pytest.mark.heavy
@pytest.mark.parametrize(("status", "code"), [(0, FAILURE_CODE), (75, FAILURE_CODE), (3, 3)])
def test_os_exit_does_not_pass_for_a_finished_run(status: int, code: int, tmp_path: Path) -> None:
    """This holds without an agent and in any thread, but not after the run, nor in a process that it has forked."""
    said = tmp_path / "stderr"

    def work() -> None:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
        announce(lambda: "at step 19 of 60")
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        else:
            os._exit(0)
        os._exit(status)

    assert worker(work).wait(PATIENCE_S) == code
    text = f"error: os._exit({status}) was called at step 19 of 60 without finishing: code of the task, or a library\n"
    assert said.read_text() == (text if code == FAILURE_CODE else "")
    before = os._exit
    announce(lambda: "")
    assert os._exit is not before
    release()
    assert os._exit is before


def test_a_worker_whose_agent_has_ended_announces_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker is about to end as well, and must not print a traceback."""
    monkeypatch.setattr(worker_end._Work, "page", None)
    monkeypatch.setenv(worker_end.PAGE, str(tmp_path / "gone" / "page"))
    announce()
    declare_finished()
    assert worker_end._Work.page == tmp_path / "gone" / "page"


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.events": "oom 9\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "low 0\noom_kill 3\noom_group_kill 9\n"}, 3),
        (
            {
                "proc/self/cgroup": "5:cpu:/a\n4:memory:/a\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 4\n",
            },
            4,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 7\noom_kill 5\n"}, 5),
        ({}, None),
    ],
)
def test_the_kernel_says_how_many_processes_it_has_killed_for_memory(
    files: Mapping[str, str], expected: int | None, tmp_path: Path
) -> None:
    """The count works with cgroups v1 and v2, in a container, and on a machine without cgroups."""
    assert memory_kills(tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("code", "before", "now", "expected"),
    [
        (-9, 1, 3, "was killed for memory (cgroup: 2 kills)"),
        (-9, 3, 3, "was killed by SIGKILL (by the system, or by hand)"),
        (-9, None, None, "was killed by SIGKILL (by the system, or by hand)"),
        (-11, 1, 3, "was killed by SIGSEGV"),
        (-signal.SIGBUS, 0, 0, "was killed by SIGBUS (memory behind a mapped file is gone: shared memory (/dev/shm)"),
        (-signal.SIGILL, 0, 0, "was killed by SIGILL (an instruction that this CPU does not have"),
        (-63, 0, 0, "was killed by signal 63"),
        (UNFINISHED_CODE, 0, 0, "exited with 0 without finishing"),
        (3, 0, 0, "ended with code 3"),
    ],
)
def test_an_end_is_described(
    code: int, before: int | None, now: int | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_end, "memory_kills", lambda: now)
    assert described(code, before).startswith(expected)


def test_what_was_killed_for_memory_long_before_is_no_reason_for_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel killed another process of the machine. A later SIGKILL of this one has another cause."""
    clock, count = [0.0], [0]
    monkeypatch.setattr(worker_end, "memory_kills", lambda: count[0])
    kills = RecentMemoryKills(lambda: clock[0])
    said = {}
    for now in range(1, 100):
        clock[0], count[0] = float(now), int(now >= 40)
        kills.look()
        said[now] = "for memory" in described(-signal.SIGKILL, kills.before)
    assert not any(said[now] for now in range(1, 40)) and all(said[now] for now in range(40, 40 + int(RECENT_S)))
    assert not any(said[now] for now in range(40 + 2 * int(RECENT_S) + 1, 100))


def lines_of(path: Path) -> list[dict[str, object]]:
    await_notes()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), (-9, described(-9))),
        (lambda: worker_end._Work.exit_now(3), (3, "ended with code 3")),
        (lambda: None, (UNFINISHED_CODE, "exited with 0 without finishing")),
        (declare_finished, None),
        (lambda: worker_end._Work.exit_now(75), None),
        (lambda: (has_noted_end(), worker_end._Work.exit_now(1)), None),
    ],
)
def test_an_agent_notes_the_end_of_a_worker_that_could_not_say_it_itself(
    ends: Callable[[], object], expected: tuple[int, str] | None, tmp_path: Path
) -> None:
    """The note is in the file that the worker named, unless it finished, left in good order or noted its own end."""
    path = tmp_path / f"ends-{os.getpid()}.jsonl"
    worker(lambda: (announce(), note_end_in(tmp_path, "ends", op="failed", of_rank=2), ends())).wait(PATIENCE_S)
    said = [(line["exit_code"], line["why"]) for line in lines_of(path)]
    assert said == ([] if expected is None else [expected])
    assert all((line["op"], line["of_rank"]) == ("failed", 2) and line["t"] for line in lines_of(path))


@pytest.mark.heavy
def test_a_worker_that_its_launcher_has_asked_to_end_is_noted_if_it_had_to_be_killed(tmp_path: Path) -> None:
    path, up = tmp_path / f"ends-{os.getpid()}.jsonl", tmp_path / "up"

    def wait() -> None:
        announce()
        note_end_in(tmp_path, "ends")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        up.touch()
        time.sleep(60)

    for answer in (signal.SIGTERM, signal.SIGKILL):
        asked = worker(wait)
        while not up.exists():
            time.sleep(0.01)
        asked.close(answer)
        assert asked.wait(PATIENCE_S) == -answer
        up.unlink()
    [line] = lines_of(path)
    assert line["why"] == "was killed by its launcher: it had not left in the time that it was given"


def test_a_folder_that_is_gone_keeps_no_agent_from_going_on(tmp_path: Path) -> None:
    path = tmp_path / "gone" / f"ends-{os.getpid()}.jsonl"
    assert (
        worker(lambda: (announce(), note_end_in(path.parent, "ends"), os.kill(os.getpid(), signal.SIGKILL))).wait(
            PATIENCE_S
        )
        == -9
    )
    assert lines_of(path) == []


def test_an_end_is_judged_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ended with its node's other workers, for a note."""

    def refuse(**_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker_end.threading, "Thread", refuse)
    worker_end.note_end({"path": str(tmp_path / "note"), "facts": {}}, -signal.SIGKILL, "was killed by SIGKILL")
    assert not list(tmp_path.iterdir())
