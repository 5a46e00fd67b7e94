"""Measure the cost of faults: seconds until the next applied step, and throughput under repeated faults.

    python -m benchmarks.recovery [--json] [--faults N] [--only NAME,...] [--minutes M]

stock_c10d_s    a node of two is killed, plain DDP under torchrun's own c10d rendezvous
restart_s       the same script under `--rdzv_backend=etcd` (goal: at most 6 s + ttl)
live_worker_s   our trainer, recovery=live: a worker is killed (goal: p50 at most 0.5 s, max 1.5 s)
live_node_s     agent and workers of a node are killed (goal: at most ttl + 1 s)
live_stopped_s  a worker is stopped for twice the ttl (its agent sees it)
live_frozen_s   agent and workers of a node are stopped for twice the ttl (goal: at most ttl + 1 s)
live_cut_s      a node is cut off the network; needs root and `ip` (goal: at most ttl + 1 s)
live_split_s    two nodes are cut off each other, while both reach etcd; needs root and `ip`

With --storm N, three live nodes go through N faults in quick succession, several at a time and during recovery too:
kills, freezes shorter and longer than a lease, nodes that leave and come back (`storm_faults`, `storm_hash_equal`). The
third node is cut off where others freeze, from all or from the other nodes alone; needs root and `ip`.

All live faults but the cuts hit one job, whose final weights are then compared with those of as many steps without
faults (`hash_equal`). `rpo_steps_max` counts the applied steps that the job gave up although a process of their world
lived on; `again_steps_max` also those that a rank applied without knowing that the others could: they are computed
again, with the same bits. With --minutes, a job of four workers has a fault every 29 s for so long, and is asked to
leave 29 s after the
last: `throughput_kept` is its speed until then over that of the same job without faults before and after
(`steps_per_s` has the three, since a machine's speed drifts).
`kept_beside_quiet` is, by kind of fault, its steps over those that its own quiet time (the last 40 % between two
faults) would have brought; `throughput_kept_net` the same with `start_share` taken out, the share of the machine that
making the lost workers ready takes. `import_share` is what their imports would take besides, had the node's standby
process not done them.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.recovery import storm, throughput
from benchmarks.recovery.jobs import LOG, TTL_S, Steps, folder_for, free_endpoint, plain_nodes, write_live_job
from benchmarks.recovery.live import LEAVE, repeat, run_job
from chaos.judge.evidence.recovery_cost import recoveries
from chaos.judge.invariants.whole_run import given_up
from chaos.scenario.schedule import Due
from chaos.services.network.namespace import NoNamespacesError, cable
from rendezvous.etcd.server import EtcdServer

FROZEN_S = 6.0
QUIET_S, CUT_EVERY_S = 20.0, 30.0
STOCK_TIMEOUT_S = 180.0
PARTS = ("stock", "restart", "live", "cut", "split")
NAMES = (
    "stock_c10d_s",
    "restart_s",
    "live_worker_s",
    "live_node_s",
    "live_stopped_s",
    "live_frozen_s",
    "live_cut_s",
    "live_split_s",
)


@dataclass
class Figures:
    """Seconds to the next step by fault, and further results."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        shown = {
            name: {"p50": round(statistics.median(values), 3), "max": round(max(values), 3)} if values else None
            for name in NAMES
            for values in [self.seconds.get(name, [])]
        }
        return {**shown, **self.facts}


def _parts(given: str) -> list[str]:
    if unknown := sorted(set(given.split(",")) - {*PARTS}):
        raise argparse.ArgumentTypeError(f"no part '{unknown[0]}': there are {', '.join(PARTS)}")
    return given.split(",")


def main() -> None:
    """Run the chosen measurements; print a table and one JSON line."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print the last line only")
    arguments.add_argument("--faults", type=int, default=5, help="faults of each kind")
    arguments.add_argument(
        "--only", type=_parts, default=",".join(PARTS), help=f"parts to run, with commas between: {', '.join(PARTS)}"
    )
    arguments.add_argument("--storm", type=int, default=0, help="also inject N faults in quick succession")
    arguments.add_argument("--seed", type=int, default=1, help="draws the storm")
    arguments.add_argument("--keep", type=Path, help="keep the files of all runs in this new folder")
    arguments.add_argument("--minutes", type=float, default=0, help="also measure the throughput kept, for M minutes")
    chosen = arguments.parse_args()
    console = Console(quiet=chosen.json, highlight=False)
    figures = Figures()
    os.environ["OMP_NUM_THREADS"] = "1"
    with folder_for(chosen.keep) as folder:
        parts = chosen.only
        if "stock" in parts:
            flags = ["--rdzv_backend=c10d"]
            figures.seconds["stock_c10d_s"] = [
                _foreign(folder / f"stock-{turn}", flags, free_endpoint(), console) for turn in range(chosen.faults)
            ]
        if "restart" in parts:
            with EtcdServer() as server:
                flags = ["--rdzv_backend=etcd", f"--rdzv_conf=ttl={TTL_S:g}"]
                figures.seconds["restart_s"] = [
                    _foreign(folder / f"restart-{turn}", flags, server.endpoint, console)
                    for turn in range(chosen.faults)
                ]
        if "live" in parts:
            _live(folder / "live", chosen.faults, figures, console)
        for part, kind in (("cut", "cut_node"), ("split", "cut_link")):
            if part in parts:
                _cut(folder / part, chosen.faults, figures, console, f"live_{part}_s", kind)
        if chosen.storm:
            figures.facts |= storm.measure(folder / "storm", chosen.storm, chosen.seed)
        if chosen.minutes:
            figures.facts |= throughput.measure(folder / "throughput", chosen.minutes * 60)
    _show(figures, console)
    console.print(figures.facts)
    print(json.dumps(figures.as_json()))


def _foreign(folder: Path, flags: list[str], endpoint: str, console: Console) -> float:
    """Start two nodes of a plain DDP script, kill one, and return the seconds to the survivor's next step."""
    nodes, steps = plain_nodes(folder, flags, endpoint, max_restarts=3), Steps(folder, LOG)
    try:
        nodes[0].start()
        time.sleep(1.0)  # node 0 hosts the c10d store
        nodes[1].start()
        if steps.first(lambda step: step.world == 2, of=50, timeout_s=STOCK_TIMEOUT_S) is None:
            raise SystemExit(f"two nodes did not train within {STOCK_TIMEOUT_S:.0f} s:\n{nodes[0].tail()}")
        killed_at = time.time()
        nodes[1].kill()
        first = steps.first(lambda step: step.world == 1 and step.t > killed_at, of=1, timeout_s=STOCK_TIMEOUT_S)
        if first is None:
            raise SystemExit(f"the survivor did not train within {STOCK_TIMEOUT_S:.0f} s:\n{nodes[0].tail()}")
        console.print(f"{folder.name}: {first.t - killed_at:.2f} s")
        return first.t - killed_at
    finally:
        for node in nodes:
            node.kill()


def _live(folder: Path, num_faults: int, figures: Figures, console: Console) -> None:
    """Inject every kind of fault into one live job in turn, then repeat its steps without faults."""
    due: list[Due] = []
    for _ in range(num_faults):
        due += [
            Due("kill_worker", 1, None, 12.0),
            Due("freeze_worker", 1, None, 12.0, for_s=FROZEN_S),
            Due("freeze_node", 1, None, 14.0, for_s=FROZEN_S),
            Due("kill_node", 1, None, 14.0),
            Due("start_node", 1, None, 2.0),
        ]
    config, timeout_s = write_live_job(folder, ranks=2), 3 * sum(fault.after_s or 0.0 for fault in due) + 60.0
    faulted = run_job(folder / "faulted", config, due, ranks=1, leave_after_s=QUIET_S, timeout_s=timeout_s)
    reference = repeat(folder / "reference", config, faulted)
    names = {
        "kill_worker": "live_worker_s",
        "kill_node": "live_node_s",
        "freeze_worker": "live_stopped_s",
        "freeze_node": "live_frozen_s",
    }
    costs = [cost for cost in recoveries(faulted) if cost.kind != LEAVE]
    for kind, name in names.items():
        figures.seconds[name] = [cost.rto_s for cost in costs if cost.kind == kind]
        console.print(f"{name}: {', '.join(f'{s:.2f}' for s in figures.seconds[name])}")
    assert faulted.result is not None, "every run leaves one"
    figures.facts["rpo_steps_max"] = given_up(faulted)
    figures.facts["again_steps_max"] = max(cost.rpo_steps for cost in costs)
    figures.facts["hash_equal"] = faulted.result["weights_sha256"] == reference["weights_sha256"]
    figures.facts["num_live_faults"] = len(costs)


def _cut(folder: Path, num_faults: int, figures: Figures, console: Console, name: str, kind: str) -> None:
    """Disconnect one node of two repeatedly."""
    due = [Due(kind, 1, None, CUT_EVERY_S, for_s=3 * TTL_S, is_healed=True) for _ in range(num_faults)]
    config, timeout_s = write_live_job(folder, ranks=2), 3 * CUT_EVERY_S * (num_faults + 1)
    try:
        with cable() as laid:
            run = run_job(
                folder / "faulted", config, due, ranks=1, leave_after_s=CUT_EVERY_S, timeout_s=timeout_s, laid=laid
            )
    except NoNamespacesError as error:
        figures.facts["no_namespaces"] = str(error)
        return
    figures.seconds[name] = [cost.rto_s for cost in recoveries(run) if cost.kind == kind]
    console.print(f"{name}: {', '.join(f'{s:.2f}' for s in figures.seconds[name])}")


def _show(figures: Figures, console: Console) -> None:
    table = Table("fault", "faults", "p50", "max")
    for name in NAMES:
        values = figures.seconds.get(name)
        if values:
            table.add_row(name, str(len(values)), f"{statistics.median(values):.2f} s", f"{max(values):.2f} s")
    console.print(table)


if __name__ == "__main__":
    main()
