"""Simulate jobs with model parallelism on hundreds of ranks, and measure the cost of the simulation."""

from __future__ import annotations

import time

from benchmarks.figures import Effort
from chaos.sim.campaign.long_runs import WORKERS, Draw
from chaos.sim.campaign.simulate import simulate

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
