"""Why a run stopped: of all that its processes left behind, the one cause, who it was, and what to do."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic_train.errors import (
    CommitError,
    ConfigError,
    DataError,
    ElasticTrainError,
    HungError,
    NoProgressError,
    Preempted,
    ResultError,
    RowError,
    SavesFailedError,
    StateLostError,
    StorageError,
    TooFewNodesError,
    UnfinishedError,
    UnfitError,
    WeightsDifferError,
)
from elastic_train.runs.stopped.cause import SILENT_S, cause_of
from elastic_train.tracking import history as history_module
from elastic_train.tracking.history import note_unfit
from rendezvous.agent.worker_end import UNFINISHED_CODE
from rendezvous.errors import RendezvousError, StoreUnavailableError
from tests.elastic_train.runs.left_runs import Left
from tests.elastic_train.tracking.unqueued import Unqueued

OOM = "was killed for memory (cgroup: 1 kill)"


LOST = ("a peer is lost", "PeerLostError")
FENCED = ("term 3 was claimed", "FencedError")
STUCK = (93, "the last 3 worlds got no further than step 3", "NoProgressError")


@pytest.mark.parametrize(
    ("ends", "do", "rank", "phrase"),
    [
        (lambda run: run.fails(1, 1, "ValueError: no (task.py, line 3)"), "fix", 1, "ValueError: no (task.py, line 3)"),
        (lambda run: run.fails(1, 65, "row 7 of a.parquet"), "fix", 1, "row 7 of a.parquet"),
        (lambda run: run.fails(0, 2, "data.train: no such folder"), "fix", 0, "data.train: no such folder"),
        (lambda run: run.fails(1, 71, "its products differ"), "leave out", 1, "its products differ"),
        (lambda run: run.fails(1, 93, "3 worlds in a row ended at step 3"), "fix", 1, "3 worlds in a row"),
        (lambda run: run.fails(1, 76, "no step in 60 s"), "start", 1, "no step in 60 s"),
        (lambda run: run.fails(0, 74, "result.json: no space left"), "start", 0, "no space left"),
        (lambda run: run.dies(1, -9, OOM), "fix", 1, OOM),
        (lambda run: run.dies(0, -9), "start", 0, "was killed by SIGKILL (by the system, or by hand)"),
        (lambda run: run.dies(1, -11), "fix", 1, "was killed by SIGSEGV"),
        (lambda run: run.dies(1, -7), "fix", 1, "shared memory (/dev/shm) is full"),
        (lambda run: run.dies(1, UNFINISHED_CODE), "fix", 1, "exited with 0 without finishing"),
        (lambda run: run.dies(1, 76), "start", 1, "ended with code 76: it hung, and took no step"),
        (lambda run: run.dies(1, 5), "start", 1, "ended with code 5"),
        (lambda run: (run.fails(0, 1, *LOST), run.dies(1, -9, OOM)), "fix", 1, OOM),
        (lambda run: (run.dies(1, -9), run.fails(0, 79, "state is lost")), "start", 1, "SIGKILL"),
        (lambda run: (run.dies(1, -9), run.fails(0, 77, "1 of 2 nodes came")), "start", 1, "SIGKILL"),
        (lambda run: run.fails(0, 77, "1 of 2 nodes came"), "start", 0, "1 of 2 nodes came"),
        (lambda run: (run.fails(1, 65, "row 7"), run.fails(0, 1, *LOST)), "fix", 1, "row 7"),
        (lambda run: run.leaves("preempted"), "start", None, "the job was asked to leave, and left after step 3"),
        (lambda run: (run.dies(1, -9), run.train(4), run.leaves("left")), "start", None, "asked to leave"),
        (lambda run: (run.leaves("preempted"), run.fails(0, 1, *LOST)), "start", None, "asked to leave"),
        (lambda run: (run.dies(1, -9, OOM), run.train(4), run.dies(0, -11)), "fix", 0, "SIGSEGV"),
        (
            lambda run: (run.dies(1, -9, OOM, node_leaves=True), run.train(4), run.leaves("preempted")),
            "fix",
            1,
            "killed for memory",
        ),
        (
            lambda run: (run.dies(1, -9, OOM, node_leaves=True), run.train(4, started_at=run.now + 9.0)),
            "start",
            None,
            "ended without a word after step 4",
        ),
        (
            lambda run: (run.dies(1, -9, OOM, node_leaves=True), run.train(4, ranks=(0,)), run.train(5, ranks=(0,))),
            "start",
            None,
            "its only process ended without a word after step 5",
        ),
        (lambda run: None, "start", None, "ended without a word after step 3, and so did their launchers"),
        (lambda run: run.fails(0, 1, *LOST), "start", 1, "rank 1 on b ended without a word after step 3: b lost power"),
        (lambda run: (run.fails(0, 1, *FENCED), run.fails(1, 65, "row 7")), "fix", 1, "row 7"),
        (lambda run: run.fails(0, 1, *FENCED), "start", 0, "term 3 was claimed"),
        (
            lambda run: (run.fails(1, 2, "no such key"), run.starts_again(), run.fails(0, 65, "row 7")),
            "fix",
            0,
            "row 7",
        ),
        (
            lambda run: (run.dies(1, -9, OOM), run.starts_again(), run.fails(0, 74, "no space left")),
            "start",
            0,
            "no space left",
        ),
        (
            lambda run: (run.dies(1, -9, OOM), run.train(), run.dies(1, -9, OOM), run.train(), run.fails(0, *STUCK)),
            "fix",
            1,
            "killed for memory",
        ),
        (
            lambda run: (run.dies(1, -9), run.train(), run.dies(1, -9), run.train(), run.fails(0, *STUCK)),
            "fix",
            1,
            "the last 3 worlds got no further",
        ),
        (lambda run: (run.dies(1, -9, OOM), run.train(), run.fails(0, 1, *LOST)), "fix", 1, OOM),
        (
            lambda run: (run.fails(1, 65, "row 7"), run.begins_anew(4), run.fails(0, 1, *LOST)),
            "start",
            1,
            "b lost power",
        ),
        (lambda run: (run.clock_is_late(1, 90.0), run.dies(1, -9, OOM)), "fix", 1, OOM),
        (lambda run: (run.clock_is_late(1, 90.0), run.fails(1, 65, "row 7")), "fix", 1, "row 7"),
        (
            lambda run: (run.clock_is_late(1, 90.0), run.fails(1, 65, "row 7"), run.fails(0, 1, *LOST)),
            "fix",
            1,
            "row 7",
        ),
    ],
)
def test_a_run_that_stopped_has_one_cause(
    left: Left, ends: Callable[[Left], object], do: str, rank: int | None, phrase: str
) -> None:
    """A fault that the run survived is not the cause, nor is a consequence of the cause."""
    ends(left)
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert (cause.do, cause.rank) == (do, rank)
    assert phrase in cause.sentence
    assert cause.step == left.step
    assert all(Path(path).is_file() for path in cause.evidence) and cause.evidence


ACCIDENTS: list[tuple[str, Exception, str, str]] = [
    ("a row is too long", RowError("row 400 of a.parquet has 90 tokens"), "fix", "repair or replace what it names"),
    ("data changed", DataError("a.parquet: changed since"), "fix", "repair or replace what it names"),
    ("every commit is damaged", CommitError("no commit can be read"), "fix", "repair or replace what it names"),
    ("a folder that was copied", ConfigError("run.dir is another folder on b"), "fix", "change what it names"),
    ("loss is NaN", NoProgressError("loss of 3 steps in a row was not finite"), "fix", "would stop at the same step"),
    ("the disk is full", SavesFailedError("make /runs/a writable"), "fix", "space"),
    ("credentials expired", SavesFailedError("make s3://a writable"), "fix", "credentials"),
    ("the disk is full, of all else", OSError(errno.ENOSPC, "No space left on device"), "fix", "space"),
    ("rights were taken", PermissionError(errno.EACCES, "Permission denied"), "fix", "rights"),
    ("the storage is gone", OSError(errno.ESTALE, "Stale file handle"), "fix", "readable and writable"),
    ("a mount is gone", FileNotFoundError(errno.ENOENT, "No such file or directory"), "fix", "readable and writable"),
    ("etcd is away", StoreUnavailableError("etcd at 10.0.0.1:2379 does not answer"), "start", "once etcd answers"),
    ("etcd is away, said by the trainer", StorageError("etcd does not answer"), "start", "once etcd answers"),
    ("the GPU's memory is full", torch.OutOfMemoryError("CUDA out of memory. Tried"), "fix", "need less memory"),
    ("the host's memory is full", MemoryError(), "fix", "need less memory"),
    ("torch has no memory", RuntimeError("DefaultCPUAllocator: can't allocate memory"), "fix", "need less memory"),
    ("a loader's worker", UnfinishedError("a worker process was killed for memory"), "fix", "need less memory"),
    ("code that exits", UnfinishedError("the process was to end with 0 by quit"), "fix", "mend the code"),
    ("a bug in the task", KeyError("label"), "fix", "mend the code or the place that it names"),
    ("a machine computes wrongly", UnfitError("its products differ"), "leave out", "leave a out"),
    ("ranks differ", WeightsDifferError("rank 1 has other weights"), "fix", "leave out the machine"),
    ("a rank hung", HungError("no step in 60 s"), "start", "if it hangs again on a"),
    ("nodes are missing", TooFewNodesError("1 of 2 nodes came in 900 s"), "start", "once enough nodes are there"),
    ("no result", ResultError("result.json: No space left on device"), "start", "where the result can be written"),
    ("the state is lost", StateLostError("the rest was lost"), "start", "it resumes from the newest commit"),
]


@pytest.mark.parametrize(("error", "do", "phrase"), [row[1:] for row in ACCIDENTS], ids=[row[0] for row in ACCIDENTS])
def test_an_accident_has_its_advice_whether_or_not_a_step_was_taken(
    left: Left, tmp_path: Path, error: Exception, do: str, phrase: str
) -> None:
    for run in (left, left.anew(tmp_path / "new")):
        run.meets(0, error)
        cause = cause_of(run.folder, now=run.now + SILENT_S + 60.0)
        assert (cause.do, cause.rank, cause.host) == (do, 0, "a"), cause
        assert phrase in cause.advice
        assert (
            str(error) if isinstance(error, ElasticTrainError | RendezvousError) else type(error).__name__
        ) in cause.sentence


@pytest.mark.parametrize(
    ("code", "do", "phrase"),
    [
        (-signal.SIGBUS, "fix", "more shared memory (/dev/shm)"),
        (-signal.SIGSEGV, "fix", "leave that machine out"),
        (-signal.SIGILL, "fix", "leave that machine out"),
        (-signal.SIGABRT, "fix", "the library that crashed"),
        (-signal.SIGTERM, "start", "it resumes"),
        (-signal.SIGKILL, "start", "it resumes"),
        (UNFINISHED_CODE, "fix", "calls exit, quit or os._exit"),
        (1, "fix", "mend the code"),
    ],
)
def test_a_death_has_its_advice(left: Left, code: int, do: str, phrase: str) -> None:
    left.dies(1, code)
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert (cause.do, cause.rank, cause.host) == (do, 1, "b") and phrase in cause.advice


@pytest.mark.parametrize(("is_member", "rank", "who"), [(True, 1, "rank 1 on b"), (False, None, "a process on b")])
def test_a_live_process_has_the_rank_of_its_last_world(
    left: Left, monkeypatch: pytest.MonkeyPatch, is_member: bool, rank: int | None, who: str
) -> None:
    """Its launcher has called each of them rank 0."""
    monkeypatch.setattr(history_module, "live_context", lambda: "live")
    if not is_member:
        left.starts_again()
    left.fails(1, 65, "row 7")
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert (cause.do, cause.rank, cause.host) == ("fix", rank, "b") and cause.sentence.startswith(f"{who} ended")


def test_on_its_own_machine_a_run_is_seen_to_go_on_or_to_have_stopped(
    tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a step takes, and however soon after the last one the processes are gone."""
    alive = [True]
    monkeypatch.setattr(Left, "_identity", lambda run: {"host": "a", "boot": "boot", "born": run._rank})
    monkeypatch.setattr("elastic_train.runs.stopped.traces.process_identity", lambda: {"host": "a", "boot": "boot"})
    monkeypatch.setattr("elastic_train.runs.stopped.cause.is_alive", lambda pid, born: alive[0])
    run = left.anew(tmp_path / "new")
    run.train(1, 2)
    cause = cause_of(run.folder, now=run.now + 9 * SILENT_S)
    assert cause.do == "nothing" and "it is running: process" in cause.sentence
    alive[0] = False
    cause = cause_of(run.folder, now=run.now + 1.0)
    assert cause.do == "start" and "ended without a word after step 2" in cause.sentence
    alive[0] = True
    run.fails(0, 65, "row 7")
    assert cause_of(run.folder).do == "nothing", "rank 1 may train on"
    run.fails(1, 65, "row 7")
    assert cause_of(run.folder).do == "fix", "a notebook's process goes on when training in it has failed"


def test_a_process_of_another_container_is_not_looked_up_by_its_pid(
    tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the pid is another process's, or nobody's: the run seems to be running until it has been silent."""
    here = {"host": "a", "boot": "boot", "born": 0, "space": "mine"}
    monkeypatch.setattr(Left, "_identity", lambda run: {**here, "space": "theirs"})
    monkeypatch.setattr("elastic_train.runs.stopped.traces.process_identity", lambda: here)
    run = left.anew(tmp_path / "new")
    run.train(1, 2)
    cause = cause_of(run.folder, now=run.now + 1.0)
    assert cause.do == "nothing" and "it seems to be running" in cause.sentence


def test_a_world_that_did_not_form_is_the_cause_of_what_came_after_the_last_step(left: Left) -> None:
    left.cannot_form(0, "rank 1 on b cannot be reached at 10.0.0.2")
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert cause.do == "start" and "no world formed after step 3: rank 1 on b cannot be reached" in cause.sentence


def test_a_run_that_goes_on_has_not_stopped(left: Left) -> None:
    cause = cause_of(left.folder, now=left.now + 5.0)
    assert cause.do == "nothing" and "it seems to be running: step 3 was applied 6 s ago" in cause.sentence


def test_a_machine_that_fails_its_health_check_before_the_first_step_is_to_be_left_out(tmp_path: Path) -> None:
    note_unfit(Unqueued(), tmp_path, "its matrix products differ from those expected")
    cause = cause_of(tmp_path)
    assert (
        cause.do == "leave out"
        and "failed its health check" in cause.sentence
        and f"leave {cause.host} out" in cause.advice
    )


def test_a_run_that_ends_before_its_first_step_is_started_again(tmp_path: Path) -> None:
    """Ctrl-C before a step leaves no word."""
    cause = cause_of(tmp_path)
    assert "asked to leave before its first step" in cause.sentence
    assert cause.advice == "start it again; if it ends again, read its log, or that of its launcher"


def test_a_single_process_that_was_killed_has_no_launcher(left: Left, tmp_path: Path) -> None:
    run = left.anew(tmp_path / "new")
    run.train(1, 2, ranks=(0,))
    said = cause_of(run.folder, now=run.now + 9 * SILENT_S).sentence
    assert said.startswith("its only process ended without a word after step 2: it was killed (perhaps by the kernel")
    assert said.endswith("or a lost power") and "launcher" not in said


@pytest.mark.parametrize(
    ("error", "do", "phrase"),
    [
        (TooFewNodesError("1 of 2 nodes came within 900 s"), "start", "once enough nodes are there"),
        (ElasticTrainError("etcd at 10.0.0.1:2379 does not answer"), "start", "once etcd answers"),
        (ElasticTrainError("etcd at 10.0.0.1:2379 has raised the alarm NOSPACE."), "fix", "clear etcd's alarm"),
        (ElasticTrainError("etcd refused the user 'a': no. Correct it, or grant that"), "fix", "correct etcd's user"),
        (ConfigError("--nodes 1:3 differs from 1:2 of the running nodes"), "fix", "change what it names"),
    ],
)
def test_a_launcher_that_could_not_start_its_workers_is_the_cause(
    left: Left, error: ElasticTrainError, do: str, phrase: str
) -> None:
    """Of a run that had stopped before in another way."""
    left.leaves("preempted")
    left.starts_again()
    left.launcher_fails(1, error)
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    if isinstance(error, TooFewNodesError):
        assert cause.do == do and "asked to leave" in cause.sentence, "it only waited for others"
        return
    assert (cause.do, cause.rank, cause.host) == (do, None, "b") and phrase in cause.advice
    assert cause.sentence.startswith("the launcher on b ended with an error: ")


def test_a_launcher_that_was_asked_to_leave_has_not_failed(left: Left) -> None:
    left.launcher_fails(0, Preempted("asked to leave before any worker was started"))
    assert not [*(left.folder / "history").glob("failed-*")]


@pytest.mark.parametrize(
    ("error", "do", "phrase"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "fix", "limit of open files"),
        (RuntimeError("can't start new thread"), "fix", "limit of threads and processes"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "fix", "limit of threads and processes"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "start", "once the host that it names"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "fix", "space"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "leave out", "leave a out"),
    ],
)
def test_what_the_system_refuses_has_advice_of_its_own(left: Left, error: Exception, do: str, phrase: str) -> None:
    left.meets(0, error)
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert (cause.do, cause.rank) == (do, 0) and phrase in cause.advice, cause


def test_a_run_whose_steps_take_minutes_has_not_stopped_after_two(left: Left) -> None:
    left.train(4, 5, pace_s=100.0)
    assert cause_of(left.folder, now=left.now + SILENT_S + 60.0).do == "nothing"
    assert cause_of(left.folder, now=left.now + 501.0).do == "start"


def test_a_process_that_a_signal_stopped_is_named(tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Left, "_identity", lambda run: {"host": "a", "boot": "boot", "born": run._rank})
    monkeypatch.setattr("elastic_train.runs.stopped.traces.process_identity", lambda: {"host": "a", "boot": "boot"})
    monkeypatch.setattr("elastic_train.runs.stopped.cause.is_alive", lambda pid, born: True)
    monkeypatch.setattr("elastic_train.runs.stopped.cause.is_stopped", lambda pid: True)
    run = left.anew(tmp_path / "new")
    run.train(1, 2)
    cause = cause_of(run.folder, now=run.now)
    assert (cause.do, "kill -CONT" in cause.advice) == ("nothing", True)


def test_a_machine_that_was_restarted_is_named(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.runs.stopped.traces.process_identity", lambda: {"host": "a", "boot": "later"})
    cause = cause_of(left.folder, now=left.now + SILENT_S + 60.0)
    assert cause.do == "start" and "a has been restarted since" in cause.sentence
