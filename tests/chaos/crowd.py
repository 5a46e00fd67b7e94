"""Histories of a thousand nodes, synthesised without training: worlds shrink and grow while nodes are killed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from chaos.judge.evidence.run_files import Evidence, Line

BEGAN = 1_800_000_000.0


@dataclass(frozen=True)
class Crowd:
    """Numbers of nodes of one rank, of terms and of steps per term; no commit has a term's last `lost` steps."""

    nodes: int = 1000
    terms: int = 40
    steps: int = 8
    lost: int = 3
    seed: int = 1


def gather(crowd: Crowd) -> Evidence:
    """Return the evidence of a job in which every term but the last ends with one killed node, which returns later."""
    draws = random.Random(crowd.seed)
    chaos: list[Line] = [{"op": "scenario", "t": BEGAN, "name": "crowd", "seed": crowd.seed, "recovery": "restart"}]
    processes: list[list[Line]] = [chaos]
    up = set(range(crowd.nodes))
    now, step, pid = BEGAN, 0, 1000
    for term in range(1, crowd.terms + 1):
        now += 5.0
        ranks = sorted(up)
        for rank, node in enumerate(ranks):
            pid += 1
            chaos.append({"op": "node", "t": now, "node": node, "pids": [pid]})
            processes.append(_process(crowd, term, rank, len(ranks), pid, now, step))
        now += crowd.steps + 1.0
        commit = {"op": "commit", "t": now - 0.1, "term": term, "rank": 0, "step": step + crowd.steps - crowd.lost}
        key = f"commits/{term:08d}-{step + crowd.steps - crowd.lost:012d}.json"
        processes[-len(ranks)].append({**commit, "key": key, "digest": f"{term:064d}", "parent": None, "seconds": 0.1})
        step += crowd.steps - crowd.lost
        if term < crowd.terms:
            victim = draws.choice(ranks)
            up = (set(range(crowd.nodes)) if term % 5 == 0 or 2 * len(up) <= crowd.nodes else up) - {victim}
            moment = {
                "seen_step": step + crowd.lost,
                "term": term,
                "pids": [pid - len(ranks) + 1 + ranks.index(victim)],
            }
            chaos.append({"op": "fault", "t": now + 0.2, "kind": "kill_node", "node": victim, **moment})
    return Evidence(Path("crowd"), processes, [], {}, None, None)


def _process(crowd: Crowd, term: int, rank: int, world: int, pid: int, now: float, step: int) -> list[Line]:
    who = {"term": term, "rank": rank}
    form = {"op": "form", "t": now, **who, "world": world, "pid": pid, "cause": "lost", "sealed_at": now - 0.5}
    restore = {"op": "restore", "t": now + 0.5, **who, "step": step, "commit": None}
    place = {"epoch": 0, "lanes": [rank, rank + 1], "world": world, "num_samples": world}
    steps = [
        {
            "op": "step",
            "t": now + 1.0 + number,
            **who,
            "step": step + number,
            "lo": 0,
            "hi": 1,
            **place,
            "loss": 1 / number,
        }
        for number in range(1, crowd.steps + 1)
    ]
    return [form, restore, *steps]
