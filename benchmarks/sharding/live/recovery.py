"""Kill workers of real live jobs: seconds to the next step with a large state; kills at every point of a step.

The jobs run on two nodes of two ranks each, with two copies of every share.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.figures import Effort
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from benchmarks.recovery.watched_tasks import num_models
from benchmarks.sharding.jobs import MODES
from benchmarks.sharding.ranks import Meeting, run
from chaos.judge.evidence.applied import pids_of, steps_of
from chaos.judge.evidence.recovery_cost import Recovery, recoveries
from chaos.judge.evidence.run_files import Evidence, number, whole
from chaos.judge.invariants.whole_run import given_up
from chaos.scenario.model import Point
from chaos.scenario.schedule import Due

NUM_NODES, RANKS = 2, 2
VOCABULARY, DIM, DEPTH = 4096, 512, 13
NUM_PARAMETERS = 12 * DEPTH * DIM * DIM + VOCABULARY * DIM
"""Number of parameters without biases and norms; with two moments each, 0.52 GB of state."""
KILL_EVERY_S, QUIET_S = 12.0, 6.0
STEP_POINTS = ("data", "forward", "backward", "reduce", "exchange", "apply", "applied")
"""Failpoints that every process passes in a step; the kill comes at the first to fourth arrival, so any rank may be
hit."""
COMMIT_POINTS = ("commit", "record", "publish")
"""Failpoints that rank 0's process passes in a commit after some steps."""
MOST_ARRIVALS = 4


def live_worker(effort: Effort) -> dict[str, object]:
    """Return the seconds from the kill of one of four workers to the next applied step, and their components.

    `ready` is the time until the new world has its state, `step` that of an undisturbed step, and `link` the time to
    send the lost share's weights and moments from one rank to another, as a survivor has to take it over.
    """
    num_kills = 4 if effort.is_quick else 12
    due = [Due("kill_worker", turn % NUM_NODES, None, KILL_EVERY_S, is_healed=True) for turn in range(num_kills)]
    with tempfile.TemporaryDirectory() as folder:
        params = {"max_tokens": 16, "dim": DIM, "depth": DEPTH, "heads": 8, "dropout": 0.1}
        task = {"path": "elastic_train.tasks.text_classifier:TextClassifier", "params": params}
        config = _write_job(Path(folder) / "job", task, micro_batch=1, commit_every=1000)
        timeout_s = 120 + 4 * KILL_EVERY_S * num_kills
        found = _run(Path(folder) / "faulted", config, due, timeout_s)
    costs = [cost for cost in recoveries(found) if cost.kind != LEAVE]
    for cost in costs:
        effort.say(described(cost))
    seconds, ready = [cost.rto_s for cost in costs], [cost.rto_s - cost.warm_s for cost in costs]
    link_s = max(run(send_once, 2, 12 * NUM_PARAMETERS // RANKS))
    figures = {"p50": statistics.median(seconds), "max": max(seconds), "ready_p50": statistics.median(ready)}
    figures |= {"ready_max": max(ready), "step": step_s(found), "link": link_s, "state_gb": 12e-9 * NUM_PARAMETERS}
    return {"live_worker_s": {name: round(value, 3) for name, value in figures.items()} | {"kills": len(costs)}}


def send_once(meeting: Meeting, num_bytes: int) -> float:
    """Return the seconds to send `num_bytes` from one rank to another; the first time warms up."""
    group, content = meeting.group, torch.ones(num_bytes, dtype=torch.uint8)
    give, take = [(1 - group.rank, content)] * (1 - group.rank), [(1 - group.rank, content)] * group.rank
    return [meeting.timed(lambda: group.exchange(give, take)) for _ in range(2)][1]


def described(cost: Recovery) -> str:
    parts = {"detect": cost.detect_s, "form": cost.form_s, "restore": cost.restore_s, "step": cost.warm_s}
    known = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds is not None)
    return f"a worker of node {cost.node}: {cost.rto_s:.2f} s ({known})"


def step_s(found: Evidence) -> float:
    """Return the median time between applied steps within a world."""
    at = {place: min(number(line, "t") for line in lines) for place, lines in steps_of(found).items()}
    gaps = [after - at[term, step - 1] for (term, step), after in at.items() if (term, step - 1) in at]
    return statistics.median(gaps)


def kills_at_points(effort: Effort) -> dict[str, object]:
    """Return the most applied steps that a kill cost, and if a surviving process has trained a second model.

    Every process that was not killed must survive; the weights are then compared with those of one process after as
    many steps without faults.
    """
    num_kills = 12 if effort.is_quick else 50
    points = itertools.islice(itertools.cycle((*STEP_POINTS, *COMMIT_POINTS)), num_kills)
    due = [kill_at(name, turn) for turn, name in enumerate(points)]
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "models"
        params = {"max_tokens": 32, "dim": 96, "depth": 2, "heads": 4, "dropout": 0.1, "lane_ms": 20, "seen": str(seen)}
        task = {"path": "benchmarks.recovery.watched_tasks:WatchedClassifier", "params": params}
        config = _write_job(Path(folder) / "job", task, micro_batch=4, commit_every=4)
        found = _run(Path(folder) / "faulted", config, due, 120 + 20.0 * num_kills)
        models = num_models(seen)
        expected = repeat(Path(folder) / "alone", config, found, "--task.params.lane_ms=0")
    assert found.result is not None, "every run leaves one"
    kills = [fault for fault in found.of("fault") if fault["kind"] != LEAVE]
    for point in (*STEP_POINTS, *COMMIT_POINTS):
        effort.say(f"{point}: {sum(kill['point'] == point for kill in kills)} kills")
    facts = {
        "kills": len(kills),
        "hash_equal": expected["weights_sha256"] == found.result["weights_sha256"],
        "again_steps_max": max(cost.rpo_steps for cost in recoveries(found)),
        "survivors_restarted": num_restarted(found),
    }
    is_rebuilt = any(count > 1 for count in models.values()) or bool(facts["survivors_restarted"])
    return {"rpo_steps_max": given_up(found), "model_rebuilt": is_rebuilt, "kills_at_points": facts}


def kill_at(point: str, turn: int) -> Due:
    is_any = point in STEP_POINTS
    target, nth = (turn % NUM_NODES, 1 + turn % MOST_ARRIVALS) if is_any else ("leader", 1)
    return Due("kill", target, None, 0.0, point=Point(name=point, nth=nth), is_healed=True)


def num_restarted(found: Evidence) -> int:
    """Return the number of processes that left a world without being killed."""
    killed = {pid for fault in found.of("fault") for pid in fault["pids"]}  # type: ignore[attr-defined]
    asked_at = min(number(fault, "t") for fault in found.of("fault") if fault["kind"] == LEAVE)
    last = max(whole(line, "term") for line in found.of("form") if number(line, "t") < asked_at)
    worlds = [pids for term, pids in sorted(pids_of(found).items()) if term <= last]
    return len({pid for before, after in pairwise(worlds) for pid in before - after} - killed)


def _write_job(folder: Path, task: Mapping[str, object], *, micro_batch: int, commit_every: int) -> str:
    num_ranks = NUM_NODES * RANKS
    changes = {
        "task": task,
        "parallel": {"shards": MODES[-1], "copies": 2},
        "batch": {"global_batch": micro_batch * num_ranks, "micro_batch": micro_batch},
        "checkpoint": {"every": f"{commit_every} steps", "keep_last": 2},
    }
    return write_live_job(folder, num_ranks, changes)


def _run(folder: Path, config: str, due: list[Due], timeout_s: float) -> Evidence:
    return run_job(folder, config, due, ranks=RANKS, leave_after_s=QUIET_S, timeout_s=timeout_s, num_nodes=NUM_NODES)
