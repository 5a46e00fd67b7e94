"""Kill workers of live jobs, one after another or at points of a step, and say what that cost."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from benchmarks.recovery.watched_tasks import num_models
from chaos.judge.evidence.applied import pids_of, steps_of
from chaos.judge.evidence.recovery_cost import Recovery, recoveries
from chaos.judge.evidence.run_files import Evidence, Line, number, whole
from chaos.judge.invariants.whole_run import given_up
from chaos.scenario.schedule import Due

STEP_POINTS = ("data", "forward", "backward", "reduce", "exchange", "apply", "applied")
"""Failpoints that every process passes in a step."""
KILL_EVERY_S, QUIET_S = 12.0, 6.0
VOCABULARY, NUM_LANES = 4096, 4
Changes = Callable[[Path], Mapping[str, object]]
"""Returns a job's own sections; the path is that of the file for the task's watch."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The nodes of a job, the ranks on each, and the model-parallel ranks of a replica."""

    num_nodes: int
    ranks: int
    cell: int = 1

    def run(self, folder: Path, changes: Mapping[str, object], due: Sequence[Due], timeout_s: float) -> Evidence:
        """Run a job through faults."""
        return run_job(
            folder / "faulted",
            write_live_job(folder / "job", NUM_LANES, changes),
            [*due],
            ranks=self.ranks,
            leave_after_s=QUIET_S,
            timeout_s=timeout_s,
            num_nodes=self.num_nodes,
            cell_size=self.cell,
        )


def keys_of(
    task: str,
    params: Mapping[str, object],
    parallel: Mapping[str, object],
    *,
    micro_batch: int,
    commit_every: int,
) -> dict[str, object]:
    """Return a job's sections."""
    return {
        "task": {"path": task, "params": params},
        "parallel": parallel,
        "batch": {"global_batch": micro_batch * NUM_LANES, "micro_batch": micro_batch},
        "checkpoint": {"every": f"{commit_every} steps", "keep_last": 2},
    }


@dataclass(frozen=True, slots=True)
class Killed:
    """A job whose workers were killed at points of a step: its files, the kills, the figures, and the watch's file."""

    found: Evidence
    kills: Sequence[Line]
    figures: dict[str, object]
    seen: str


def at_points(effort: Effort, shape: Shape, changes: Changes, due: Sequence[Due]) -> Killed:
    """Kill workers at points; then repeat the steps in one replica without faults.

    `rpo_steps_max` is the most applied steps that a kill cost; `model_rebuilt` is True if a process that was not killed
    trained a second model or did not survive.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, seen = Path(name), Path(name) / "seen"
        found = shape.run(folder, changes(seen), due, 120 + 20.0 * len(due))
        models, text = num_models(seen), seen.read_text()
        config = str(folder / "job" / "config.yaml")
        expected = repeat(folder / "alone", config, found, "--task.params.lane_ms=0", ranks=shape.cell)
    assert found.result is not None, "every run leaves one"
    for line in found.of("missed"):
        effort.say(f"missed: {line['kind']} at {line['point']}: {line['why']}")
    kills = killed(found)
    facts = {
        "kills": len(kills),
        "hash_equal": expected["weights_sha256"] == found.result["weights_sha256"],
        "again_steps_max": max(cost.rpo_steps for cost in recoveries(found)),
        "rollbacks": len(found.of("rollback")),
        "survivors_restarted": num_restarted(found),
    }
    is_rebuilt = any(count > 1 for count in models.values()) or bool(facts["survivors_restarted"])
    figures = {"rpo_steps_max": given_up(found), "model_rebuilt": is_rebuilt, "kills_at_points": facts}
    return Killed(found, kills, figures, text)


def often(effort: Effort, shape: Shape, changes: Mapping[str, object]) -> tuple[Evidence, list[Recovery]]:
    """Kill a worker of each node in turn, with quiet time between; return the recoveries."""
    num_kills = 4 if effort.is_quick else 12
    due = [Due("kill_worker", turn % shape.num_nodes, None, KILL_EVERY_S, is_healed=True) for turn in range(num_kills)]
    with tempfile.TemporaryDirectory() as folder:
        found = shape.run(Path(folder), changes, due, 120 + 4 * KILL_EVERY_S * num_kills)
    costs = [cost for cost in recoveries(found) if cost.kind != LEAVE]
    for cost in costs:
        effort.say(_described(cost))
    return found, costs


def seconds_of(found: Evidence, costs: Sequence[Recovery], **more: float) -> dict[str, float]:
    """Return the seconds from kills to the next applied step; `ready` is the time until a world has its state."""
    seconds, ready = [cost.rto_s for cost in costs], [cost.rto_s - cost.warm_s for cost in costs]
    figures = {"p50": statistics.median(seconds), "max": max(seconds), "ready_p50": statistics.median(ready)}
    figures |= {"ready_max": max(ready), "step": step_s(found), "kills": len(costs), **more}
    return {name: round(value, 3) for name, value in figures.items()}


def link_s(num_bytes: int) -> float:
    """Return the seconds to send `num_bytes` from one rank to another."""
    return float(max(run(_send, 2, num_bytes)))


def _send(meeting: Meeting, num_bytes: int) -> float:
    """Send twice, since the first time warms up."""
    group, content = meeting.group, torch.ones(num_bytes, dtype=torch.uint8)
    give, take = [(1 - group.rank, content)] * (1 - group.rank), [(1 - group.rank, content)] * group.rank
    return [meeting.timed(lambda: group.exchange(give, take)) for _ in range(2)][1]


def _described(cost: Recovery) -> str:
    parts = {"detect": cost.detect_s, "form": cost.form_s, "restore": cost.restore_s, "step": cost.warm_s}
    known = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds is not None)
    return f"a worker of node {cost.node}: {cost.rto_s:.2f} s ({known})"


def killed(found: Evidence) -> list[Line]:
    return [fault for fault in found.of("fault") if fault["kind"] != LEAVE]


def step_s(found: Evidence, of_term: int | None = None) -> float:
    """Return the median time between applied steps within a world: that of a term, or any."""
    applied = {place: lines for place, lines in steps_of(found).items() if of_term in (None, place[0])}
    at = {place: min(number(line, "t") for line in lines) for place, lines in applied.items()}
    gaps = [after - at[term, step - 1] for (term, step), after in at.items() if (term, step - 1) in at]
    return statistics.median(gaps)


def num_restarted(found: Evidence) -> int:
    """Return the number of processes that left a world without being killed."""
    dead = {pid for fault in found.of("fault") for pid in fault["pids"]}  # type: ignore[attr-defined]
    asked_at = min(number(fault, "t") for fault in found.of("fault") if fault["kind"] == LEAVE)
    last = max(whole(line, "term") for line in found.of("form") if number(line, "t") < asked_at)
    worlds = [pids for term, pids in sorted(pids_of(found).items()) if term <= last]
    return len({pid for before, after in pairwise(worlds) for pid in before - after} - dead)
