"""Why a run on Slurm stopped: Slurm knows what its processes could not write, and whether it starts the job again."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.runs.stopped.cause import SILENT_S, cause_of
from elastic_train.runs.stopped.slurm import WAITS_S, SlurmJob, ask_slurm
from tests.elastic_train.runs.left_runs import Left

SILENT = SILENT_S + 60.0


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = Left(tmp_path / "run", monkeypatch)
    run.train(1, 2, 3)
    return run


@pytest.mark.parametrize(
    ("state", "reason", "do", "phrase"),
    [
        ("TIMEOUT", "", "start", "Slurm ended job 7: TIMEOUT; all of its processes ended without a word"),
        ("OUT_OF_MEMORY", "OutOfMemory", "fix", "Slurm ended job 7: OUT_OF_MEMORY (OutOfMemory)"),
        ("NODE_FAIL", "", "start", "Slurm ended job 7: NODE_FAIL"),
        ("CANCELLED", "", "start", "Slurm ended job 7: CANCELLED"),
        ("PREEMPTED", "", "start", "Slurm ended job 7: PREEMPTED"),
        ("PENDING", "BeginTime", "nothing", "Slurm has job 7 as PENDING (BeginTime), and will start it again"),
        ("PENDING", "JobHeldUser", "start", "it waits until it is released"),
        ("REQUEUE_HOLD", "", "start", "it waits until it is released"),
        ("SUSPENDED", "", "nothing", "and will start it again"),
        ("RUNNING", "None", "nothing", "Slurm has job 7 as RUNNING: it recovers, or waits for nodes"),
        ("FAILED", "NonZeroExitCode", "start", "all of its processes ended without a word"),
    ],
)
def test_slurm_says_what_became_of_a_job_that_ended_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, do: str, phrase: str
) -> None:
    run = stopped(tmp_path, monkeypatch)
    cause = cause_of(run.folder, now=run.now + SILENT, slurm=lambda number: SlurmJob(number, state, reason))
    assert (cause.do, phrase in cause.sentence) == (do, True), cause
    if state == "OUT_OF_MEMORY":
        assert "need less memory" in cause.advice


def test_an_error_of_the_run_is_the_cause_whatever_slurm_does_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(tmp_path, monkeypatch)
    run.fails(1, 65, "row 7")
    cause = cause_of(run.folder, now=run.now + SILENT, slurm=lambda number: SlurmJob(number, "PENDING"))
    assert cause.do == "fix" and cause.sentence.startswith("rank 1 on b ended with an error: row 7")


def test_a_running_job_that_is_silent_for_longer_than_nodes_are_awaited_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(tmp_path, monkeypatch)
    cause = cause_of(run.folder, now=run.now + WAITS_S, slurm=lambda number: SlurmJob(number, "RUNNING"))
    assert cause.do == "start" and cause.sentence.startswith("all of its processes ended without a word")


def test_slurm_is_asked_by_its_own_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `scontrol` while it remembers the job, then by `sacct`; without an answer nothing is known."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ask_slurm("7") is None

    def programs(**scripts: str) -> None:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)

    programs(scontrol="exit 1", sacct='[ "$5" = 7 ] && echo "CANCELLED by 1000|None"')
    assert ask_slurm("7") == SlurmJob("7", "CANCELLED", "None")
    assert ask_slurm("8") is None
    programs(scontrol="echo 'JobId=7 JobName=train JobState=PENDING Reason=Resources Dependency=(null)'")
    assert ask_slurm("7") == SlurmJob("7", "PENDING", "Resources")
