"""`status --why` on every scenario, if its fault had ended the job for good."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.scenario.kinds import ADVICE
from chaos.scenario.model import FOLDER
from elastic_train.errors import (
    AwayError,
    DataError,
    HungError,
    RowError,
    SavesFailedError,
    StorageError,
    UnfitError,
    UnreadableError,
    WeightsDifferError,
)
from elastic_train.runs.stopped.cause import SILENT_S, cause_of
from elastic_train.runs.stopped.slurm import SlurmJob
from tests.elastic_train.runs.left_runs import Left

LOST = ("a peer is lost", "PeerLostError")
TLS = "no etcd answers at b:2379 (tried for 10 s; Ssl handshake failed: CERTIFICATE_VERIFY_FAILED)"


class Row(NamedTuple):
    """How the processes of a scenario end after step 3, and the answer; `later_s` seconds later somebody asks."""

    ends: Callable[[Left], object]
    do: str
    rank: int | None
    phrase: str
    slurm: SlurmJob | None = None
    later_s: float = SILENT_S + 60.0


def of(*acts: Callable[[Left], object]) -> Callable[[Left], object]:
    return lambda run: [act(run) for act in acts]


def killed_node(run: Left) -> None:
    """Machine b is lost without a word, and a trains on."""
    run.train(4, 5, ranks=(0,))


def full_disk(run: Left) -> None:
    run.meets(0, SavesFailedError("at least 10 saves failed (No space left on device): make /runs/a writable"))


def lost(run: Left) -> None:
    run.fails(0, 1, *LOST)


def killed(rank: int) -> Callable[[Left], object]:
    return lambda run: run.dies(rank, -9)


def met(error: Exception, rank: int = 0) -> Callable[[Left], object]:
    return lambda run: run.meets(rank, error)


def left(run: Left) -> None:
    run.leaves("preempted")


SCENARIOS: dict[str, Row] = {
    "bad-data": Row(met(UnreadableError("a.parquet, row group 3: unreadable")), "fix", 0, "row group 3"),
    "bad-network": Row(
        of(lambda run: run.cannot_form(0, "rank 1 on b cannot be reached at 10.0.0.2"), lost),
        "start",
        0,
        "no world formed after step 3: rank 1 on b cannot be reached",
    ),
    "bad-node": Row(of(killed_node, left), "start", None, "asked to leave, and left after step 5"),
    "data-away": Row(met(AwayError("the storage of the data is away: /data"), 1), "start", 1, "/data"),
    "demo": Row(killed_node, "start", None, "ended without a word after step 5"),
    "flipped-data": Row(met(DataError("a.parquet: its checksum differs"), 1), "fix", 1, "its checksum differs"),
    "frozen-disk": Row(
        met(SavesFailedError("10 saves failed (the storage made no progress for 20 s): make /runs/a writable")),
        "fix",
        0,
        "the storage made no progress",
    ),
    "hangs": Row(met(HungError("no step in 60 s")), "start", 0, "it hung, and took no step"),
    "kill-a-node": Row(lost, "start", 1, "rank 1 on b ended without a word after step 3"),
    "kill-a-rank": Row(of(killed(1), lost), "start", 1, "rank 1 on b was killed by SIGKILL"),
    "live-faults": Row(of(killed(1), killed_node, left), "start", None, "asked to leave"),
    "no-more-files": Row(met(OSError(errno.EMFILE, "Too many open files"), 1), "fix", 1, "Too many open files"),
    "readonly-node": Row(met(OSError(errno.EROFS, "Read-only file system")), "fix", 0, "Read-only file system"),
    "renewed-certificates": Row(met(StorageError(TLS)), "fix", 0, "CERTIFICATE_VERIFY_FAILED"),
    "restart-a-node": Row(of(killed(1), lambda run: run.fails(0, 77, "1 of 2 nodes came")), "start", 1, "SIGKILL"),
    "s3": Row(met(SavesFailedError("10 saves failed (s3://a: AccessDenied)")), "fix", 0, "AccessDenied"),
    "shrink-and-regrow": Row(of(killed_node, left), "start", None, "asked to leave"),
    "slow-node": Row(lambda run: run.train(4, 5, pace_s=100.0), "nothing", None, "seems to be running: step 5"),
    "slurm": Row(left, "nothing", None, "Slurm has job 7 as PENDING", SlurmJob("7", "PENDING", "Resources")),
    "slurm-array": Row(left, "start", None, "Slurm ended job 7: CANCELLED", SlurmJob("7", "CANCELLED")),
    "slurm-growth": Row(killed(1), "nothing", 1, "it recovers, or waits for nodes", SlurmJob("7", "RUNNING")),
    "slurm-two-jobs": Row(killed(1), "nothing", 1, "and will start it again", SlurmJob("7", "REQUEUED")),
    "soak": Row(of(killed_node, full_disk), "fix", 0, "No space left on device"),
    "soak-cells": Row(of(killed(0), lambda run: run.fails(1, 79, "state is lost")), "start", 0, "SIGKILL"),
    "soak-shares": Row(of(killed(0), killed(1)), "start", 0, "SIGKILL"),
    "soak-stages": Row(of(met(RuntimeError("planted"), 1), lost), "fix", 1, "RuntimeError: planted"),
    "soak-witness": Row(of(killed_node, met(MemoryError())), "fix", 0, "MemoryError"),
    "tracker": Row(lambda run: None, "nothing", None, "seems to be running", later_s=60.0),
    "two-jobs": Row(lambda run: None, "nothing", None, "seems to be running", later_s=60.0),
    "unfit-node": Row(met(UnfitError("its products differ"), 1), "leave out", 1, "its products differ"),
    "witness": Row(of(killed_node, killed(0)), "start", 0, "SIGKILL"),
    "wrong-numbers": Row(met(WeightsDifferError("rank 1 has other weights"), 1), "fix", 1, "other weights"),
}
NOT_TRAINED = ("any-script",)
"""Scenarios for a script, whose runs have no histories."""


def test_every_scenario_has_a_row() -> None:
    assert {*SCENARIOS, *NOT_TRAINED} == {path.stem for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_fault_of_a_scenario_is_named_if_it_ends_the_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, run = SCENARIOS[name], Left(tmp_path, monkeypatch)
    if row.slurm is not None:
        monkeypatch.setenv("SLURM_JOB_ID", row.slurm.number)
    run.train(1, 2, 3)
    row.ends(run)
    cause = cause_of(run.folder, now=run.now + row.later_s, slurm=lambda number: row.slurm)
    assert (cause.do, cause.rank, cause.exit_code) == (row.do, row.rank, ADVICE[row.do]), cause
    assert row.phrase in cause.sentence


OVERLAPPING: dict[str, tuple[Callable[[Left], object], str, int, str, str]] = {
    "a killed node, then a full disk": (of(killed_node, full_disk), "fix", 0, "No space left", "b was lost"),
    "a killed rank, then a full disk": (
        of(killed(1), killed_node, full_disk),
        "fix",
        0,
        "No space left",
        "rank 1 on b was killed by SIGKILL",
    ),
    "a node that left for good, then a full disk": (
        of(lambda run: run.dies(1, -9, node_leaves=True), killed_node, full_disk),
        "fix",
        0,
        "No space left",
        "",
    ),
    "a killed rank as a row cannot be used": (of(killed(1), met(RowError("row 7"))), "fix", 0, "row 7", ""),
    "memory, then a kill": (
        of(lambda run: run.dies(1, -9, "was killed for memory (cgroup: 1 kill)"), killed(0)),
        "fix",
        1,
        "killed for memory",
        "",
    ),
    "a task's own collective, after a kill": (
        of(killed(1), met(RuntimeError("[gloo] Connection closed by peer [10.0.0.2]"))),
        "start",
        1,
        "SIGKILL",
        "",
    ),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_of_several_faults_the_one_that_stopped_the_run_is_named_and_the_others_are_evidence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, do, rank, phrase, survived = OVERLAPPING[name]
    run = Left(tmp_path, monkeypatch)
    run.train(1, 2, 3)
    ends(run)
    cause = cause_of(run.folder, now=run.now + SILENT_S + 60.0)
    assert (cause.do, cause.rank) == (do, rank) and phrase in cause.sentence, cause
    assert survived in (cause.survived or ""), cause
    others = [path for path in (run.folder / "history").glob("failed-*-b-*.jsonl") if path]
    assert {str(path) for path in others} <= set(cause.evidence), "what another process noted is shown"
