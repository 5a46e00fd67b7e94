"""Measure how recovery time grows with ranks and with bytes: one node, or one worker, of several is killed.

    python -m benchmarks.scale [--json] [--quick] [--only NAME]

by_ranks    seconds from the kill to the next applied step, and its parts: until the next world is sealed (detect),
            until its ranks are connected (form), until they have the state (restore), and the first step less a later
            one of that world (step); medians, by the ranks of the world that was hit (goal with 32: 1.0 in all).
            Ranks notice a death once they have computed the lane that they are at: `LANE_MS` at most is no delay
            `cpu` has the seconds of a core that a survivor takes until its next lane, beyond those of a step, and
            `busiest` those of the survivor that takes the most
growth      the parts as `a + b * ranks`, fitted by least squares: seconds, and seconds a rank
kills       the same parts of every kill, by ranks; `benchmarks.field` extrapolates these
machine     date, cores and versions
by_bytes    medians by gigabytes of state (weights and two moments), whole on each of four ranks, or in shards with two
            copies: one worker is killed after another, and the others have the state for their next step after `ready`
            seconds, its parts as above; `first` has those of that step, and `join` those in which the ranks that come
            in their place get the state
per_gb      these as `a + b * gigabytes`, fitted by least squares
etcd        what a recovery asks of etcd, by ranks: keys written, events, messages, bytes, its core seconds (`etcd_s`),
            and a survivor's for its membership (`member_s`)
held        descriptors and threads of a rank once a world has formed, the most of any, by ranks

All ranks are processes of one machine; each takes `LANE_MS` longer for its lane, so that cores are free for what is
measured. The last line is JSON.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch

from benchmarks.etcd_load import load_of
from benchmarks.figures import Effort, measure_chosen
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.kills import Shape, keys_of, often, step_s
from benchmarks.recovery.live import run_job
from benchmarks.recovery.watched_tasks import recovery_cpu_s
from chaos.judge.evidence.applied import formed_at, pids_of
from chaos.judge.evidence.recovery_cost import Recovery, recoveries
from chaos.judge.evidence.run_files import Evidence, number, whole
from chaos.scenario.schedule import Due

STATES = {0.01: (96, 4), 0.1: (256, 9), 0.52: (512, 13), 2.0: (1024, 13)}
"""Width and depth of models, by gigabytes of state."""
SHAPE = Shape(num_nodes=2, ranks=2)
RANKS = 4
"""Per node."""
LANE_MS = 500.0
QUIET_S = 15.0
"""Before each kill, so that standby processes have imported."""
PARTS = ("rto", "detect", "form", "restore", "step", "cpu", "busiest")
SEEN = "seen.jsonl"


def by_ranks(effort: Effort) -> dict[str, object]:
    """Return medians of recoveries, their growth with the number of ranks, and a rank's descriptors and threads."""
    sizes, num_kills = ((8, 32), 1) if effort.is_quick else ((8, 16, 32, 64), 3)
    found, held = dict[str, Mapping[str, float]](), dict[str, Mapping[str, int]]()
    kills = dict[str, Sequence[Mapping[str, float]]]()
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = _run(Path(folder), size // RANKS, num_kills)
            parts = [_parts(run, cost, Path(folder) / SEEN) for cost in recoveries(run) if cost.kind == "kill_node"]
        kills[str(size)] = [{name: round(value, 3) for name, value in one.items()} for one in parts]
        found[str(size)] = {name: round(statistics.median(one[name] for one in parts), 3) for name in PARTS}
        holds = [cast(Mapping[str, int], line["holds"]) for line in run.of("form")]
        held[str(size)] = {name: max(one[name] for one in holds) for name in ("fds", "threads")}
        effort.say(f"{size} ranks: {found[str(size)]}, {held[str(size)]}")
    machine = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    return {"by_ranks": found, "growth": _growth(found, PARTS), "held": held, "kills": kills, "machine": machine}


def by_bytes(effort: Effort) -> dict[str, object]:
    """Return medians of recoveries by the bytes of the state, and their growth with these."""
    found, per_gb = dict[str, dict[str, dict[str, float]]](), dict[str, object]()
    for name, parallel in (("whole", {"shards": "none"}), ("shards", {"shards": "parameters", "copies": 2})):
        found[name] = {}
        for gigabytes, (dim, depth) in STATES.items():
            if effort.is_quick and gigabytes > 0.1:
                continue
            params = {"max_tokens": 16, "dim": dim, "depth": depth, "heads": 4, "dropout": 0.1}
            task = "elastic_train.tasks.text_classifier:TextClassifier"
            changes = keys_of(task, params, parallel, micro_batch=1, commit_every=1000)
            run, costs = often(replace(effort, is_quick=True), SHAPE, changes)
            medians = {
                "ready": statistics.median(cost.rto_s - cost.warm_s for cost in costs),
                "detect": statistics.median(cost.detect_s for cost in costs if cost.detect_s is not None),
                "form": statistics.median(cost.form_s for cost in costs if cost.form_s is not None),
                "restore": statistics.median(cost.restore_s for cost in costs),
                "first": statistics.median(cost.warm_s for cost in costs),
                "join": statistics.median(_join_s(run)),
            }
            found[name][str(gigabytes)] = {part: round(seconds, 3) for part, seconds in medians.items()}
            effort.say(f"{gigabytes} GB, {name}: {found[name][str(gigabytes)]}")
        per_gb[name] = _growth(found[name], list(medians))
    return {"by_bytes": found, "per_gb": per_gb}


def _join_s(run: Evidence) -> list[float]:
    """Return the seconds in which each world with a new process brought its ranks to one state.

    In long steps a replacement is there before the others notice the death, so it is in their next world.
    """
    pids, took = pids_of(run), defaultdict[int, list[float]](list)
    for line in run.of("restore"):
        took[whole(line, "term")].append(number(line, "seconds"))
    return [max(took[term]) for before, term in pairwise(sorted(took)) if pids[term] - pids[before]]


def etcd(effort: Effort) -> dict[str, object]:
    """Return what a recovery asks of etcd."""
    found = {}
    for size in (8, 16) if effort.is_quick else (8, 16, 32, 64):
        found[str(size)] = load_of(size)
        effort.say(f"{size} ranks: {found[str(size)]}")
    return {"etcd": found}


def _run(folder: Path, num_nodes: int, num_kills: int) -> Evidence:
    params = {"max_tokens": 16, "dim": 32, "depth": 1, "heads": 4, "lane_ms": LANE_MS, "seen": str(folder / SEEN)}
    changes = {
        "task": {"path": "benchmarks.recovery.watched_tasks:WatchedClassifier", "params": params},
        "batch": {"global_batch": num_nodes * RANKS, "micro_batch": 1},
    }
    config = write_live_job(folder / "job", num_nodes * RANKS, changes)
    due: list[Due] = []
    for turn in range(num_kills):
        node = 1 + turn % (num_nodes - 1)
        due += [
            Due("kill_node", node, None, QUIET_S, is_healed=True),
            Due("start_node", node, None, 8.0),
        ]
    return run_job(
        folder / "run",
        config,
        due,
        ranks=RANKS,
        leave_after_s=2.0,
        timeout_s=120.0 + (QUIET_S + 10.0 * num_nodes) * (1 + num_kills),
        num_nodes=num_nodes,
        forked=True,
    )


def _parts(run: Evidence, cost: Recovery, seen: Path) -> dict[str, float]:
    one_step_s, cpu_s = step_s(run, cost.term), recovery_cpu_s(seen, cost.at, formed_at(run)[cost.term])
    clock = (cost.rto_s - one_step_s, cost.detect_s, cost.form_s, cost.restore_s, cost.warm_s - one_step_s)
    known = (*clock, statistics.median(cpu_s), max(cpu_s))
    return {name: value for name, value in zip(PARTS, known, strict=True) if value is not None}


def _growth(found: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> dict[str, Sequence[float]]:
    sizes = np.array([float(size) for size in found])
    lines = {name: np.polyfit(sizes, [parts[name] for parts in found.values()], 1) for name in names}
    return {name: [round(float(line[1]), 4), round(float(line[0]), 5)] for name, line in lines.items()}


FIGURES: Mapping[str, Callable[[Effort], dict[str, object]]] = {
    **dict.fromkeys(("by_ranks", "growth", "held", "kills", "machine"), by_ranks),
    **dict.fromkeys(("by_bytes", "per_gb"), by_bytes),
    "etcd": etcd,
}


if __name__ == "__main__":
    measure_chosen("benchmarks.scale", __doc__, FIGURES)
