"""A job in the simulated world: its nodes, its faults, and the evidence that it leaves for the judge."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping
from pathlib import Path

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.scenario.kinds import befalls_all, cuts_off
from chaos.sim.job.fault import SimFault
from chaos.sim.job.install import installed
from chaos.sim.job.kinds import KINDS
from chaos.sim.job.leftovers import left_by
from chaos.sim.job.live_node import RUN_ID, Node, Worker
from chaos.sim.job.restart_node import RestartNode
from chaos.sim.job.shape import Shape, make_plan
from chaos.sim.machine.etcd import LEAST_TTL_S, Etcd
from chaos.sim.machine.kernel import (
    EPOCH_S,
    Kernel,
    Killed,
    Process,
)
from chaos.sim.machine.network import Net
from chaos.sim.machine.object_store import Storage
from chaos.sim.machine.tracker import Tracking
from chaos.sim.modelled.training import ModelledPlan
from chaos.sim.modelled.training_data import Dataset
from elastic_train.checkpoint.saving.abandonment import LEAST_S
from elastic_train.config.schema import Config
from elastic_train.core.arrays import Int64s
from rendezvous.context import LiveContext
from rendezvous.membership.records import Keys

PATIENCE_S = 1800.0
"""Virtual seconds from the last fault's end, beside those that the whole job takes, within which it must come to its
end: the bound on liveness."""
TIMES = {"scale_down": 5.0, "start_twin": 5.0}
"""What lasts so many times as long as its fault says."""
LOOK_S, RESTART_S = 10.0, 60.0
"""A node that has ended by itself is started again after so long, however many faults are still to come."""
_SIMPLE = (str, int, float, type(None))
"""What JSON gives back as it is."""


class Job:
    """One simulated run; `bug` replaces product code by path, to plant a bug."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        faults: tuple[SimFault, ...],
        *,
        bug: Mapping[str, object] | None = None,
        first_pid: int = 1000,
    ) -> None:
        self.shape, self.seed, self.faults, self.bug = shape, seed, faults, bug or {}
        self.kernel = Kernel()
        self.net = Net(self.kernel, self.draws("net"), shape.delay_s)
        self.etcd = Etcd(self.kernel, self.draws("etcd"), shape.delay_s, shape.piece_s)
        self.storage = Storage(self.kernel, self.draws("storage"), 3 * shape.delay_s)
        self.storage.at_tear = lambda writer: self.record("chaos", "undo", kind="tear_write", pids=[writer.pid])
        self.nodes = [self._make_node(number) for number in range(shape.nodes)]
        self.num_faults: dict[str, int] = {}
        self.errors: list[str] = []
        self.pace = self.draws("pace")
        self._next_pid = first_pid
        self.workers: dict[Process, Worker] = {}
        self._environs: dict[Process, dict[str, str]] = {}
        self.lines: dict[str, list[Line]] = {}
        self.result: Line | None = None
        self.witness: Int64s | None = None
        self._armed: dict[str, dict[int, list[SimFault]]] = {}
        self._reached: dict[str, int] = {}
        self._awaited = sorted((fault for fault in faults if fault.step), key=lambda fault: fault.step)
        self._busy_until = 0.0
        self._step = self._term = 0
        self._leader: Process | None = None
        self.data = Dataset(self.kernel, may_spoil=any(fault.kind == "bad_row_group" for fault in faults))
        self.tracking = Tracking(self) if shape.tracked else None
        self.plan = make_plan(shape, self.data, self._take_witness)

    def draws(self, name: str) -> random.Random:
        """Return a stream of its own for each use, so that a fault left out changes no other's draws."""
        return random.Random(f"{self.seed}/{name}")

    # What the product asks for.

    def plan_of(self, config: Config) -> ModelledPlan:
        return self.plan

    def told(self, process: Process) -> LiveContext | None:
        return self.workers[process].told

    def environ(self, process: Process) -> dict[str, str]:
        """Return the environment of a process, which it may change."""
        return self._environs.setdefault(process, {})

    def compute(self, num_lanes: int) -> None:
        """Take the time of a step's lanes; while a process is stopped, it computes nothing."""
        process = self.kernel.process
        left_s = self.shape.lane_s * num_lanes * process.slowness * self.pace.uniform(0.8, 1.4)
        while left_s > 0:
            stopped_s = process.stopped_s
            self.kernel.sleep(left_s)
            left_s = max(process.stopped_s - stopped_s, process.hangs_until - self.kernel.now)

    def copy(self) -> None:
        """Take the time of a save's copy: often less than a step's, now and then more; only who is slow is given up."""
        seconds = min(self.shape.lane_s * self.pace.choice((0.1, 1.0, 5.0)), LEAST_S / 2)
        self.kernel.sleep(seconds * self.kernel.process.slowness)

    def take_file(self, path: Path, text: str) -> None:
        if path.name == "result.json":
            self.result = json.loads(text)

    def _take_witness(self, counts: Int64s) -> None:
        self.witness = counts

    def record(self, file: str, op: str, **fields: object) -> None:
        """Append a line to a history, as JSON would keep it."""
        line: Line = {"op": op, "t": EPOCH_S + self.kernel.now}
        for name, value in fields.items():
            line[name] = value if isinstance(value, _SIMPLE) else json.loads(json.dumps(value))
        self.lines.setdefault(file, []).append(line)
        if op == "form" and isinstance(line["term"], int) and line["term"] >= self._term:
            self._term = line["term"]
            if line["rank"] == 0:
                self._leader = self.kernel.process
        if op == "step" and line["term"] == self._term and isinstance(line["step"], int):
            self._step = line["step"]
            while self._awaited and self._awaited[0].step <= self._step:
                self._await_moment(self._awaited.pop(0))

    def reach(self, point: str) -> None:
        """Have the faults that wait for the n-th time that anybody comes to a failpoint."""
        self._reached[point] = nth = self._reached.get(point, 0) + 1
        armed = self._armed.get(point)
        for fault in armed.pop(nth, ()) if armed else ():
            self._strike_here(fault)

    def _arm(self, fault: SimFault) -> None:
        """Let a fault wait for whoever comes to its failpoint; times are counted from now on."""
        nth = self._reached.get(fault.point, 0) + fault.nth
        self._armed.setdefault(fault.point, {}).setdefault(nth, []).append(fault)

    def _strike_here(self, fault: SimFault) -> None:
        process = self.kernel.process
        self._note(fault, [process], process.node, fault.for_s)
        self._busy(0.0)
        if fault.kind == "kill":
            self.kernel.kill(process)
            raise Killed
        if fault.kind == "raise":
            raise RuntimeError(f"planted at {fault.point}")
        self.freeze([process], fault.for_s)
        self.kernel.sleep(0.0)

    # What faults do.

    def node(self, fault: SimFault) -> int:
        if fault.node >= 0:
            return fault.node % self.shape.nodes
        return self._leader.node if self._leader is not None else 0

    def worker(self, fault: SimFault) -> list[Process]:
        """Return the worker that a fault is for, if it lives."""
        if fault.node < 0 and self._leader is not None:
            return [] if self._leader.is_dead else [self._leader]
        process = self.nodes[self.node(fault)].workers.get(fault.rank % self.shape.ranks)
        return [] if process is None or process.is_dead else [process]

    def member(self, fault: SimFault) -> list[Process]:
        """Return the process that holds the lease by which others know of a worker: the agent's in `restart` mode."""
        hit = self.worker(fault)
        return [agent for process in hit for agent in self.nodes[process.node].live_agent()] if self.restarts else hit

    def all_workers(self) -> list[Process]:
        return [process for node in self.nodes for process in node.live_workers()]

    def freeze(self, processes: list[Process], for_s: float) -> None:
        for process in processes:
            self.kernel.pause(process)
            self.kernel.after(for_s, lambda process=process: self.kernel.resume(process))  # type: ignore[misc]
        self._busy(for_s)

    def kill_node(self, number: int, for_s: float) -> list[Process]:
        hit = self.nodes[number].kill()
        self._start_after(number, for_s)
        return hit

    def stop_node(self, number: int, for_s: float) -> list[Process]:
        hit = self.nodes[number].stop()
        self._start_after(number, for_s)
        return hit

    def start_guests(self, for_s: float) -> None:
        """Start as many nodes again, under the same run id, and kill them after a while."""
        first = self.shape.nodes
        self.nodes += [self._make_node(number) for number in range(len(self.nodes), 2 * first)]
        for number in range(first, 2 * first):
            self.start_node(number)
            self.kernel.after(for_s, lambda number=number: self._end_guest(self.nodes[number]))  # type: ignore[misc]
        self._busy(for_s)

    def _end_guest(self, node: Node) -> None:
        self.record("chaos", "undo", kind="start_twin", pids=[process.pid for process in node.live_workers()])
        node.kill()

    def _start_after(self, number: int, for_s: float) -> None:
        self.kernel.after(for_s, lambda: self._start_again(number))
        node = self.nodes[number]
        node.away_until = max(node.away_until, self.kernel.now + for_s)
        self._busy(for_s)

    def _start_again(self, number: int) -> None:
        """Undo what has ended a node."""
        if not self.nodes[number].is_up:
            self.record("chaos", "undo", kind="kill_node", node=number, pids=[])
        self.start_node(number)

    def start_node(self, number: int) -> None:
        """Start a node, unless it is up or the job is done."""
        if not self.is_done:
            self.nodes[number].start()

    def _make_node(self, number: int) -> Node:
        return (RestartNode if self.restarts else Node)(self, number)

    # The run.

    @property
    def restarts(self) -> bool:
        """Whether a fault ends all processes of a world, and others begin again from a commit."""
        return self.shape.recovery == "restart"

    @property
    def is_done(self) -> bool:
        return self.result is not None and self.result["status"] == "done"

    def run(self) -> Evidence:
        """Run to the end, or to where patience ends, and return what the judge needs."""
        with installed(self), self.tracking or contextlib.nullcontext():
            for node in self.nodes:
                self.kernel.after(self.pace.uniform(0.0, 1.0), lambda node=node: self.start_node(node.number))  # type: ignore[misc]
            for fault in self.faults:
                if fault.step == 0:
                    self._await_moment(fault)
            leases = None
            try:
                self._conduct()
                if self.tracking is not None:
                    self.tracking.sync()
                leases = self._outlived()
            finally:
                left = [process.pid for process in self.workers if not process.is_dead]
                self.record("chaos", "clean", orphans=left, leases=leases)
                self.kernel.close()
            return left_by(self)

    def _outlived(self) -> list[str] | None:
        """Return the members' keys that are there when every lease of a job that is done must have ended."""
        if not self.is_done or any(node.is_up for node in self.nodes):
            return None
        self.kernel.sleep(2 * self.shape.ttl_s + LEAST_TTL_S)
        return sorted(self.etcd.show(Keys(RUN_ID).members).entries)

    def _await_moment(self, fault: SimFault) -> None:
        act = self._arm if fault.point else self._strike
        self.kernel.after(fault.at_s, lambda: act(fault))

    def _conduct(self) -> None:
        last = max((fault.at_s + (0.0 if fault.point else fault.for_s) for fault in self.faults), default=0.0)
        looked_at = 0.0
        while self.kernel.now < max(last, self._busy_until) + self.shape.span_s + PATIENCE_S:
            self.kernel.sleep(1.0)
            if self.kernel.now > looked_at + LOOK_S:
                looked_at = self.kernel.now
                self._restart_failed()
            is_quiet = self.kernel.now > max(last, self._busy_until)
            is_up = any(node.is_up for node in self.nodes)
            if self.is_done and not is_up and self.kernel.now > self._busy_until:
                return  # faults that are still to come have nobody to hit
            if not is_up and is_quiet:
                if all(node.would_end_alike for node in self.nodes[: self.shape.nodes]):
                    return
                for node in self.nodes[: self.shape.nodes]:
                    self._start_again(node.number)  # as whoever keeps the job going does
            elif is_quiet and not self.is_done and self.kernel.now > 1.0:
                for node in self.nodes[: self.shape.nodes]:
                    if not node.is_up and node.agent is not None and not node.would_end_alike:
                        self._start_again(node.number)

    def _restart_failed(self) -> None:
        """Start nodes again that have ended by themselves, as whoever keeps the job going does after a while."""
        for node in self.nodes[: self.shape.nodes]:
            if node.is_up or node.agent is None or node.would_end_alike:
                node.down_for_s = 0.0
            elif self.kernel.now >= node.away_until:
                node.down_for_s += LOOK_S
                if node.down_for_s >= RESTART_S:
                    self._start_again(node.number)

    def _strike(self, fault: SimFault) -> None:
        if self.is_done:
            return
        before = len(self.storage.damaged)
        hit = KINDS[fault.kind](self, fault)
        for_s = fault.for_s * TIMES.get(fault.kind, 1)
        self._busy(for_s)
        damaged = [*self.storage.damaged.values()][before:]
        # What befalls etcd and storage, or the way to etcd, has happened although no worker was there to notice.
        if hit or damaged or befalls_all(fault.kind) or cuts_off(fault.kind):
            told: dict[str, object] = {"commit": damaged[0]} if damaged else {}
            if fault.kind == "slow_etcd":
                told["nodes"] = [node.number for node in self.nodes]  # here for all of them
            self._note(fault, hit, self.node(fault), for_s, **told)

    def _note(self, fault: SimFault, hit: list[Process], node: int, for_s: float, **told: object) -> None:
        name = f"{fault.kind}@{fault.point}" if fault.point else fault.kind
        self.num_faults[name] = self.num_faults.get(name, 0) + 1
        who = {"kind": name, "target": node, "node": node, "signal": None, "pids": [process.pid for process in hit]}
        moment = {"at_step": None, "is_drawn": False, "seen_step": self._step, "seen_commit": None, "term": self._term}
        self.record("chaos", "fault", **who, **moment, **told, for_s=for_s)

    def _busy(self, for_s: float) -> None:
        self._busy_until = max(self._busy_until, self.kernel.now + for_s)

    def process(self, node: int, name: str) -> Process:
        """Make a process with a number that no other has had."""
        self._next_pid += 1
        return Process(self._next_pid, node, name)
