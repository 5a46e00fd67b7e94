"""Kill workers of live jobs with model parallelism, at every point of a step and every rank, and with more state.

A replica (cell) is two ranks that share a decoder (`parallel.tensor: 2`). Every job has two replicas: on two nodes, or
on one node with a fifth rank, the spare. All kills are SIGKILL.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Effort
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from benchmarks.recovery.watched_tasks import given_up_at, num_models
from benchmarks.sharding.live.recovery import described, num_restarted, send_once, step_s
from benchmarks.sharding.ranks import run
from chaos.judge.evidence.applied import pids_of, steps_of
from chaos.judge.evidence.recovery_cost import Recovery, recoveries
from chaos.judge.evidence.run_files import Evidence, Line, items, number, whole
from chaos.judge.invariants.whole_run import given_up
from chaos.scenario.model import Point
from chaos.scenario.schedule import Due

CELL, NUM_CELLS = 2, 2
STEP_POINTS = ("data", "forward", "backward", "reduce", "exchange", "apply", "applied")
ENTERING = ("restore", "hand-over")
"""Failpoints that ranks reach in a new world only, so another worker of another rank is killed first."""
POINTS = (*STEP_POINTS, "commit", *ENTERING)
MOST_ARRIVALS = 3
VOCABULARY = 4096
KILL_EVERY_S, QUIET_S = 12.0, 6.0


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
    """Kill each worker of two replicas at each point; return the losses, and the time until peers noticed.

    Every process that was not killed must survive; the weights are then compared with those of one replica after as
    many steps without faults.
    """
    due = list(itertools.islice(_every_kill(), 12 if effort.is_quick else None))
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen"
        params = {"lane_ms": 20, "seen": str(seen), "max_tokens": 32, "model": _sizes(VOCABULARY, 32, 2)}
        config = _write_job(Path(folder) / "job", params, micro_batch=4, commit_every=4)
        found = _run(Path(folder) / "faulted", config, due, 120 + 20.0 * len(due), num_nodes=NUM_CELLS, ranks=CELL)
        models, losses = num_models(seen), given_up_at(seen)
        expected = repeat(Path(folder) / "alone", config, found, "--task.params.lane_ms=0", ranks=CELL)
    assert found.result is not None, "every run leaves one"
    kills = [fault for fault in found.of("fault") if fault["kind"] != LEAVE]
    for line in found.of("missed"):
        effort.say(f"missed: {line['kind']} at {line['point']}: {line['why']}")
    ranks = sorted({(str(kill["point"]), _rank_of(found, kill)) for kill in kills})
    for point, at in itertools.groupby(ranks, lambda one: one[0]):
        effort.say(f"{point}: ranks {', '.join(str(rank) for _, rank in at)}")
    facts = {
        "kills": len(kills),
        "hash_equal": expected["weights_sha256"] == found.result["weights_sha256"],
        "again_steps_max": max(cost.rpo_steps for cost in recoveries(found)),
        "rollbacks": len(found.of("rollback")),
        "survivors_restarted": num_restarted(found),
    }
    is_rebuilt = any(count > 1 for count in models.values()) or bool(facts["survivors_restarted"])
    seconds = [late for kill in kills if kill["point"] in STEP_POINTS for late in _noticed(found, kill, losses)]
    return {
        "rpo_steps_max": given_up(found),
        "model_rebuilt": is_rebuilt,
        "peer_killed_given_up_s": {"p50": _rounded(statistics.median(seconds)), "max": _rounded(max(seconds))},
        "kills_at_points": facts,
    }


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
    found = _killed_often(effort, size, num_nodes=NUM_CELLS, ranks=CELL)
    costs = [cost for cost in recoveries(found) if cost.kind != LEAVE]
    return _seconds(effort, found, costs, size)


def spare_fill(effort: Effort) -> dict[str, object]:
    """Kill workers of a job with a spare; return the seconds until a full world has applied a step.

    `link` is the time to send one model-parallel rank's weights and moments from one rank to another.
    """
    num_ranks = NUM_CELLS * CELL
    found = _killed_often(effort, LARGE, num_nodes=1, ranks=num_ranks + 1)
    worlds = {term: whole(lines[0], "world") for (term, _), lines in steps_of(found).items()}
    costs = [cost for cost in recoveries(found) if cost.kind != LEAVE]
    filled = [cost for cost in costs if worlds[cost.term] == num_ranks]
    for cost in costs:
        if cost not in filled:
            effort.say(f"a worker was killed while no spare was ready: {worlds[cost.term]} ranks went on")
    if not filled:
        raise SystemExit("no spare was ready when a worker was killed: the machine is too busy for this figure")
    link_s = max(run(send_once, 2, LARGE.state_bytes // CELL))
    return {"spare_fill_s": {**_seconds(effort, found, filled, LARGE), "link": _rounded(link_s)}}


def _killed_often(effort: Effort, size: Size, *, num_nodes: int, ranks: int) -> Evidence:
    num_kills = 4 if effort.is_quick else 12
    due = [Due("kill_worker", turn % num_nodes, None, KILL_EVERY_S, is_healed=True) for turn in range(num_kills)]
    with tempfile.TemporaryDirectory() as folder:
        params = {"seen": f"{folder}/seen", "max_tokens": 16, "model": _sizes(VOCABULARY, size.dim, size.depth)}
        config = _write_job(Path(folder) / "job", params, micro_batch=1, commit_every=1000)
        timeout_s = 120 + 4 * KILL_EVERY_S * num_kills
        return _run(Path(folder) / "faulted", config, due, timeout_s, num_nodes=num_nodes, ranks=ranks)


def _seconds(effort: Effort, found: Evidence, costs: list[Recovery], size: Size) -> dict[str, float]:
    """Return the seconds from kills to the next applied step; `ready` is the time until a world has its state."""
    for cost in costs:
        effort.say(described(cost))
    seconds, ready = [cost.rto_s for cost in costs], [cost.rto_s - cost.warm_s for cost in costs]
    figures = {"p50": statistics.median(seconds), "max": max(seconds), "ready_p50": statistics.median(ready)}
    figures |= {"step": step_s(found), "state_gb": 1e-9 * size.state_bytes, "kills": len(costs)}
    return {name: _rounded(value) for name, value in figures.items()}


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _sizes(vocabulary: int, dim: int, depth: int) -> dict[str, object]:
    return {"vocabulary": vocabulary, "dim": dim, "depth": depth, "heads": 4, "dropout": 0.1, "tied": False}


def _write_job(folder: Path, params: Mapping[str, object], *, micro_batch: int, commit_every: int) -> str:
    num_lanes = NUM_CELLS * CELL
    changes = {
        "task": {"path": "benchmarks.recovery.watched_tasks:WatchedLanguage", "params": params},
        "parallel": {"tensor": CELL},
        "batch": {"global_batch": micro_batch * num_lanes, "micro_batch": micro_batch},
        "checkpoint": {"every": f"{commit_every} steps", "keep_last": 2},
    }
    return write_live_job(folder, num_lanes, changes)


def _run(folder: Path, config: str, due: list[Due], timeout_s: float, *, num_nodes: int, ranks: int) -> Evidence:
    return run_job(
        folder,
        config,
        due,
        ranks=ranks,
        leave_after_s=QUIET_S,
        timeout_s=timeout_s,
        num_nodes=num_nodes,
        cell_size=CELL,
    )
