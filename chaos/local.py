"""Run a scenario with real processes: a real etcd, one real torchrun a node, real signals.

A node is a torchrun in a session of its own; its agent and workers carry a mark in their environment, by which all of
them are found and killed at once, as a machine's death does. The executor follows the run's histories to know the step,
injects each fault when it is due, records it beside them, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos.errors import RunError
from chaos.evidence import Line, parse_lines
from chaos.scenario import Due, Scenario

MARK = "ELASTIC_CHAOS_NODE"
_LOOK_EVERY_S = 0.01
_GRACE_S = 45.0


@dataclass(slots=True)
class Followed:
    """What the histories have said so far: the newest step, commit, world and term of a running job."""

    step: int = 0
    loss: float | None = None
    world: int = 0
    term: int = 0
    commit: int | None = None
    _places: dict[Path, int] = field(default_factory=dict)

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
        term = int(str(line.get("term", 0)))
        if term < self.term:
            return
        if line["op"] in ("form", "restore", "step"):
            self.term, self.world = term, int(str(line.get("world", self.world)))
        if line["op"] == "step":
            self.step = int(str(line["step"]))
            self.loss = float(str(line["loss"]))
        elif line["op"] == "restore":
            self.step = int(str(line["step"]))
        elif line["op"] == "commit":
            self.commit = int(str(line["step"]))


class Node:
    """One torchrun and everything below it."""

    def __init__(self, number: int, command: list[str], log: Path, environ: dict[str, str]) -> None:
        self.number, self._command, self._log = number, command, log
        self._mark = f"{uuid.uuid4().hex}-{number}"
        self._environ = {**environ, MARK: self._mark}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> list[int]:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return [self._process.pid]

    def kill(self) -> list[int]:
        """SIGKILL the agent and every worker, all found before the first is hit."""
        pids = self.pids()
        _signal(pids, signal.SIGKILL)
        self.wait(_GRACE_S)
        return pids

    def kill_worker(self) -> list[int]:
        """SIGKILL one worker; the agent lives."""
        workers = [pid for pid in self.pids() if self._process is not None and pid != self._process.pid]
        victims = [pid for pid in workers if b"elastic_train" in _read(Path(f"/proc/{pid}/cmdline"))][-1:]
        _signal(victims, signal.SIGKILL)
        return victims

    def stop(self) -> list[int]:
        """SIGTERM the agent, as a scheduler does before it takes a machine away."""
        assert self._process is not None, "the node was started"
        self._process.terminate()
        return [self._process.pid]

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def pids(self) -> list[int]:
        """Return all live processes that carry this node's mark."""
        mark = f"{MARK}={self._mark}".encode()
        return [pid for pid in _processes() if mark in _read(Path(f"/proc/{pid}/environ")).split(b"\0")]

    def tail(self, num_lines: int = 15) -> str:
        """Return the end of the node's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:]) if self._log.exists() else ""


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

    def run(self) -> None:
        """Start the nodes, inject every fault when it is due, wait for the end; leave no process behind."""
        (self.folder / "history").mkdir(parents=True, exist_ok=True)
        self._record("scenario", name=self.scenario.name, seed=self.seed)
        deadline = time.monotonic() + self.scenario.timeout_s
        followed = Followed()
        try:
            for node in self.nodes:
                node.start()
            for fault in self.faults:
                self._wait_until_due(fault, followed, deadline)
                self._inject(fault, followed)
            self._wait_for_end(followed, deadline)
        finally:
            self._clean_up()

    def _wait_until_due(self, fault: Due, followed: Followed, deadline: float) -> None:
        moment = time.monotonic() + (fault.after_s or 0.0)
        while time.monotonic() < moment or (fault.step is not None and followed.step < fault.step):
            self._look(followed, deadline, f"{fault.kind} on node {fault.node}")
            if fault.step is not None and all(node.poll() is not None for node in self.nodes):
                raise RunError(f"the job ended before {fault.kind} was due at step {fault.step}; {self._logs()}")

    def _inject(self, fault: Due, followed: Followed) -> None:
        node = self.nodes[fault.node]
        actions = {
            "kill_worker": node.kill_worker,
            "kill_node": node.kill,
            "stop_node": node.stop,
            "start_node": node.start,
        }
        at = time.time()
        pids = actions[fault.kind]()
        self._record(
            "fault", t=at, kind=fault.kind, node=fault.node, at_step=fault.step, seen_step=followed.step, pids=pids
        )
        self.on_event(f"fault: {fault.kind} on node {fault.node} at step {followed.step}")

    def _wait_for_end(self, followed: Followed, deadline: float) -> None:
        while any(node.poll() is None for node in self.nodes):
            self._look(followed, deadline, "its end")
        alive = [node.number for node in self.nodes if node.poll() == 0]
        if not alive:
            raise RunError(f"no node ended well; {self._logs()}")

    def _look(self, followed: Followed, deadline: float, waiting_for: str) -> None:
        if time.monotonic() > deadline:
            raise RunError(
                f"the job did not come to {waiting_for} within {self.scenario.timeout_s:.0f} s "
                f"(step {followed.step}, term {followed.term}); {self._logs()}"
            )
        followed.look(self.folder)
        self.on_look(followed)
        time.sleep(_LOOK_EVERY_S)

    def _clean_up(self) -> None:
        """Find what outlived the job, record it, and end it."""
        is_over = all(node.poll() is not None for node in self.nodes)
        left = [pid for node in self.nodes for pid in node.pids()]
        if is_over:
            self._record("clean", orphans=left)
        _signal(left, signal.SIGKILL)
        for node in self.nodes:
            node.wait(_GRACE_S)

    def _record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        line = json.dumps({"op": op, "t": time.time() if t is None else t, **fields})
        with (self.folder / "history" / "chaos.jsonl").open("a") as file:
            file.write(line + "\n")

    def _logs(self) -> str:
        return "\n".join(f"the end of node {node.number}'s log:\n{node.tail()}" for node in self.nodes)


def launch(scenario: Scenario, endpoint: str, folder: Path, overrides: list[str], run_id: str) -> list[Node]:
    """Describe the scenario's nodes: each a `torchrun --rdzv_backend=etcd` as users type it."""
    nodes = scenario.nodes
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--rdzv_backend=etcd", f"--rdzv_endpoint={endpoint}", f"--rdzv_id={run_id}"),
        f"--rdzv_conf=ttl={nodes.lease_ttl_s:g}",
        *(f"--nnodes={nodes.min}:{nodes.count}", f"--nproc-per-node={nodes.ranks}"),
        f"--max-restarts={nodes.max_restarts}",
        *("-m", "elastic_train", scenario.config, *overrides),
    ]
    return [Node(number, command, folder / f"node-{number}.log", environ) for number in range(nodes.count)]


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _read(path: Path) -> bytes:
    """Read a file of /proc; a process that has gone has nothing to say."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
