"""Jobs of cells on hundreds of ranks, in virtual time: what they take to simulate, and how much of their time counts.

Goodput is the share of the time that goes into steps that count. What a fault costs is what the simulator says: seconds
until the next applied step, and applied steps that are computed again. How often faults come is what is published:
Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, section 3.3.4), and a
job of fewer GPUs as many fewer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.figures import Effort
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.sim.campaign.long_runs import SLOWEST, WORKERS, Draw
from chaos.sim.campaign.simulate import simulate
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Recovery, Shape
from elastic_train.checkpoint.interval.young_daly import optimum

INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384
PER_GPU_HOUR = INTERRUPTIONS / (DAYS * 24 * GPUS)
JOBS = ((256, 256), (1_024, 1_024), (1_024, 16_384))
"""Ranks that are simulated, and of how many GPUs they have the failures."""
STEP_S, START_S, STALL_S, LEASE_S, AWAY_S = 60.0, 60.0, 5.0, 10.0, 300.0
"""What is assumed: a step, the start of a process, what training waits for a save, a lease, and until a lost node is
back. A spare node takes its place at once."""
NUM_FAULTS, FEW_FAULTS = 8, 2
SIMULATED_STEP_S, FAULTS_PER_HOUR = 30.0, 4.0


def cost_of_an_hour(effort: Effort) -> dict[str, object]:
    """Return the seconds of a core that a virtual hour takes, of a job that is hit four times in it, and is valid."""
    found: dict[str, object] = {}
    for num_ranks in (256, 1_024):
        num_nodes = num_ranks // WORKERS
        hours = 0.25 if effort.is_quick else 1.0
        draw = Draw((num_nodes, num_nodes), hours, FAULTS_PER_HOUR, SIMULATED_STEP_S, in_cells=True)
        began = time.process_time()
        outcome = simulate(draw.case(0))
        cpu_s = time.process_time() - began
        if outcome.violations:
            raise SystemExit(f"{num_ranks} ranks: {outcome.violations[0]}")
        hours = outcome.virtual_s / 3600  # with what the faults have cost
        found[f"sim_{num_ranks}_ranks_cpu_s_per_hour"] = round(cpu_s / hours, 1)
        effort.say(
            f"{num_ranks} ranks in cells of {outcome.case.shape.cell}: {hours:.2f} virtual hours, "
            f"{sum(outcome.num_faults.values())} faults, {cpu_s:.0f} s of a core: "
            f"elastic-chaos sim {draw.options} --seed 0"
        )
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """What a fault cost: seconds until the next applied step, steps that were applied before, and both in seconds."""

    down_s: float
    again_steps: int

    @property
    def lost_s(self) -> float:
        """Without the fault the next step would have come after half a step, on average."""
        return max(0.0, self.down_s - STEP_S / 2) + self.again_steps * STEP_S


def goodput(effort: Effort) -> dict[str, object]:
    """Return goodput by ranks, failures and mode of recovery, and what a fault costs in each."""
    found = {}
    for num_ranks, num_gpus in JOBS:
        mtbf_s = 3600 / (PER_GPU_HOUR * num_gpus)
        every_s = optimum(STALL_S, mtbf_s)
        for recovery in ("live", "restart"):
            costs = _costs(effort, num_ranks, recovery, round(every_s / STEP_S))
            lost_s = statistics.mean(cost.lost_s for cost in costs)
            saving = every_s / (every_s + STALL_S)
            row = {
                "goodput": round(saving / (1 + lost_s / mtbf_s), 5),
                "mtbf_h": round(mtbf_s / 3600, 1),
                "commit_every_s": round(every_s),
                "lost_s": round(lost_s),
                "lost_s_max": round(max(cost.lost_s for cost in costs)),
                "again_steps": round(statistics.mean(cost.again_steps for cost in costs), 1),
                "faults": len(costs),
            }
            effort.say(f"{num_ranks} ranks, failures of {num_gpus} GPUs, {recovery}: {row}")
            found[f"{num_ranks} ranks, failures of {num_gpus} GPUs, {recovery}"] = row
    return {"goodput": found}


def _costs(effort: Effort, num_ranks: int, recovery: Recovery, commit_every: int) -> list[Cost]:
    """Simulate a job that loses nodes and workers in turn, once between two commits each, at all times between them."""
    num_faults = FEW_FAULTS if effort.is_quick else NUM_FAULTS
    shape = _shape(num_ranks, recovery, commit_every, (num_faults + 2) * commit_every)
    faults = tuple(_faults(shape.max_nodes, commit_every, num_faults))
    run = Job(shape, 0, faults).run()
    found = [Cost(one.rto_s, one.rpo_steps) for one in recoveries(run) if one.kind in ("kill_worker", "lose_node")]
    # One may have hit the node that waits.
    if len(found) < num_faults - 1 or run.result is None or run.result["status"] != "done":
        raise SystemExit(f"{num_ranks} ranks, {recovery}: {len(found)} of {num_faults} faults were recovered from")
    return found


def _faults(num_nodes: int, commit_every: int, num_faults: int) -> Iterator[SimFault]:
    for turn in range(num_faults):
        step = commit_every * (turn + 1) + int((turn + 0.5) / num_faults * commit_every)
        kind = ("kill_worker", "lose_node")[turn % 2]
        node, rank = (7 * turn + 3) % num_nodes, turn % WORKERS
        yield SimFault(kind, at_s=STEP_S / 2, node=node, rank=rank, for_s=AWAY_S, step=step)


def _shape(num_ranks: int, recovery: Recovery, commit_every: int, num_steps: int) -> Shape:
    """Return a job whose nodes are cells; each has one lane, so no step is slower with a spare's help."""
    num_nodes = num_ranks // WORKERS
    steps_per_epoch = 20
    num_rows = num_nodes * steps_per_epoch
    shape = Shape(
        nodes=num_nodes + 1,
        spares=1,
        ranks=WORKERS,
        cell=WORKERS,
        min_nodes=num_nodes,
        lanes=num_nodes,
        micro_batch=1,
        rows=tuple((number + 1) * num_rows // 8 - number * num_rows // 8 for number in range(8)),
        epochs=-(-num_steps // steps_per_epoch),
        commit_every=commit_every,
        lane_s=STEP_S / SLOWEST,
        warm_s=START_S,
        ttl_s=LEASE_S,
        peer_timeout_s=600.0,
        look_s=STEP_S,
        delay_s=0.003,
        least_part_bytes=1 << 20,
    )
    return replace(shape, recovery=recovery, max_restarts=NUM_FAULTS)
