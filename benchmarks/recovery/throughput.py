"""Throughput under faults: a job of four workers, one of which is killed or stopped every 29 s, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, run_job
from chaos.judge.evidence.run_files import Evidence, number, whole
from chaos.scenario.schedule import Due

FAULT_EVERY_S = 29.0
FROZEN_S = 6.0
QUIET_FROM = 0.6
"""Share of a fault's period after which its effects are over: frozen processes are back."""


def measure(folder: Path, seconds: float) -> dict[str, object]:
    """Run a job of four workers with a fault every 29 s, kills and freezes in turn, and without faults.

    It has no fixed end, and is asked to leave one period after the last fault, so that no quiet time dilutes the rate.
    """
    kinds = [("kill_worker", None), ("freeze_worker", FROZEN_S)]
    due = [
        Due(kind, turn % 2, None, FAULT_EVERY_S, for_s=for_s)
        for turn in range(int(seconds // FAULT_EVERY_S))
        for kind, for_s in [kinds[turn % 2]]
    ]
    config, plain_s = write_live_job(folder, ranks=4), seconds / 4
    before, run, after = (
        run_job(folder / name, config, faults, ranks=2, leave_after_s=leave_after_s, timeout_s=4 * seconds)
        for name, faults, leave_after_s in (
            ("before", [], plain_s),
            ("faulted", due, FAULT_EVERY_S),
            ("after", [], plain_s),
        )
    )
    kept = kept_beside_quiet(run)
    num_kills = sum(fault.kind == "kill_worker" for fault in due)
    import_share, share = (cpu_s * num_kills / (seconds * (os.cpu_count() or 1)) for cpu_s in _start_cpu_s(config))
    rates = [_rate(_applied_at(each)) for each in (before, run, after)]
    everything = 2 * rates[1] / (rates[0] + rates[2])
    return {
        "throughput_kept": round(everything, 4),
        "throughput_kept_net": round(everything / (1 - share), 4),
        "kept_beside_quiet": {kind: round(steps / expected, 4) for kind, (steps, expected) in kept.items()},
        "steps_per_s": [round(rate, 2) for rate in rates],
        "start_share": round(share, 4),
        "import_share": round(import_share, 4),
        "num_throughput_faults": len(due),
    }


def kept_beside_quiet(run: Evidence) -> dict[str, tuple[float, float]]:
    """Return, by kind of fault, the steps from each fault to the next, and those expected at the quiet rate.

    A machine's speed drifts by more than a fault costs. The reference is therefore the undisturbed speed at the end of
    the same period and of the one before.
    """
    times = _applied_at(run)
    faults = [(number(fault, "t"), str(fault["kind"])) for fault in run.of("fault")]
    hits = [(at, kind) for at, kind in faults if kind != LEAVE]
    periods = list(pairwise([*(at for at, _ in hits), _asked_at(run)]))
    quiet = [_rate([t for t in times if t > at + QUIET_FROM * (end - at) and t <= end]) for at, end in periods]
    kept: dict[str, tuple[float, float]] = {}
    for turn, ((at, end), (_, kind)) in enumerate(zip(periods, hits, strict=True)):
        if turn == 0:
            continue  # no quiet rate before it
        steps, expected = kept.get(kind, (0.0, 0.0))
        done = sum(at < t <= end for t in times)
        kept[kind] = (steps + done, expected + (end - at) * (quiet[turn - 1] + quiet[turn]) / 2)
    return kept


def _applied_at(run: Evidence) -> list[float]:
    """Return when each step was first applied, in order, until the nodes were asked to leave."""
    until = _asked_at(run)
    first: dict[int, float] = {}
    for line in run.of("step"):
        step, t = whole(line, "step"), number(line, "t")
        first[step] = min(t, first.get(step, t))
    return sorted(t for t in first.values() if t <= until)


def _asked_at(run: Evidence) -> float:
    """Return when the first node was asked to leave."""
    return min(number(fault, "t") for fault in run.of("fault") if fault["kind"] == LEAVE)


def _rate(times: list[float]) -> float:
    """Return steps/s from the first to the last of these times."""
    return (len(times) - 1) / (times[-1] - times[0])


def _start_cpu_s(config: str) -> tuple[float, float]:
    """Return the CPU seconds of a worker's imports, and of its remaining start until it is ready."""
    made = subprocess.run([sys.executable, "-c", _START, config], check=True, capture_output=True, text=True)
    imports_s, ready_s = made.stdout.split()
    return float(imports_s), float(ready_s)


_START = """
import sys, time
from pathlib import Path
import elastic_train.preload
imports_s = time.process_time()
from elastic_train.config import sources
from elastic_train.training.open_session import make_repeatable
from elastic_train.job.plan import make_plan
config = sources.load(Path(sys.argv[1]), environ={}, arguments=[])
make_repeatable(config)
plan = make_plan(config)
plan.build_state()
plan.task.metrics()
print(imports_s, time.process_time() - imports_s)
"""
