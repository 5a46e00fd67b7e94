"""The cost of faults: the share of time spent on new steps, and the best interval between saves.

Follows Young (1974) and Daly (2006), as the trainer's `checkpoint.every_steps: auto` does. In live mode, while another
replica holds every grain, a fault costs the step in flight and the time to form the next world; otherwise steps since
the newest commit are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_train.checkpoint.saving.cadence import SaveCost, choose, waste
from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.layouts import Layout
from elastic_train.planning.arithmetic.memory import Memory

Recovery = Literal["live", "restart"]
RPO_S = 900.0
"""Default of `checkpoint.every_s`."""
STALL_S_PER_GB = 0.11
"""Seconds that training stalls for a background save, per GB that a rank writes; docs/benchmarks.md."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """The rate of node failures and the cost of each.

    `mtbf_h` is per node; the default is that of Llama 3 405B, 419 interruptions in 54 days of 2,048 nodes (Grattafiori
    et al. 2024, section 3.3.4). `form_s` is the time until a live world continues without the lost node, `restart_s`
    until restarted workers compute, `repair_s` until a node is back; `spares` is the number of standby nodes.
    """

    mtbf_h: float = 6300.0
    recovery: Recovery = "live"
    spares: int = 0
    form_s: float = 5.0
    restart_s: float = 120.0
    repair_s: float = 3600.0
    store_gb_per_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """The share of time in new steps, the seconds between saves, and the seconds between faults of the whole job."""

    share: float
    save_every_s: float
    mtbf_s: float


def goodput_of(layout: Layout, memory: Memory, step_s: float, cluster: Cluster, reliability: Reliability) -> Goodput:
    """Return the goodput. Each rank writes its part of the state to a store, at the store's rate."""
    mtbf_s = reliability.mtbf_h * 3600 / cluster.nodes
    staged_gb = max(memory.staging, memory.host_bytes) / 1e9
    stall_s = STALL_S_PER_GB * staged_gb
    cost = SaveCost(stall_s, max(stall_s, staged_gb / reliability.store_gb_per_s))
    is_alone = cluster.nodes == 1  # then its repair is time without training, not with less
    is_live = reliability.recovery == "live" and not layout.without_copies(cluster.size) and not is_alone
    interval_s = choose(cost, mtbf_s, RPO_S, reliability.restart_s).interval_s
    shrunk = 0.0 if reliability.spares or is_alone else min(1.0, reliability.repair_s / mtbf_s) / cluster.nodes
    if is_live:
        fault_s = reliability.form_s + step_s / 2
        lost = (1 - cost.stall_s / (interval_s + cost.stall_s)) / (1 + fault_s / mtbf_s)
        return Goodput(lost * (1 - shrunk), interval_s, mtbf_s)
    down_s = reliability.restart_s + (reliability.repair_s if is_alone and not reliability.spares else 0.0)
    share = 1 - waste(interval_s, cost, mtbf_s, down_s)
    return Goodput(max(0.0, share) * (1 - shrunk), interval_s, mtbf_s)
