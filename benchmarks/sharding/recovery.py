"""Kill workers of live jobs with sharded state: two nodes of two ranks each, with two copies of every share."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.figures import Effort
from benchmarks.recovery.kills import STEP_POINTS, VOCABULARY, Shape, at_points, keys_of, link_s, often, seconds_of
from benchmarks.sharding.jobs import MODES
from chaos.scenario.model import Point
from chaos.scenario.schedule import Due

SHAPE = Shape(num_nodes=2, ranks=2)
PARALLEL = {"shards": MODES[-1], "copies": 2}
DIM, DEPTH = 512, 13
NUM_PARAMETERS = 12 * DEPTH * DIM * DIM + VOCABULARY * DIM
"""Number of parameters without biases and norms; with two moments each, 0.52 GB of state."""
COMMIT_POINTS = ("commit", "record", "publish")
"""Failpoints that rank 0's process passes in a commit after some steps."""
MOST_ARRIVALS = 4


def live_worker(effort: Effort) -> dict[str, object]:
    """Return the seconds from the kill of one of four workers to the next applied step, and their components.

    `link` is the time to send the lost share's weights and moments from one rank to another, as a survivor has to take
    it over.
    """
    params = {"max_tokens": 16, "dim": DIM, "depth": DEPTH, "heads": 8, "dropout": 0.1}
    task = "elastic_train.tasks.text_classifier:TextClassifier"
    found, costs = often(effort, SHAPE, keys_of(task, params, PARALLEL, micro_batch=1, commit_every=1000))
    link = link_s(12 * NUM_PARAMETERS // SHAPE.ranks)
    return {"live_worker_s": seconds_of(found, costs, link=link, state_gb=12e-9 * NUM_PARAMETERS)}


def kills_at_points(effort: Effort) -> dict[str, object]:
    """Kill workers at all points, at the first to fourth arrival there, so any rank may be hit."""
    points = itertools.islice(itertools.cycle((*STEP_POINTS, *COMMIT_POINTS)), 12 if effort.is_quick else 50)

    def changes(seen: Path) -> dict[str, object]:
        params = {"max_tokens": 32, "dim": 96, "depth": 2, "heads": 4, "dropout": 0.1, "lane_ms": 20, "seen": str(seen)}
        task = "benchmarks.recovery.watched_tasks:WatchedClassifier"
        return keys_of(task, params, PARALLEL, micro_batch=4, commit_every=4)

    found = at_points(effort, SHAPE, changes, [_kill_at(name, turn) for turn, name in enumerate(points)])
    for point in (*STEP_POINTS, *COMMIT_POINTS):
        effort.say(f"{point}: {sum(kill['point'] == point for kill in found.kills)} kills")
    return found.figures


def _kill_at(point: str, turn: int) -> Due:
    is_any = point in STEP_POINTS
    target, nth = (turn % SHAPE.num_nodes, 1 + turn % MOST_ARRIVALS) if is_any else ("leader", 1)
    return Due("kill", target, None, 0.0, point=Point(name=point, nth=nth), is_healed=True)
