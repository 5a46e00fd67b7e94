"""What a fault costs: seconds from a fault to the next applied step, side by side, and the throughput that is kept.

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

All live faults but the cuts hit one job, whose final weights are then compared with those of a run without faults
(`hash_equal`). `rpo_steps_max` counts the applied steps that the job gave up although a process that held them lived
on; `again_steps_max` also those that the lost rank alone had applied: they are computed again, with the same bits. With
--minutes, a job of four workers has a fault every 29 s for so long: `throughput_kept` is its speed over that of the
same job without faults before and after (`steps_per_s` has the three, since a machine's speed drifts).
`kept_beside_quiet` is, by kind of fault, its steps over those that its own quiet time (the last 40 % between two
faults) would have brought; `throughput_kept_net` the same with `start_share` taken out, the share of the machine that
making the lost workers ready takes. `import_share` is what their imports would take besides, had the node's standby
process not done them.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.jobs import LOG, TTL_S, Steps, free_endpoint, plain_nodes, write_live_job
from benchmarks.network import CableNode, CutNode, SplitNode, behind_the_cable
from chaos.errors import RunError
from chaos.evidence import Evidence, collect, number, whole
from chaos.injected import check_kept, given_up
from chaos.local import Job, launch
from chaos.network import Cable, NoNamespacesError, cable
from chaos.node import Node
from chaos.recovery import recoveries
from chaos.scenario import Nodes, Scenario
from chaos.schedule import Due
from rendezvous.server import EtcdServer

FROZEN_S = 6.0
STOCK_TIMEOUT_S = 180.0
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
FAULT_EVERY_S = 29.0
QUIET_FROM = 0.6
"""After this share of the time between two faults the traces of the first are gone: who was frozen is back."""


@dataclass
class Figures:
    """Seconds to the next step, fault by fault, and what else was found."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        shown = {
            name: {"p50": round(statistics.median(values), 3), "max": round(max(values), 3)} if values else None
            for name in NAMES
            for values in [self.seconds.get(name, [])]
        }
        return {**shown, **self.facts}


def main() -> None:
    """Run what is asked for; print a table and one JSON line."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print the last line only")
    arguments.add_argument("--faults", type=int, default=5, help="faults of each kind")
    arguments.add_argument(
        "--only", default="stock,restart,live,cut,split", help="parts to run: stock,restart,live,cut,split"
    )
    arguments.add_argument("--storm", type=int, default=0, help="also go through so many faults in quick succession")
    arguments.add_argument("--seed", type=int, default=1, help="draws the storm")
    arguments.add_argument("--keep", help="keep the files of all runs in this folder")
    arguments.add_argument("--minutes", type=float, default=0, help="also measure the throughput kept, for so long")
    chosen = arguments.parse_args()
    console = Console(quiet=chosen.json, highlight=False)
    figures = Figures()
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.nullcontext(chosen.keep) if chosen.keep else tempfile.TemporaryDirectory() as folder:
        parts = chosen.only.split(",")
        if "stock" in parts:
            flags = ["--rdzv_backend=c10d"]
            figures.seconds["stock_c10d_s"] = [
                _foreign(Path(folder) / f"stock-{turn}", flags, free_endpoint(), console)
                for turn in range(chosen.faults)
            ]
        if "restart" in parts:
            with EtcdServer() as server:
                flags = ["--rdzv_backend=etcd", f"--rdzv_conf=ttl={TTL_S:g}"]
                figures.seconds["restart_s"] = [
                    _foreign(Path(folder) / f"restart-{turn}", flags, server.endpoint, console)
                    for turn in range(chosen.faults)
                ]
        if "live" in parts:
            _live(Path(folder) / "live", chosen.faults, figures, console)
        for part, kind in (("cut", CutNode), ("split", SplitNode)):
            if part in parts:
                _cut(Path(folder) / part, chosen.faults, figures, console, f"live_{part}_s", kind)
        if chosen.storm:
            _storm(Path(folder) / "storm", chosen.storm, chosen.seed, figures, console)
        if chosen.minutes:
            _throughput(Path(folder) / "throughput", chosen.minutes * 60, figures, console)
    _show(figures, console)
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
    """Hit one live job with every kind of fault in turn, then run it once more without."""
    due: list[Due] = []
    for _ in range(num_faults):
        due += [
            Due("kill_worker", 1, None, 12.0),
            Due("freeze_worker", 1, None, 12.0, for_s=FROZEN_S),
            Due("freeze_node", 1, None, 14.0, for_s=FROZEN_S),
            Due("kill_node", 1, None, 14.0),
            Due("start_node", 1, None, 2.0),
        ]
    seconds = sum(fault.after_s or 0.0 for fault in due) + 20.0
    config = write_live_job(folder, seconds, ranks=2)
    faulted = _run_job(folder / "faulted", config, due, ranks=1, timeout_s=3 * seconds)
    reference = _run_job(folder / "reference", config, [], ranks=1, timeout_s=3 * seconds)
    names = {
        "kill_worker": "live_worker_s",
        "kill_node": "live_node_s",
        "freeze_worker": "live_stopped_s",
        "freeze_node": "live_frozen_s",
    }
    costs = recoveries(faulted)
    for kind, name in names.items():
        figures.seconds[name] = [cost.rto_s for cost in costs if cost.kind == kind]
        console.print(f"{name}: {', '.join(f'{s:.2f}' for s in figures.seconds[name])}")
    results = [evidence.result or {} for evidence in (faulted, reference)]
    figures.facts["rpo_steps_max"] = given_up(faulted)
    figures.facts["again_steps_max"] = max(cost.rpo_steps for cost in costs)
    figures.facts["hash_equal"] = results[0]["weights_sha256"] == results[1]["weights_sha256"]
    figures.facts["num_live_faults"] = len(costs)


def _cut(folder: Path, num_faults: int, figures: Figures, console: Console, name: str, kind: type[CableNode]) -> None:
    """Cut one node of two off again and again."""
    due = [Due("freeze_node", 1, None, 30.0, for_s=3 * TTL_S) for _ in range(num_faults)]
    seconds = 30.0 * num_faults + 20.0
    config = write_live_job(folder, seconds, ranks=2)
    try:
        with cable() as laid:
            place = partial(behind_the_cable, kind, laid)
            run = _run_job(folder / "faulted", config, due, ranks=1, timeout_s=3 * seconds, place=place, laid=laid)
    except NoNamespacesError as error:
        figures.facts["no_namespaces"] = str(error)
        return
    figures.seconds[name] = [cost.rto_s for cost in recoveries(run)]
    console.print(f"{name}: {', '.join(f'{s:.2f}' for s in figures.seconds[name])}")


def _storm(folder: Path, num_faults: int, seed: int, figures: Figures, console: Console) -> None:
    """Send three nodes through faults in quick succession, tell them to leave, and repeat the same steps without."""
    due = storm(num_faults, seed)
    config = write_live_job(folder, 10 * sum(fault.after_s or 0.0 for fault in due), ranks=3)
    told, place, laid = "", None, None
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(NoNamespacesError):
            laid = undo.enter_context(cable())
            place = partial(behind_the_cable, CableNode, laid)
        try:
            _run_job(folder / "faulted", config, due, ranks=1, timeout_s=2400, num_nodes=3, place=place, laid=laid)
        except RunError as error:  # expected: told to leave, no node ends with 0
            told = str(error)
    run = collect(folder / "faulted")
    if run.result is None:
        raise SystemExit(f"storm of seed {seed}: {told}")
    check_kept(run)
    steps = whole(run.result, "step")
    alone = ["elastic_train", config, "--run.dir", str(folder / "alone"), "--max_steps", str(steps)]
    subprocess.run([sys.executable, "-m", *alone], check=True, stdout=subprocess.DEVNULL)
    expected = json.loads((folder / "alone" / "result.json").read_text())
    figures.facts |= {
        "storm_faults": len(run.of("fault")) - len(_LAST),
        "storm_has_cuts": place is not None,
        "storm_worlds": len({line["term"] for line in run.of("form")}),
        "storm_steps": steps,
        "storm_hash_equal": expected["weights_sha256"] == run.result["weights_sha256"],
        "storm_coverage_equal": expected["coverage"] == run.result["coverage"],
    }
    console.print(f"storm: {figures.facts}")


def storm(num_faults: int, seed: int) -> list[Due]:
    """Draw faults in bursts; each spares one node, so that a replica lives, and the next waits until all are back."""
    rng = random.Random(seed)
    due: list[Due] = []
    while len(due) < num_faults:
        spared, is_up = rng.randrange(3), {0: True, 1: True, 2: True}
        for turn in range(8):
            node = rng.choice([other for other in is_up if other != spared])
            pause_s = 15.0 if turn == 0 else rng.choice([0.0, 0.1, 0.5, 1.0, 3.0])
            if not is_up[node]:
                due.append(Due("start_node", node, None, pause_s))
                is_up[node] = True
                continue
            kind = rng.choice(["kill_worker", "kill_worker", "freeze_worker", "freeze_node", "kill_node", "stop_node"])
            for_s = rng.choice([1.0, 2 * TTL_S]) if kind.startswith("freeze") else None
            due.append(Due(kind, node, None, pause_s, for_s=for_s))
            is_up[node] = kind not in ("kill_node", "stop_node")
        due += [Due("start_node", node, None, 1.0) for node, up in is_up.items() if not up]
    return [*due, *_LAST]


_LAST = (Due("stop_node", 2, None, 20.0), Due("stop_node", 1, None, 0.0), Due("stop_node", 0, None, 0.0))


def _throughput(folder: Path, seconds: float, figures: Figures, console: Console) -> None:
    """Run a job of four workers with a fault every 29 s, kills and freezes in turn, and without."""
    kinds = [("kill_worker", None), ("freeze_worker", FROZEN_S)]
    due = [
        Due(kind, turn % 2, None, FAULT_EVERY_S, for_s=for_s)
        for turn in range(int(seconds // FAULT_EVERY_S))
        for kind, for_s in [kinds[turn % 2]]
    ]
    config = write_live_job(folder, seconds + FAULT_EVERY_S, ranks=4, steps_per_s=7.5)
    plain = write_live_job(folder / "plain", seconds / 4, ranks=4, steps_per_s=7.5)
    before, run, after = (
        _run_job(folder / name, job, faults, ranks=2, timeout_s=4 * seconds)
        for name, job, faults in (("before", plain, []), ("faulted", config, due), ("after", plain, []))
    )
    kept = kept_beside_quiet(run)
    num_kills = sum(fault.kind == "kill_worker" for fault in due)
    import_share, share = (cpu_s * num_kills / (seconds * (os.cpu_count() or 1)) for cpu_s in _start_cpu_s(config))
    rates = [_rate(_applied_at(each)) for each in (before, run, after)]
    everything = 2 * rates[1] / (rates[0] + rates[2])
    figures.facts |= {
        "throughput_kept": round(everything, 4),
        "throughput_kept_net": round(everything / (1 - share), 4),
        "kept_beside_quiet": {kind: round(steps / expected, 4) for kind, (steps, expected) in kept.items()},
        "steps_per_s": [round(rate, 2) for rate in rates],
        "start_share": round(share, 4),
        "import_share": round(import_share, 4),
        "num_throughput_faults": len(due),
    }
    console.print(f"throughput: {figures.facts}")


def kept_beside_quiet(run: Evidence) -> dict[str, tuple[float, float]]:
    """Return, by kind of fault, the steps from each fault to the next, and those that quiet time would have brought.

    A machine's speed drifts by more than a fault costs. So the measure is the speed when all is well again, at the end
    of the same period and of the one before.
    """
    times = _applied_at(run)
    faults = [(number(fault, "t"), str(fault["kind"])) for fault in run.of("fault")]
    quiet = [_rate([t for t in times if t > at + QUIET_FROM * (end - at) and t <= end]) for at, end in _periods(faults)]
    kept: dict[str, tuple[float, float]] = {}
    for turn, ((at, end), (_, kind)) in enumerate(zip(_periods(faults), faults, strict=False)):
        if turn == 0:
            continue  # nothing quiet was measured before it
        steps, expected = kept.get(kind, (0.0, 0.0))
        done = sum(at < t <= end for t in times)
        kept[kind] = (steps + done, expected + (end - at) * (quiet[turn - 1] + quiet[turn]) / 2)
    return kept


def _periods(faults: list[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, end) for (at, _), (end, _) in pairwise(faults)]


def _applied_at(run: Evidence) -> list[float]:
    """Return when each step was applied first, in order."""
    first: dict[int, float] = {}
    for line in run.of("step"):
        step, t = whole(line, "step"), number(line, "t")
        first[step] = min(t, first.get(step, t))
    return sorted(first.values())


def _rate(times: list[float]) -> float:
    """Return steps per second from the first of some steps to the last."""
    return (len(times) - 1) / (times[-1] - times[0])


def _start_cpu_s(config: str) -> tuple[float, float]:
    """Return the seconds of processor time that a worker's imports take, and that it takes to be ready after them."""
    made = subprocess.run([sys.executable, "-c", _START, config], check=True, capture_output=True, text=True)
    imports_s, ready_s = made.stdout.split()
    return float(imports_s), float(ready_s)


_START = """
import sys, time
from pathlib import Path
import elastic_train.preload
imports_s = time.process_time()
from elastic_train import config
from elastic_train.assembly import make_repeatable
from elastic_train.plan import make_plan
told = config.load(Path(sys.argv[1]), environ={}, arguments=[])
make_repeatable(told)
plan = make_plan(told)
plan.build_state()
plan.task.metrics()
print(imports_s, time.process_time() - imports_s)
"""


def _run_job(
    folder: Path,
    config: str,
    due: list[Due],
    *,
    ranks: int,
    timeout_s: float,
    num_nodes: int = 2,
    place: Callable[[list[Node], Path], list[Node]] | None = None,
    laid: Cable | None = None,
) -> Evidence:
    """Run a live job with its faults to its end, and return what it left; `place` puts its nodes along a cable."""
    nodes = Nodes(count=num_nodes, ranks=ranks, min=1, max_restarts=1000, lease_ttl_s=TTL_S, recovery="live")
    scenario = Scenario(name=folder.name, description="", config=config, nodes=nodes, timeout_s=timeout_s)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with EtcdServer(host="0.0.0.0" if laid else "127.0.0.1") as server:
        endpoint = server.endpoint.replace("127.0.0.1", laid.address("etcd")) if laid else server.endpoint
        started = launch(scenario, endpoint, folder, ["--run.dir", str(folder)], folder.name)
        started = place(started, folder) if place else started
        Job(folder, started, scenario, due, 0, lambda _: None, lambda _: None).run()
    return collect(folder)


def _show(figures: Figures, console: Console) -> None:
    table = Table("fault", "faults", "p50", "max")
    for name in NAMES:
        values = figures.seconds.get(name)
        if values:
            table.add_row(name, str(len(values)), f"{statistics.median(values):.2f} s", f"{max(values):.2f} s")
    console.print(table)


if __name__ == "__main__":
    main()
