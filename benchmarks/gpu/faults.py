"""Faults of one of two ranks that share a device: killed, stopped for a while, and out of the device's memory.

All happen in one job, in turn, so that a part that is ended early has seen as many of each kind.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.limits import Limit, OutOfTimeError
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from chaos.judge.evidence.applied import pids_of
from chaos.judge.evidence.recovery_cost import Recovery, recoveries
from chaos.judge.evidence.run_files import Evidence, collect
from chaos.scenario.model import Point
from chaos.scenario.schedule import Due

KINDS = {"kill_worker": "killed_worker", "freeze_worker": "stopped_worker", "oom": "worker_out_of_memory"}
"""The kinds of fault, and their names in figures."""
STOPPED_S = 2.0
FAULTS_END = 0.6
"""Fraction of the time after which no fault begins: the rest is for the job's end and its repetition."""
LANE_MS = 5.0
"""A slower pace keeps the repetition, which is not slowed, short."""
TASKS = {"cuda": "tests.gpu.nccl_task", "cpu": "tests.device_task"}
"""Tasks whose ranks share a device over NCCL; on a CPU, a stand-in device takes its calls."""


def due(num_each: int) -> list[Due]:
    """Return the faults; each waits until both ranks train again."""
    return [fault for _ in range(num_each) for fault in (_killed(), _stopped(), _out_of_memory())]


def _killed() -> Due:
    return Due("kill_worker", 1, None, 0.0, is_healed=True)


def _stopped() -> Due:
    return Due("freeze_worker", 1, None, 0.0, for_s=STOPPED_S, is_healed=True)


def _out_of_memory() -> Due:
    return Due("oom", 1, None, 0.0, point=Point(name="backward"), is_healed=True)


def faults(limit: Limit, device: str, num_each: int) -> Iterator[dict[str, object]]:
    """Yield the seconds to the next applied step by kind, what was lost, and whether the hash is that without faults.

    The time counts from the fault until a survivor's next applied step.
    """
    faulted = limit.first(FAULTS_END)
    with tempfile.TemporaryDirectory() as folder:
        params = {"max_tokens": 128, "dim": 96, "depth": 2, "heads": 4, "dropout": 0.1, "lane_ms": LANE_MS}
        task = {"path": f"{TASKS[device]}:PacedClassifier", "params": params}
        keys: dict[str, object] = {"device": device, "parallel": {"transport": "gloo"}, "task": task}
        config = write_live_job(Path(folder) / "job", 2, keys)
        where, planned = Path(folder) / "faulted", due(num_each)
        try:
            run = run_job(
                where,
                config,
                planned,
                ranks=1,
                leave_after_s=0.0,
                timeout_s=limit.left_s,
                is_over=lambda: faulted.left_s == 0.0,
            )
        except SystemExit:  # not all trained again, or left, in time
            if (found := collect(where)).of("fault"):
                yield figures(found)
            raise
        yield figures(run)
        assert run.result is not None, "every run leaves one"
        try:
            again = repeat(Path(folder) / "alone", config, run, "--task.params.lane_ms=0", timeout_s=limit.left_s)
        except subprocess.TimeoutExpired:
            raise OutOfTimeError("the run without faults was killed at its limit") from None
        yield {"faults_hash_equal": run.result["weights_sha256"] == again["weights_sha256"]}
    num_faults = sum(fault["kind"] != LEAVE for fault in run.of("fault"))
    if num_faults < len(planned):
        raise OutOfTimeError(f"{num_faults} of {len(planned)} faults had come by its limit")


def figures(run: Evidence) -> dict[str, object]:
    """Return a run's figures: `…_s` is a median, and is missing if no such fault cost a world."""
    costs = [cost for cost in recoveries(run) if cost.kind != LEAVE]
    by_kind: dict[str, Sequence[Recovery]] = {kind: [cost for cost in costs if cost.kind == kind] for kind in KINDS}
    found: dict[str, object] = {}
    for kind, of_kind in by_kind.items():
        if of_kind:
            found[f"{KINDS[kind]}_s"] = round(statistics.median(cost.rto_s for cost in of_kind), 2)
        found[f"{KINDS[kind]}_times"] = f"{len(of_kind)} of {sum(fault['kind'] == kind for fault in run.of('fault'))}"
    in_every_world = set.intersection(*map(set, pids_of(run).values()))
    return found | {
        "faults_missed": len(run.of("missed")),
        "faults_steps_lost": max((cost.rpo_steps for cost in costs), default=0),
        "faults_survivor_kept_its_process": len(in_every_world) == 1,
    }
