"""Kill workers of live jobs with model parallelism, at every point of a step and every rank, and with more state.

A replica (cell) is two ranks that share a decoder (`parallel.tensor: 2`). Every job has two replicas: on two nodes, or
on one node with a fifth rank, the spare. All kills are SIGKILL.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Effort
from benchmarks.recovery.kills import (
    STEP_POINTS,
    VOCABULARY,
    Shape,
    at_points,
    keys_of,
    link_s,
    often,
    seconds_of,
)
from benchmarks.recovery.watched_tasks import given_up_at
from chaos.judge.evidence.applied import pids_of, steps_of
from chaos.judge.evidence.run_files import Evidence, Line, items, number, whole
from chaos.scenario.model import Point
from chaos.scenario.schedule import Due

CELL, NUM_CELLS = 2, 2
SHAPE, WITH_SPARE = Shape(NUM_CELLS, CELL, CELL), Shape(1, NUM_CELLS * CELL + 1, CELL)
ENTERING = ("restore", "hand-over")
POINTS = (*STEP_POINTS, "commit", *ENTERING)
MOST_ARRIVALS = 3


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a decoder."""

    dim: int
    depth: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without biases and norms."""
        return 12 * self.depth * self.dim * self.dim + 2 * VOCABULARY * self.dim

    @property
    def state_bytes(self) -> int:
        """Bytes of weights with two moments each; a model-parallel rank holds about half of them."""
        return 12 * self.num_parameters


SMALL, LARGE = Size(256, 4), Size(512, 8)
"""0.06 and 0.35 GB of state. A step of the large one, with four ranks on two cores, takes about as long as the goal."""


def kills_at_points(effort: Effort) -> dict[str, object]:
    """Kill each worker of two replicas at each point; return the losses, and the time until peers noticed."""
    due = list(itertools.islice(_every_kill(), 12 if effort.is_quick else None))

    def changes(seen: Path) -> dict[str, object]:
        params = {"lane_ms": 20, "seen": str(seen), "max_tokens": 32, "model": _sizes(32, 2)}
        return _keys(params, micro_batch=4, commit_every=4)

    killed = at_points(effort, SHAPE, changes, due)
    ranks = sorted({(str(kill["point"]), _rank_of(killed.found, kill)) for kill in killed.kills})
    for point, at in itertools.groupby(ranks, lambda one: one[0]):
        effort.say(f"{point}: ranks {', '.join(str(rank) for _, rank in at)}")
    losses = given_up_at(killed.seen)
    kills = [kill for kill in killed.kills if kill["point"] in STEP_POINTS]
    seconds = [late for kill in kills for late in _noticed(killed.found, kill, losses)]
    noticed = {"p50": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)}
    return {**killed.figures, "peer_killed_given_up_s": noticed}


def _every_kill() -> Iterator[Due]:
    """Yield a kill of each worker at each point, at its first to third arrival there."""
    workers = [(node, worker) for node in range(NUM_CELLS) for worker in range(CELL)]
    for turn, ((node, worker), point) in enumerate(itertools.product(workers, POINTS)):
        if point in ENTERING:
            yield _kill(1 - node, 1 - worker, STEP_POINTS[turn % len(STEP_POINTS)])
        nth = 1 + turn % MOST_ARRIVALS if point in STEP_POINTS else 1
        yield _kill(node, worker, point, nth, is_healed=point not in ENTERING)


def _kill(node: int, worker: int, point: str, nth: int = 1, *, is_healed: bool = True) -> Due:
    at = Point(name=point, nth=nth, worker=worker)
    return Due("kill", node, None, 0.0, point=at, is_healed=is_healed)


def _rank_of(found: Evidence, kill: Line) -> int:
    """Return the rank of a process when it was killed."""
    pid = items(kill, "pids")[0]
    lines = [line for line in found.of("form") if line["pid"] == pid and number(line, "t") <= number(kill, "t")]
    return whole(lines[-1], "rank") if lines else -1


def _noticed(found: Evidence, kill: Line, losses: list[tuple[int, float]]) -> list[float]:
    """Return the seconds that each peer of a killed process still waited for it."""
    pid = items(kill, "pids")[0]
    at = number(kill, "t")
    world = next((members for _, members in sorted(pids_of(found).items(), reverse=True) if pid in members), set())
    after = min((number(line, "t") for line in found.of("form") if number(line, "t") > at), default=float("inf"))
    first: dict[int, float] = {}
    for peer, t in losses:
        if peer in world - {pid} and at < t < after:
            first[peer] = min(t, first.get(peer, t))
    return [t - at for t in first.values()]


def live_worker(effort: Effort) -> dict[str, object]:
    """Kill workers of two replicas on two nodes; return the seconds until the other replica has applied a step."""
    return {"live_worker_s": _live_worker(effort, SMALL)}


def live_worker_large(effort: Effort) -> dict[str, object]:
    """Do the same with a large state and correspondingly longer steps."""
    return {"live_worker_s.large": _live_worker(effort, LARGE)}


def _live_worker(effort: Effort, size: Size) -> dict[str, float]:
    found, costs = often(effort, SHAPE, _keys_of(size))
    return seconds_of(found, costs, state_gb=1e-9 * size.state_bytes)


def spare_fill(effort: Effort) -> dict[str, object]:
    """Kill workers of a job with a spare; return the seconds until a full world has applied a step.

    `link` is the time to send one model-parallel rank's weights and moments from one rank to another.
    """
    found, costs = often(effort, WITH_SPARE, _keys_of(LARGE))
    worlds = {term: whole(lines[0], "world") for (term, _), lines in steps_of(found).items()}
    filled = [cost for cost in costs if worlds[cost.term] == NUM_CELLS * CELL]
    for cost in costs:
        if cost not in filled:
            effort.say(f"a worker was killed while no spare was ready: {worlds[cost.term]} ranks went on")
    if not filled:
        raise SystemExit("no spare was ready when a worker was killed: the machine is too busy for this figure")
    link = link_s(LARGE.state_bytes // CELL)
    return {"spare_fill_s": seconds_of(found, filled, link=link, state_gb=1e-9 * LARGE.state_bytes)}


def _keys_of(size: Size) -> dict[str, object]:
    return _keys({"seen": "/dev/null", "max_tokens": 16, "model": _sizes(size.dim, size.depth)}, 1, 1000)


def _keys(params: Mapping[str, object], micro_batch: int, commit_every: int) -> dict[str, object]:
    task = "benchmarks.recovery.watched_tasks:WatchedLanguage"
    return keys_of(task, params, {"tensor": CELL}, micro_batch=micro_batch, commit_every=commit_every)


def _sizes(dim: int, depth: int) -> dict[str, object]:
    return {"vocabulary": VOCABULARY, "dim": dim, "depth": depth, "heads": 4, "dropout": 0.1, "tied": False}
