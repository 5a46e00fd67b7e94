"""Long runs: many nodes, hours of virtual time, a fixed fault rate, and steps of seconds, as a transformer's.

They differ from short runs in shape only. Steps, leases, polling and peer timeouts are longer in proportion, so an hour
has fewer events; commits are frequent enough for a job that loses all nodes now and then. All seeds of one range of
nodes share lanes, rows and steps, so the fault-free reference run is computed once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from chaos.errors import ScenarioError
from chaos.sim.campaign.simulate import Case, case_of, in_shards
from chaos.sim.campaign.swarm import draw_at_rate
from chaos.sim.job.shape import Shape

STEP_S = 10.0
"""Default duration of a step at full world size; smaller worlds take longer."""
MOST_STEPS, MOST_ROWS = 20, 4096
"""Approximate maximum of steps and samples in an epoch: every rank counts each sample."""
SLOWEST = 1.35
"""The slowest of many ranks takes this many times as long as the shape says."""
DELAYS_S, FAR_S, FEW = (0.001, 0.003, 0.02), (0.02, 0.05), 128
"""Message delays. More than `FEW` members use the long ones, so that a thousand concurrent writes reach a watcher in a
few batches and not one by one."""
WORKERS, CELLS, MOST_STAGES, NODES_OF_CELLS = 8, (2, 4, 8), 4, (4, 16)
"""Workers per node, choices of stage size, and most stages in long runs with cells; number of nodes (from, to) in short
runs that do not set one."""
PIECE_S = 1e-4
"""Time per node that a mirror of etcd needs for an update, with more than `FEW` members and steps of `STEP_S`. Grows
with the step time, because the survivors of a world also meet more slowly."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Bounds of the drawn cases: number of nodes (from, to) and virtual hours; None lets each seed decide."""

    nodes: tuple[int, int] | None = None
    hours: float | None = None
    faults_per_hour: float = 120.0
    step_s: float = STEP_S
    in_shards: bool = False
    """True if every job trains a real, tiny model in shards; otherwise long runs use none."""
    in_cells: bool = False
    """True if every job uses model-parallel cells of several ranks."""
    in_stages: bool = False
    """True if these cells have pipeline stages, which may be on different nodes."""

    def case(self, seed: int) -> Case:
        if self.hours is None:
            num_nodes = None if self.nodes is None and not self.in_cells else self._draw_nodes(seed)
            case = case_of(seed, num_nodes, has_cells=self.in_cells, has_stages=self.in_stages)
            return replace(case, shape=self._cut(seed, case.shape))
        shape = self._cut(seed, self._shape(seed))
        return Case(seed, shape, draw_at_rate(random.Random(f"{seed}/faults"), shape, self.faults_per_hour))

    @property
    def options(self) -> str:
        """The command-line options that draw these cases."""
        options = []
        if self.nodes is not None:
            lo, hi = self.nodes
            options.append(f"--nodes {lo}" if lo == hi else f"--nodes {lo}..{hi}")
        if self.hours is not None:
            options.append(f"--hours {self.hours:g} --faults-per-hour {self.faults_per_hour:g}")
        if self.hours is not None and self.step_s != STEP_S:
            options.append(f"--step-s {self.step_s:g}")
        options += ["--shards"] * self.in_shards + ["--cells"] * self.in_cells + ["--stages"] * self.in_stages
        return " ".join(options)

    def _cut(self, seed: int, shape: Shape) -> Shape:
        """Return the shape, with its state in shards if `in_shards` is set."""
        return in_shards(shape, random.Random(f"{seed}/shards")) if self.in_shards else shape

    def _draw_nodes(self, seed: int) -> int:
        lo, hi = self.nodes or NODES_OF_CELLS
        return min(hi, round(math.exp(random.Random(f"{seed}/nodes").uniform(math.log(lo), math.log(hi)))))

    def _shape(self, seed: int) -> Shape:
        assert self.hours is not None, "a long run has an end"
        draws = random.Random(f"{seed}/shape")
        num_nodes = 16 if self.nodes is None else self._draw_nodes(seed)
        lanes = 16 if self.nodes is None else self.nodes[1]
        cells = _Cells()
        if self.in_cells:
            most = min(MOST_STAGES, num_nodes // 2) if self.in_stages else 1
            cells, lanes = _draw_cells(random.Random(f"{seed}/cells"), lanes, most)
        num_replicas, num_members = cells.on(num_nodes), num_nodes * cells.ranks
        micro_batch = 2 if lanes <= MOST_ROWS // (2 * MOST_STEPS) else 1
        steps_per_epoch = max(2, min(MOST_STEPS, MOST_ROWS // (lanes * micro_batch)))
        num_rows = lanes * micro_batch * steps_per_epoch - lanes // 3  # the last step is short in some lanes
        num_steps, step_s = self.hours * 3600 / (self.step_s * SLOWEST), self.step_s
        shape = Shape(
            nodes=num_nodes,
            ranks=cells.ranks,
            cell=cells.stage_size * cells.stages,
            stages=cells.stages,
            lanes=lanes,
            micro_batch=micro_batch,
            rows=tuple((number + 1) * num_rows // 8 - number * num_rows // 8 for number in range(8)),
            epochs=max(1, round(num_steps / steps_per_epoch)),
            commit_every=draws.choice((3, 6, 12)),
            lane_s=step_s / -(-lanes // num_replicas),
            ttl_s=draws.choice((step_s / 2, step_s)),
            look_s=step_s,
            keep_last=draws.choice((2, 3, 5)),
            least_part_bytes=draws.choice((1, 1 << 20)),
            peer_timeout_s=draws.choice((6 * step_s, 30 * step_s)),
            delay_s=draws.choice(DELAYS_S if num_members <= FEW else FAR_S),
            piece_s=0.0 if num_members <= FEW else PIECE_S * num_members * step_s / STEP_S,
        )
        return replace(shape, min_nodes=draws.choice((1, max(1, num_nodes // 4))))


class _Cells(NamedTuple):
    """Workers per node, workers of one node in a stage, and stages per cell."""

    ranks: int = 1
    stage_size: int = 1
    stages: int = 1

    def on(self, num_nodes: int) -> int:
        """Return how many cells this number of nodes forms."""
        return num_nodes * (self.ranks // self.stage_size) // self.stages


def _draw_cells(draws: random.Random, num_nodes: int, most_stages: int) -> tuple[_Cells, int]:
    """Return cells and the number of them that get lanes: in some jobs a few cells stay spare."""
    found = _Cells(WORKERS, draws.choice(CELLS))
    if most_stages > 1:
        found = found._replace(stages=draws.randint(2, most_stages))
    num_cells = found.on(num_nodes)
    return found, max(found.stages, num_cells - draws.choice((0, num_cells // 16)))


def nodes_of(text: str) -> tuple[int, int]:
    """Parse N or A..B; raise ScenarioError for anything else."""
    lo, _, hi = text.partition("..")
    if not lo.isdecimal() or not (hi or lo).isdecimal() or not 1 <= int(lo) <= int(hi or lo):
        raise ScenarioError(f"--nodes {text}: give a number of nodes, or A..B for as many as each seed draws")
    return int(lo), int(hi or lo)
