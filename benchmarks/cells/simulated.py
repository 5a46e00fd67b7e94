"""Simulate jobs with model parallelism on hundreds of ranks: the cost of the simulation, and the jobs' goodput.

Goodput is the share of time in kept steps. The simulator gives the cost of a fault: seconds until the next applied
step, and recomputed steps. The fault rate is published: Llama 3 405B had 419 unexpected interruptions in 54 days on
16,384 GPUs (Grattafiori et al. 2024, section 3.3.4), and it is scaled down in proportion for fewer GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.figures import Effort
from chaos.judge.evidence.recovery_cost import Recovery, recoveries
from chaos.sim.campaign.long_runs import SLOWEST, WORKERS, Draw
from chaos.sim.campaign.simulate import simulate
from chaos.sim.job.fault import SimFault
from chaos.sim.job.job import Job
from chaos.sim.job.shape import Recovery as Mode
from chaos.sim.job.shape import Shape
from elastic_train.checkpoint.interval.young_daly import optimum

INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384
PER_GPU_HOUR = INTERRUPTIONS / (DAYS * 24 * GPUS)
JOBS = ((256, 256), (256, 1_024), (256, 16_384), (1_024, 1_024), (1_024, 16_384))
"""Number of simulated ranks, and number of GPUs that sets their failure rate."""
STEP_S, START_S, STALL_S, LEASE_S, AWAY_S = 60.0, 60.0, 5.0, 10.0, 300.0
"""Assumed seconds: a step, a process start, the stall of a save, a lease, and the absence of a lost node. A spare node
replaces it at once."""
NUM_FAULTS, FEW_FAULTS, COMMIT_EVERY = 4, 2, 6
KINDS = ("kill_worker", "lose_node")
RECOVERIES: tuple[Mode, ...] = ("live", "restart")
SIMULATED_STEP_S, FAULTS_PER_HOUR = 30.0, 4.0


def cost_of_an_hour(effort: Effort) -> dict[str, object]:
    """Return the CPU seconds per virtual hour of a valid job with four faults."""
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
        hours = outcome.virtual_s / 3600  # including the cost of the faults
        found[f"sim_{num_ranks}_ranks_cpu_s_per_hour"] = round(cpu_s / hours, 1)
        effort.say(
            f"{num_ranks} ranks in cells of {outcome.case.shape.cell}: {hours:.2f} virtual hours, "
            f"{sum(outcome.num_faults.values())} faults, {cpu_s:.0f} s of a core: "
            f"elastic-chaos sim {draw.options} --seed 0"
        )
    return found


def goodput(effort: Effort) -> dict[str, object]:
    """Return goodput by ranks, failure rate and mode of recovery, and the cost of a fault in each."""
    found: dict[str, object] = {}
    for num_ranks in sorted({num_ranks for num_ranks, _ in JOBS}):
        for recovery in RECOVERIES:
            costs = _costs(effort, num_ranks, recovery)
            effort.say(f"{num_ranks} ranks, {recovery}: {', '.join(f'{cost.rto_s:.0f} s' for cost in costs)}")
            for num_gpus in (gpus for ranks, gpus in JOBS if ranks == num_ranks):
                found[f"{num_ranks} ranks, failures of {num_gpus} GPUs, {recovery}"] = _row(costs, recovery, num_gpus)
    return {"goodput": found}


def _row(costs: list[Recovery], recovery: Mode, num_gpus: int) -> dict[str, float]:
    """Return the goodput at the failure rate of `num_gpus` GPUs.

    Without the fault, the next step would have come after half a step on average. Recomputed steps are those since the
    newest commit, on average half of a commit interval.
    """
    mtbf_s = 3600 / (PER_GPU_HOUR * num_gpus)
    every_s = optimum(STALL_S, mtbf_s)
    down_s = statistics.mean(cost.rto_s for cost in costs) - STEP_S / 2
    again_s = every_s / 2 if recovery == "restart" else 0.0
    share = every_s / (every_s + STALL_S) / (1 + (down_s + again_s) / mtbf_s)
    values = {"mtbf_h": mtbf_s / 3600, "commit_every_s": every_s, "down_s": down_s, "again_s": again_s}
    return {"goodput": round(share, 5), **{name: round(value, 1) for name, value in values.items()}}


def _costs(effort: Effort, num_ranks: int, recovery: Mode) -> list[Recovery]:
    """Simulate a job that loses a worker and a node in turn, once per commit interval, at all its phases."""
    num_faults = FEW_FAULTS if effort.is_quick else NUM_FAULTS
    shape = _shape(num_ranks, recovery, (num_faults + 1) * COMMIT_EVERY)
    run = Job(shape, 0, tuple(_faults(shape.max_nodes, num_faults))).run()
    found = [one for one in recoveries(run) if one.kind in KINDS]
    # A fault may have hit the standby node.
    if len(found) < num_faults - 1 or run.result is None or run.result["status"] != "done":
        raise SystemExit(f"{num_ranks} ranks, {recovery}: {len(found)} of {num_faults} faults were recovered from")
    if recovery == "live" and any(one.rpo_steps for one in found):
        raise SystemExit(f"{num_ranks} ranks, {recovery}: applied steps were lost")
    return found


def _faults(num_nodes: int, num_faults: int) -> Iterator[SimFault]:
    for turn in range(num_faults):
        step = COMMIT_EVERY * (turn + 1) + turn * COMMIT_EVERY // num_faults
        node, rank = (7 * turn + 3) % num_nodes, turn % WORKERS
        yield SimFault(KINDS[turn % 2], at_s=STEP_S / 2, node=node, rank=rank, for_s=AWAY_S, step=step)


def _shape(num_ranks: int, recovery: Mode, num_steps: int) -> Shape:
    """Return a job whose nodes are replicas with one lane each, so that a spare's help slows no step."""
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
        commit_every=COMMIT_EVERY,
        lane_s=STEP_S / SLOWEST,
        warm_s=START_S,
        ttl_s=LEASE_S,
        peer_timeout_s=600.0,
        look_s=STEP_S,
        delay_s=0.003,
        least_part_bytes=1 << 20,
    )
    return replace(shape, recovery=recovery, max_restarts=NUM_FAULTS)
