"""Train and recover over links of other networks: seconds from a fault to the next applied step, and the weights' hash.

    python -m benchmarks.network [--json] [--quick] [--only NAME]

worker_s     a worker at the far end of the link is killed
node_s       one of the two near nodes is killed, so that the next world spans the link
steps_per_s  while all nodes train
hash_equal   the weights are those of as many steps in one process without faults (goal: true)
round_trip_ms, gbit_per_s    of the link itself, before the job: a connection's median time, and its rate
lost, passed                 packets of the relay, if the network has one

Each is by network of `chaos.scenario.networks`. Two nodes are on this machine, with etcd; the third is in a network
namespace with its own address. `loopback` has a link without limits. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.figures import Effort, Measure, measure_chosen
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.kills import step_s
from benchmarks.recovery.live import LEAVE, repeat, run_job
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.scenario.networks import NETWORKS
from chaos.scenario.schedule import Due
from chaos.services.network.measured import measure as measure_link
from chaos.services.network.namespace import Cable, NoNamespacesError, cable

LOOPBACK = "loopback"
NUM_NODES, FAR, NEAR = 3, 2, 1
QUIET_S, AWAY_S = 12.0, 3.0


def measure(effort: Effort, network: str) -> dict[str, object]:
    """Run a job over a link, and compare its weights with those of a job without faults."""
    try:
        with cable(NETWORKS.get(network)) as laid, tempfile.TemporaryDirectory() as folder:
            found = over(laid, Path(folder), num_turns=1 if effort.is_quick else 3)
    except NoNamespacesError as error:
        raise SystemExit(f"benchmarks.network needs network namespaces: {error}") from error
    effort.say(f"{network}: {found}")
    return {network: found}


def over(laid: Cable, folder: Path, num_turns: int) -> dict[str, object]:
    """Return the figures of a job whose last node is at the other end of a cable."""
    link = measure_link(laid)
    due = num_turns * [
        Due("kill_worker", FAR, None, QUIET_S, is_healed=True),
        Due("kill_node", NEAR, None, QUIET_S, is_healed=True),
        Due("start_node", NEAR, None, AWAY_S),
    ]
    config = write_live_job(folder / "job", NUM_NODES)
    timeout_s = 120.0 + 4 * num_turns * (2 * QUIET_S + AWAY_S)
    run = run_job(
        folder / "run", config, due, ranks=1, leave_after_s=QUIET_S, timeout_s=timeout_s, num_nodes=NUM_NODES, laid=laid
    )
    costs = [cost for cost in recoveries(run) if cost.kind != LEAVE]
    seconds = {kind: [cost.rto_s for cost in costs if cost.kind == kind] for kind in ("kill_worker", "kill_node")}
    reference = repeat(folder / "reference", config, run)
    assert run.result is not None, "run_job returns finished jobs"
    found: dict[str, object] = {
        "worker_s": round(statistics.median(seconds["kill_worker"]), 2),
        "node_s": round(statistics.median(seconds["kill_node"]), 2),
        "steps_per_s": round(1 / step_s(run), 1),
        "hash_equal": run.result["weights_sha256"] == reference["weights_sha256"],
        "round_trip_ms": round(1000 * link.round_trip_s, 2),
        "gbit_per_s": round(8e-9 * link.bytes_per_s, 2),
    }
    if laid.network is not None and laid.network.is_far and laid.relay is not None:
        found |= {"lost": laid.relay.num_lost, "passed": laid.relay.num_passed}
    return found


FIGURES: Mapping[str, Measure] = {name: functools.partial(measure, network=name) for name in (LOOPBACK, *NETWORKS)}


if __name__ == "__main__":
    measure_chosen("benchmarks.network", __doc__, FIGURES)
