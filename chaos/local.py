"""Run a scenario with real processes: a real etcd, one real torchrun a node, real signals.

The executor follows the run's histories to know the step, injects each fault when it is due, records it beside them,
and leaves no process behind, whatever ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from chaos.errors import RunError
from chaos.evidence import Line, number, parse_lines, part, whole
from chaos.node import Node, clean_environ, signal_all
from chaos.scenario import Due, Kind, Scenario
from elastic_train.failpoints import KINDS as POINT_KINDS
from elastic_train.failpoints import POINTS

SIGNALS: dict[Kind, str | None] = {
    "kill_worker": "SIGKILL",
    "kill_node": "SIGKILL",
    "freeze_worker": "SIGSTOP",
    "freeze_node": "SIGSTOP",
    "stop_node": "SIGTERM",
    "start_node": None,
}
_LOOK_EVERY_S = 0.01


@dataclass(slots=True)
class Followed:
    """What the histories have said so far: the newest step, commit, world and term of a running job."""

    step: int = 0
    loss: float | None = None
    world: int = 0
    term: int = 0
    epoch: int | None = None
    samples_per_s: float | None = None
    commit: int | None = None
    resumed: Line | None = None
    pids: dict[int, int] = field(default_factory=dict)
    _places: dict[Path, int] = field(default_factory=dict)
    _applied_at: float | None = None

    def look(self, folder: Path) -> None:
        """Read what was appended to any history since the last look."""
        for path in (folder / "history").glob("[0-9]*.jsonl"):
            place = self._places.get(path, 0)
            with path.open("rb") as file:
                file.seek(place)
                content = file.read()
            end = content.rfind(b"\n") + 1
            self._places[path] = place + end
            for line in parse_lines(content[:end]):
                self._take(line)

    def _take(self, line: Line) -> None:
        term = whole(line, "term")
        if term < self.term:
            return
        if term > self.term:
            self.pids = {}
        if line["op"] == "form":
            self.pids[whole(line, "rank")] = whole(line, "pid")
        if line["op"] in ("form", "restore", "step"):
            self.term, self.world = term, whole(line, "world") if "world" in line else self.world
        if line["op"] == "step":
            self._take_step(line)
        elif line["op"] == "restore":
            self.step, self._applied_at = whole(line, "step"), None
            self.resumed = part(line, "resumed") if line["resumed"] else self.resumed
        elif line["op"] == "commit":
            self.commit = whole(line, "step")

    def _take_step(self, line: Line) -> None:
        """Take a step's facts, and its rate from the time since the step before it on the same rank."""
        self.step, self.epoch, self.loss = whole(line, "step"), whole(line, "epoch"), number(line, "loss")
        if line["rank"] == 0:
            at, since = number(line, "t"), self._applied_at
            self.samples_per_s = whole(line, "num_samples") / (at - since) if since and at > since else None
            self._applied_at = at


@dataclass(slots=True)
class Job:
    """A job to run to its end: its nodes, its faults, and where its histories are."""

    folder: Path
    nodes: list[Node]
    scenario: Scenario
    faults: list[Due]
    seed: int
    on_look: Callable[[Followed], None]
    on_event: Callable[[str], None]
    replay: str | None = None
    _followed: Followed = field(default_factory=Followed)
    _deadline: float = 0.0
    _lost: list[Node] = field(default_factory=list)
    _frozen: list[tuple[float, Node, list[int]]] = field(default_factory=list)
    _placed: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Start the nodes, inject every fault when it is due, wait for the end; leave no process behind."""
        (self.folder / "history").mkdir(parents=True, exist_ok=True)
        self._record(
            "scenario",
            name=self.scenario.name,
            seed=self.seed,
            recovery=self.scenario.nodes.recovery,
            command=self.nodes[0].command,
            replay=self.replay,
            kinds=get_args(Kind),
            points=POINTS,
            point_kinds=POINT_KINDS,
        )
        self._deadline = time.monotonic() + self.scenario.timeout_s
        try:
            for node in self.nodes:
                node.start()
            for fault in self.faults:
                self._inject(fault)
            self._wait_for_end()
        finally:
            self._clean_up()

    def _inject(self, fault: Due) -> None:
        """Wait until a fault is due and can be done, do it, and record it with the time just before it."""
        what, moment = f"{fault.kind} on node {fault.target}", time.monotonic() + (fault.after_s or 0.0)
        while True:
            self._look(what)
            if time.monotonic() >= moment and self._has_come(fault):
                node, at = self._target(fault), time.time()
                if node is not None and (pids := self._do(fault, node)):
                    break
            if not any(node.is_up for node in self.nodes) and not (fault.kind == "start_node" and fault.step is None):
                raise RunError(f"the job ended before {what} was due; {self._logs()}")
            self._check_is_up(fault)
        seen, followed = self._followed.step, self._followed
        moments = {"at_step": fault.step, "is_drawn": fault.is_drawn, "seen_step": seen, "seen_commit": followed.commit}
        who = {"kind": fault.kind, "target": fault.target, "node": node.number, "signal": SIGNALS[fault.kind]}
        self._record("fault", t=at, **who, **moments, term=followed.term, pids=pids)
        self.on_event(f"fault: {fault.kind} on node {node.number} at step {seen}")

    def _check_is_up(self, fault: Due) -> None:
        """Refuse to wait for ever for a node that has ended by itself."""
        node = self.nodes[fault.target] if isinstance(fault.target, int) else None
        if node is not None and node.code is not None and node not in self._lost and fault.kind != "start_node":
            what = f"{fault.kind} on node {node.number} was due, but it has ended with code {node.code}"
            raise RunError(f"{what}; the end of its log:\n{node.tail()}")

    def _has_come(self, fault: Due) -> bool:
        """Say whether a fault's step has come; a drawn one also waits for an applied step that is in no commit."""
        followed = self._followed
        if fault.is_drawn and (followed.commit is None or followed.step <= followed.commit):
            return False
        return fault.has_come(followed.step)

    def _target(self, fault: Due) -> Node | None:
        """Return the node that a fault hits: by its number, or by the role that it has now, if anybody has it."""
        if isinstance(fault.target, int):
            return self.nodes[fault.target]
        if fault.target == "lost":
            if not self._lost:
                raise RunError("a lost node is to be started, but none is lost")
            return self._lost[0]
        leader = next((node for node in self.nodes if self._followed.pids.get(0) in node.pids()), None)
        if fault.target == "leader" or leader is None:
            return leader
        return next((node for node in reversed(self.nodes) if node.is_up and node is not leader), None)

    def _do(self, fault: Due, node: Node) -> list[int]:
        """Do it; return the processes that were hit or started, none if there was nothing to hit."""
        if fault.kind == "start_node":
            if node.is_up:
                return []  # it was told to stop, and is not through yet; it may be frozen, so time goes on here
            self._lost = [lost for lost in self._lost if lost is not node]
            return node.start()
        if fault.kind == "kill_worker":
            return node.hit_worker(self._followed.pids, signal.SIGKILL)
        if fault.for_s is not None:
            is_one = fault.kind == "freeze_worker"
            pids = node.hit_worker(self._followed.pids, signal.SIGSTOP) if is_one else node.freeze()
            self._frozen.append((time.monotonic() + fault.for_s, node, pids))
            return pids
        pids = node.kill() if fault.kind == "kill_node" else node.stop()
        self._lost += [node] if pids else []
        return pids

    def _wait_for_end(self) -> None:
        while any(node.is_up for node in self.nodes):
            self._look("its end")
        self._followed.look(self.folder)
        self.on_look(self._followed)
        if all(node.code != 0 for node in self.nodes):
            raise RunError(f"no node ended well; {self._logs()}")

    def _look(self, waiting_for: str) -> None:
        if time.monotonic() > self._deadline:
            raise RunError(
                f"the job did not come to {waiting_for} within {self.scenario.timeout_s:.0f} s "
                f"(step {self._followed.step}, term {self._followed.term}); {self._logs()}"
            )
        for frozen in [frozen for frozen in self._frozen if time.monotonic() >= frozen[0]]:
            self._frozen.remove(frozen)
            frozen[1].thaw(frozen[2])
        self._followed.look(self.folder)
        self._place()
        self.on_look(self._followed)
        time.sleep(_LOOK_EVERY_S)

    def _place(self) -> None:
        """Record on which node the processes run that have come into the world since the last look."""
        new = set(self._followed.pids.values()) - self._placed
        self._placed |= new
        for node in self.nodes if new else []:
            if pids := sorted(new.intersection(node.pids())):
                self._record("node", node=node.number, pids=pids)

    def _clean_up(self) -> None:
        """Record how nodes ended and what outlived the job, and end that."""
        for _, node, pids in self._frozen:
            node.thaw(pids)
        is_over = not any(node.is_up for node in self.nodes)
        for node in self.nodes:
            if node.code is not None:
                self._record("exit", node=node.number, code=node.code)
        left = [pid for node in self.nodes for pid in node.pids()]
        if is_over:
            self._record("clean", orphans=left)
        signal_all(left, signal.SIGKILL)
        for node in self.nodes:
            node.kill()

    def _record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        line = json.dumps({"op": op, "t": time.time() if t is None else t, **fields})
        with (self.folder / "history" / "chaos.jsonl").open("a") as file:
            file.write(line + "\n")

    def _logs(self) -> str:
        return "\n".join(f"the end of node {node.number}'s log:\n{node.tail()}" for node in self.nodes)


def launch(scenario: Scenario, endpoint: str, folder: Path, overrides: list[str], run_id: str) -> list[Node]:
    """Describe the scenario's nodes: each a `torchrun --rdzv_backend=etcd` as users type it."""
    nodes = scenario.nodes
    environ = {**clean_environ(os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv_backend=etcd", f"--rdzv_endpoint={endpoint}", f"--rdzv_id={run_id}"),
        f"--rdzv_conf=ttl={nodes.lease_ttl_s:g},recovery={nodes.recovery}",
        *(f"--nnodes={nodes.min}:{nodes.count}", f"--nproc-per-node={nodes.ranks}"),
        f"--max-restarts={nodes.max_restarts}",
        *("-m", "elastic_train", scenario.config, *overrides),
    ]
    return [Node(number, command, folder / f"node-{number}.log", environ) for number in range(nodes.count)]
