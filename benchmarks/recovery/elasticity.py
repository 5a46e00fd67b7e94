"""Repeat what stock torchrun fails at: a worker restarts, a node joins, the node of rank 0 is lost.

    python -m benchmarks.recovery.elasticity [--json] [--turns N] [--stock-turns M]
        [--only stock,restart,live] [--keep DIR]

stock         plain DDP under torchrun's own c10d rendezvous, default settings: the first node hosts its store
stock_apart   the same with the store in a process of its own, as etcd is, so that no node takes it along (--only)
restart       the same script under `--rdzv_backend=etcd`
live          our trainer, recovery=live

A try passes if training continues, in the world that is expected and within 90 s of the fault. Stock has a new job for
every try; ours go through all tries in one job, unless one fails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from benchmarks.recovery.jobs import (
    LIVE_LOGS,
    LOG,
    TTL_S,
    Steps,
    folder_for,
    free_endpoint,
    plain_nodes,
    write_live_job,
)
from chaos.real.forked_node.begin import launch
from chaos.scenario.model import Nodes, Scenario
from chaos.services.torchrun_node import Node
from rendezvous.etcd.server import EtcdServer

BOUND_S = 90.0
START_S = 120.0
ENOUGH_STEPS = 10
MAX_RESTARTS = 100
MODES = ("stock", "stock_apart", "restart", "live")
_ERROR = re.compile(r"\b\w+Error: .+")


@dataclass
class Tally:
    """The attempts of one case in one mode."""

    passed: int = 0
    turns: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def take(self, outcome: float | str) -> None:
        """Count an attempt: the seconds until training continued, or the reason why it did not."""
        self.turns += 1
        if isinstance(outcome, str):
            self.failures.append(outcome)
        else:
            self.passed += 1
            self.seconds.append(round(outcome, 2))


class Running:
    """A job of at most two nodes with one rank each, the steps its ranks log, and the three changes to test."""

    def __init__(self, nodes: list[Node], steps: Steps, host: str | None = None) -> None:
        """`host` is the endpoint that the first node opens before the second is started."""
        self._nodes, self._steps, self._host = nodes, steps, host

    def prepare(self, size: int) -> str | None:
        """Bring up a job of `size` nodes; return None if they train together, else the reason."""
        down = [node for node in self._nodes if not node.is_up]
        num_up = len(self._nodes) - len(down)
        assert num_up <= size, "tries leave as many nodes as the next one needs, or fewer"
        since = time.time()
        for node in down[: size - num_up]:
            node.start()
            if self._host is not None:
                _await_listener(self._host)
        if self._continues(size, since, set(), START_S) is None:
            return f"{size} nodes did not start: {self._state(since)}"
        return None

    def restart_worker(self, turn: int) -> float | str:
        """SIGKILL one worker, rank 0 and rank 1 in turn; both nodes must continue, one of them with a new process."""
        before = self._pids()
        victim = self._steps.newest[turn % 2].pid
        since = time.time()
        os.kill(victim, signal.SIGKILL)
        return self._judge(2, since, before)

    def join(self, turn: int) -> float | str:
        """Start a second node of a running job; both must train together."""
        before, since = self._pids(), time.time()
        next(node for node in self._nodes if not node.is_up).start()
        return self._judge(2, since, before)

    def lose_rank_0(self, turn: int) -> float | str:
        """SIGKILL the node of rank 0, agent and worker; the other node must continue alone."""
        first = self._steps.newest[0].pid
        since = time.time()
        next(node for node in self._nodes if first in node.pids()).kill()
        return self._judge(1, since, set())

    def end(self) -> None:
        for node in self._nodes:
            node.kill()

    def _judge(self, size: int, since: float, before: set[int]) -> float | str:
        """Return the seconds until the job continues in a world of `size`, or the reason why it does not."""
        first = self._continues(size, since, before, BOUND_S)
        return self._state(since) if first is None else first - since

    def _continues(self, size: int, since: float, before: set[int], timeout_s: float) -> float | None:
        """Return when a world of `size`, with a process not in `before`, took its first step after `since`."""
        first = self._steps.first(
            lambda step: step.world == size and step.t > since and step.pid not in before,
            of=ENOUGH_STEPS,
            timeout_s=timeout_s,
            is_over=lambda: not any(node.is_up for node in self._nodes),
        )
        return None if first is None else first.t

    def _pids(self) -> set[int]:
        self._steps.read()
        return {step.pid for step in self._steps.newest.values()}

    def _state(self, since: float) -> str:
        """Describe briefly the state of a job that does not continue."""
        started = [node for node in self._nodes if node.agent is not None and node.code != -signal.SIGKILL]
        ended = [node for node in started if not node.is_up]
        words = [f"{len(ended)} of {len(started)} agents ended" if ended else "no agent ended"]
        words += ["no step", f"{time.time() - since:.0f} s"]
        errors = {error for node in self._nodes for error in _errors(node.tail(400))}
        return ", ".join(words) + (f" ({'; '.join(sorted(errors))})" if errors else "")


Case = Callable[[Running, int], float | str]
CASES: dict[str, tuple[int, Case]] = {
    "worker_restart": (2, Running.restart_worker),
    "rank_0_loss": (2, Running.lose_rank_0),
    "node_join": (1, Running.join),
}


def main() -> None:
    """Run the chosen modes; print a table and one JSON line."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery.elasticity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--json", action="store_true", help="print the last line only")
    arguments.add_argument("--turns", type=int, default=20, help="tries of each case in our modes")
    arguments.add_argument(
        "--stock-turns", type=int, default=4, help="tries of each case under c10d: failures take long"
    )
    arguments.add_argument("--only", default="stock,restart,live", help="modes to run")
    arguments.add_argument("--keep", type=Path, help="keep the files of all jobs in this new folder")
    chosen = arguments.parse_args()
    console = Console(quiet=chosen.json, highlight=False)
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, dict[str, Tally]] = {}
    with folder_for(chosen.keep) as folder:
        for mode in [mode for mode in MODES if mode in chosen.only.split(",")]:
            is_fresh = mode.startswith("stock")
            turns = chosen.stock_turns if is_fresh else chosen.turns
            with _starter(mode, folder) as start:
                figures[mode] = _tries(start, turns, is_fresh=is_fresh, show=console.print)
    _show(figures, console)
    print(json.dumps({mode: {case: asdict(tally) for case, tally in cases.items()} for mode, cases in figures.items()}))


Start = Callable[[int], Running]


@contextlib.contextmanager
def _starter(mode: str, folder: Path) -> Iterator[Start]:
    """Yield a function that describes the n-th job of a mode, whose rendezvous store outlives its nodes."""
    flags = ["--rdzv_backend=c10d"]
    if mode == "stock":
        yield lambda number: _plain(folder / f"{mode}-{number}", flags, free_endpoint(), is_host=True)
        return
    if mode == "stock_apart":
        endpoint = free_endpoint()
        host, port = endpoint.split(":")
        store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        yield lambda number: _plain(folder / f"{mode}-{number}", flags, endpoint)
        del store
        return
    with EtcdServer() as server:
        if mode == "restart":
            flags = ["--rdzv_backend=etcd", f"--rdzv_conf=ttl={TTL_S:g}"]
            yield lambda number: _plain(folder / f"restart-{number}", flags, server.endpoint)
        else:
            yield lambda number: _live(folder / f"live-{number}", server.endpoint)


def _plain(folder: Path, flags: list[str], endpoint: str, *, is_host: bool = False) -> Running:
    nodes = plain_nodes(folder, flags, endpoint, max_restarts=MAX_RESTARTS)
    return Running(nodes, Steps(folder, LOG), endpoint if is_host else None)


def _live(folder: Path, endpoint: str) -> Running:
    config = write_live_job(folder, ranks=2)
    nodes = Nodes(count=2, ranks=1, min=1, max_restarts=MAX_RESTARTS, lease_ttl_s=TTL_S, recovery="live")
    scenario = Scenario(name=folder.name, description="", config=config, nodes=nodes)
    return Running(launch(scenario, endpoint, folder, [], folder.name), Steps(folder / "run", LIVE_LOGS))


def _tries(start: Start, turns: int, *, is_fresh: bool, show: Callable[[str], None]) -> dict[str, Tally]:
    """Attempt every case `turns` times in turn; a job ends after a failed attempt, or after each one if `is_fresh`."""
    tallies = {name: Tally() for name in CASES}
    job: Running | None = None
    num_jobs = 0
    try:
        for turn in range(turns):
            for name, (size, case) in CASES.items():
                if job is None:
                    job, num_jobs = start(num_jobs), num_jobs + 1
                outcome = job.prepare(size) or case(job, turn)
                tallies[name].take(outcome)
                show(f"{name} {turn + 1}: {outcome if isinstance(outcome, str) else f'{outcome:.2f} s'}")
                if is_fresh or isinstance(outcome, str):
                    job.end()
                    job = None
    finally:
        if job is not None:
            job.end()
    return tallies


def _await_listener(endpoint: str) -> None:
    """Wait until an endpoint accepts connections."""
    host, port = endpoint.split(":")
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _errors(log: str) -> set[str]:
    """Return the last error in a log, shortened."""
    found = _ERROR.findall(log)
    return {found[-1][:100]} if found else set()


def _show(figures: dict[str, dict[str, Tally]], console: Console) -> None:
    table = Table("mode", "case", "passed", "p50", "max", "failures")
    for mode, cases in figures.items():
        for name, tally in cases.items():
            seconds = [f"{read(tally.seconds):.1f} s" if tally.seconds else "" for read in (statistics.median, max)]
            table.add_row(mode, name, f"{tally.passed} of {tally.turns}", *seconds, "\n".join(tally.failures))
    console.print(table)


if __name__ == "__main__":
    main()
