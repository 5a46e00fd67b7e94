"""Train and recover over links of other networks: seconds from a fault to the next applied step, and the weights' hash.

    python -m benchmarks.network [--json] [--quick] [--only NAME]

worker_s     a worker at the far end of the link is killed
node_s       one of the two near nodes is killed, so that the next world spans the link
steps_per_s  while all nodes train
hash_equal   the weights are those of as many steps in one process without faults (goal: true)
round_trip_ms, lost, passed  of the link itself: a connection's median time, and packets

Each is by profile. Two nodes are on this machine, with etcd; the third is in a network namespace with its own address.
Packets between them pass a forwarder in user space (`chaos.services.network.packet_relay`), which adds the profile's
delay, jitter, loss and bandwidth in each direction. It carries tens of MB/s, so of 10 and 100 GbE only the delay is
real. `loopback` passes no forwarder. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.figures import Effort, Measure, measure_chosen
from benchmarks.recovery.jobs import write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from benchmarks.sharding.live.recovery import step_s
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.scenario.schedule import Due
from chaos.services.network.namespace import Cable, NoNamespacesError, cable
from chaos.services.network.packet_relay import Impairment

PROFILES: Mapping[str, Impairment | None] = {
    "loopback": None,
    "100gbe": Impairment(delay_s=10e-6, bytes_per_s=12.5e9),
    "10gbe": Impairment(delay_s=50e-6, bytes_per_s=1.25e9),
    "cross_zone": Impairment(loss=0.001, delay_s=0.5e-3, jitter_s=0.2e-3, bytes_per_s=0.625e9),
    "cross_region": Impairment(loss=0.001, delay_s=30e-3, jitter_s=2e-3, bytes_per_s=0.125e9),
}
"""Delays are one way."""
NUM_NODES, FAR, NEAR = 3, 2, 1
QUIET_S, AWAY_S = 12.0, 3.0
NUM_CONNECTIONS = 11
_CLOSED_PORT = 9


def measure(effort: Effort, profile: str) -> dict[str, object]:
    """Run a job over a link, and compare its weights with those of a job without faults."""
    try:
        with cable() as laid, tempfile.TemporaryDirectory() as folder:
            found = over(laid, PROFILES[profile], Path(folder), num_turns=1 if effort.is_quick else 3)
    except NoNamespacesError as error:
        raise SystemExit(f"benchmarks.network needs network namespaces: {error}") from error
    effort.say(f"{profile}: {found}")
    return {profile: found}


def over(laid: Cable, impairment: Impairment | None, folder: Path, num_turns: int) -> dict[str, object]:
    """Return the figures of a job whose last node is at the other end of an impaired cable.

    Raises NoNamespacesError if the packets cannot be impaired.
    """
    if impairment is not None:
        if laid.relay is None:
            raise NoNamespacesError("no TUN interfaces can be made here; is there /dev/net/tun?")
        laid.impair(impairment)
    round_trip_ms = 1000 * statistics.median(_connect_s(laid) for _ in range(NUM_CONNECTIONS))
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
        "round_trip_ms": round(round_trip_ms, 2),
    }
    if impairment is not None and laid.relay is not None:
        found |= {"lost": laid.relay.num_lost, "passed": laid.relay.num_passed}
    return found


def _connect_s(laid: Cable) -> float:
    """Return the seconds until the far node refuses a connection."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((laid.address("inside"), _CLOSED_PORT), 5.0).close()
    return time.monotonic() - began


FIGURES: Mapping[str, Measure] = {name: functools.partial(measure, profile=name) for name in PROFILES}


if __name__ == "__main__":
    measure_chosen("benchmarks.network", __doc__, FIGURES)
