"""Run a job on a Ray cluster: each node is an actor with one launcher; lost ones are replaced by us, not by Ray.

Ray restarts nothing here (`max_restarts=0`): survivors of a lost node continue in their processes, and the replacement
joins them. Actors are requested one by one, not as a gang, so that a job starts with as many as the cluster has room
for, and grows later. The process that calls `run_on_ray` starts the job's etcd, and the job ends with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.config.schema import Config
from elastic_train.config.sources import ENV_PREFIX, variable_of
from elastic_train.errors import ConfigError, CorruptError, NoProgressError, Preempted, TooFewNodesError
from elastic_train.launch.job_etcd import JobEtcd
from elastic_train.launch.options import TIMEOUT_S, Flags, for_no_etcd, parse_nodes
from elastic_train.launch.schedulers import CONF, read_conf, without_schedulers
from elastic_train.system.extras import needed_for
from elastic_train.system.files import write_atomically
from elastic_train.system.preemption import requests
from rendezvous.etcd.options import wrong_id
from rendezvous.etcd.server import EtcdServer, free_ports
from rendezvous.orphans import bound_command
from rendezvous.outage_log import WaitingLog

if TYPE_CHECKING:
    import ray
    from ray.actor import ActorHandle

FINAL_CODES = (ConfigError.exit_code, CorruptError.exit_code, NoProgressError.exit_code, TooFewNodesError.exit_code)
"""Codes of nodes that would end the same way again, or have waited long enough for others."""
MOST_FAILURES, FAILURES_S = 20, 3600.0
LOOK_S = 1.0
_log = logging.getLogger("elastic_train")
Result = dict[str, Any]
"""Content of a run's result.json."""


@dataclass(frozen=True, slots=True)
class RayJob:
    """A job and its resources on a cluster: `resources` of each node as Ray names them, including `CPU` and `GPU`."""

    config: Config
    nodes: str
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    ranks: int | None = None
    """Ranks per node; by default one per GPU, or one."""
    run_id: str | None = None
    endpoint: str | None = None
    conf: str | None = field(default_factory=lambda: os.environ.get(CONF), repr=False)
    """Options for that etcd, by default PET_RDZV_CONF of the machine that starts the job; None: each node's own."""
    most_failures: int = MOST_FAILURES
    """Number of lost or failed nodes replaced per hour; -1: no limit."""
    grace_s: float = 30.0
    timeout_s: float = TIMEOUT_S
    options: Mapping[str, object] = field(default_factory=lambda: {"scheduling_strategy": "SPREAD"})
    """Further options of Ray's actors, such as `label_selector` or `runtime_env`."""

    def problems(self) -> Iterator[str]:
        """Yield everything that is wrong with the job."""
        wrong: list[str] = []
        parse_nodes(self.nodes, wrong)
        conf = read_conf(self.conf or "", wrong)
        yield from wrong
        yield from for_no_etcd(self.endpoint, conf)
        yield from wrong_id(self.run_id) if self.run_id is not None else ()
        data = self.config.data
        named = {"run.dir": self.config.run.dir, "data.train": data.train, "data.validation": data.validation}
        named |= {f"data.mixture.{i}.source": each.source for i, each in enumerate(data.mixture or ())}
        for key, place in named.items():
            if place is not None and "://" not in place and not Path(place).is_absolute():
                yield f"{key} is {place}: nodes on Ray have working directories of their own; give an absolute path"
        yield from Flags(ranks=self.ranks, grace_s=self.grace_s, timeout_s=self.timeout_s).problems()
        for name, amount in self.resources.items():
            if not 0 <= amount < math.inf:
                yield f"a node cannot have {amount:g} of {name}"

    def to_etcd(self) -> dict[str, str]:
        """Return the variable that tells each node how to reach etcd; empty for the job's own."""
        conf = self.conf if self.endpoint is not None else self.conf or ""
        return {} if conf is None else {CONF: conf}

    def arguments(self, endpoint: str) -> list[str]:
        """Return the flags of each node's launcher."""
        ranks = self.ranks or max(1, int(self.resources.get("GPU", 0)))
        flags = {"nodes": self.nodes, "ranks": ranks, "endpoint": endpoint, "id": self.run_id or uuid.uuid4().hex[:12]}
        flags |= {"grace-s": self.grace_s, "timeout-s": self.timeout_s}
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


class Node:
    """The actor: parent of one launcher, which dies with it. Two of its methods may run at once."""

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None
        self._is_leaving = False

    def host(self) -> str:
        """Return the host; an answer means that Ray has placed the actor."""
        return socket.gethostname()

    def run(
        self, run_dir: str, config: str, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> tuple[int, Result | None]:
        """Run the launcher to its end; return its exit code, and the run's result if it is on this node.

        `variables` hold what must not be in any file or command line.
        """
        path = Path(run_dir) / "ray.yaml"
        write_atomically(path, config)
        # A launcher can import what this process can: Ray adds the driver's and the runtime_env's folders.
        environ = _without_keys(without_schedulers(os.environ)) | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
        }
        environ |= variables
        command = bound_command(sys.executable, "-m", "elastic_train.command", "launch", str(path), *arguments)
        self._launcher = subprocess.Popen(command, env=environ)
        if self._is_leaving:
            self.leave()
        code = self._launcher.wait()
        result = Path(run_dir) / "result.json"
        return code, json.loads(result.read_text()) if code == 0 and result.exists() else None

    def leave(self) -> None:
        """Ask the launcher to leave, as a scheduler does."""
        self._is_leaving = True
        if self._launcher is not None:
            self._launcher.send_signal(signal.SIGTERM)


def _without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a node's variables without configuration keys, which are read once, where the job is started.

    They would change this node only, or all silently.
    """
    left_out = {name for name in environ if name.startswith(ENV_PREFIX)}
    if left_out:
        _log.warning("%s of this node: without effect, set them where the job is started", ", ".join(sorted(left_out)))
    return {name: value for name, value in environ.items() if name not in left_out}


def run_on_ray(job: RayJob) -> tuple[int, Result | None]:
    """Run a job on the connected cluster; return its exit code and result.

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask all nodes to leave, with code 75 (only in the main thread). Raise
    ConfigError with all mistakes, TooFewNodesError if Ray places no node in time, ServerError if etcd cannot be started
    here.
    """
    if problems := list(job.problems()):
        raise ConfigError(*problems)
    with _requests() as asked, _etcd(job) as endpoint, contextlib.closing(_Nodes(job, endpoint, asked)) as nodes:
        return nodes.supervise()


@contextlib.contextmanager
def _requests() -> Iterator[threading.Event]:
    """Record requests to leave. Ray's own SIGTERM handler aborts the process; its calls let no other exception out."""
    asked = threading.Event()
    numbers = requests() if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _etcd(job: RayJob) -> Iterator[str]:
    """Yield the endpoint of the job's etcd; unless the user gave one, start one that the cluster's nodes can reach."""
    if job.endpoint is not None:
        yield job.endpoint
        return
    ray, (port,) = _ray(), free_ports(1)
    server = EtcdServer(port=port, host="0.0.0.0")
    etcd = JobEtcd(f"{ray.util.get_node_ip_address()}:{port}", server)
    try:
        server.start()
        etcd.keep()
        yield etcd.endpoint
    finally:
        etcd.close()


@dataclass(slots=True, eq=False)
class _Running:
    """A requested node: `placed` is the pending answer that it has a place, None once received."""

    actor: ActorHandle[Node]
    ended: ray.ObjectRef[tuple[int, Result | None]]
    placed: ray.ObjectRef[str] | None


class _Nodes:
    """The nodes of a running job."""

    def __init__(self, job: RayJob, endpoint: str, asked: threading.Event) -> None:
        self._ray, self._job, self._asked = _ray(), job, asked
        variables = {variable_of(key): value for key, value in job.config.left_out().items()} | job.to_etcd()
        self._given = (job.config.run.dir, job.config.to_yaml(), job.arguments(endpoint), variables)
        amounts = dict(job.resources)
        known = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0)}
        known |= {"memory": amounts.pop("memory")} if "memory" in amounts else {}
        options = {**known, "resources": amounts, "max_restarts": 0, "max_concurrency": 2, **job.options}
        self._class = self._ray.remote(Node).options(**options)
        self._nodes: list[_Running] = []
        self._failed_at_s: deque[float] = deque()

    def supervise(self) -> tuple[int, Result | None]:
        """Replace nodes until one has ended for all of them, or all must leave; return code and result."""
        for _ in range(parse_nodes(self._job.nodes, [])[1]):
            self._start()
        code = 1
        while self._nodes:
            self._await_place()
            if self._asked.is_set():
                _log.warning("asked to leave: so are all nodes of the job, which have %.0f s", self._job.grace_s)
                self.leave()
                return Preempted.exit_code, None
            for node in self._ended():
                found = self._end_of(node)
                if found is not None and found[0] in FINAL_CODES:
                    self.leave()
                    return found
                if found is not None and found[0] == 0:
                    return 0, self._newest_result(found[1])
                code = 1 if found is None else found[0]
                self._replace(code)
        return code, None

    def leave(self) -> None:
        """Ask all nodes to leave, and wait for the placed ones within their grace period."""
        for node in self._nodes:
            node.actor.leave.remote()
        self._await_ends()

    def close(self) -> None:
        """Kill what is left, including nodes not yet placed."""
        while self._nodes:
            self._ray.kill(self._nodes.pop().actor)

    def _start(self) -> None:
        actor = self._class.remote()
        self._nodes.append(_Running(actor, actor.run.remote(*self._given), actor.host.remote()))

    def _replace(self, code: int) -> None:
        now_s = time.monotonic()
        if code != Preempted.exit_code:
            self._failed_at_s.append(now_s)
        while self._failed_at_s and self._failed_at_s[0] < now_s - FAILURES_S:
            self._failed_at_s.popleft()
        if 0 <= self._job.most_failures < len(self._failed_at_s):
            failed, left = len(self._failed_at_s), len(self._nodes)
            _log.error("%d nodes failed within an hour (--max-failures): not replaced; %d continue", failed, left)
            return
        self._start()

    def _await_place(self) -> None:
        """Return once a node is placed; raise TooFewNodesError if none is in time."""
        log, deadline = WaitingLog(_log, self._job.timeout_s), time.monotonic() + self._job.timeout_s
        while not (self._asked.is_set() or any(node.placed is None for node in self._nodes)):
            self._note_placed(LOOK_S)
            log.waits(
                lambda left_s: (
                    f"waiting for Ray to find a place for a node with {dict(self._job.resources)}: giving up in "
                    f"{left_s:.0f} s (--timeout-s)"
                )
            )
            if time.monotonic() > deadline:
                raise TooFewNodesError(
                    f"Ray found no place for a node with {dict(self._job.resources)} within "
                    f"{self._job.timeout_s:.0f} s: `ray status` says what the cluster has, and who uses it"
                )

    def _ended(self) -> Iterable[_Running]:
        """Return the nodes that have ended, after at most a second."""
        self._note_placed(0.0)
        refs = {node.ended: node for node in self._nodes}
        ended, _ = self._ray.wait(list(refs), num_returns=1, timeout=LOOK_S)
        return [refs[ref] for ref in ended]

    def _note_placed(self, timeout_s: float) -> None:
        """Record which nodes have been placed; a node lost meanwhile had been placed, too."""
        refs = {node.placed: node for node in self._nodes if node.placed is not None}
        placed, others = self._ray.wait(list(refs), num_returns=1, timeout=timeout_s) if refs else ([], [])
        if placed and others:
            placed = [*placed, *self._ray.wait(others, num_returns=len(others), timeout=0.0)[0]]
        for ref in placed:
            refs[ref].placed = None
            with contextlib.suppress(self._ray.exceptions.RayError):
                _log.info("a node of the job is on %s", self._ray.get(ref))

    def _end_of(self, node: _Running) -> tuple[int, Result | None] | None:
        """Remove an ended node; return its code and result, None if its actor was lost or could not run it."""
        self._nodes.remove(node)
        try:
            found: tuple[int, Result | None] = self._ray.get(node.ended)
        except self._ray.exceptions.RayError as error:
            # An error that the actor raised, or the reason why it could not be set up, says more than Ray's first line.
            why = getattr(error, "cause", None) or getattr(error, "error_message", None) or error
            _log.warning("a node was lost with its actor: %s", str(why).strip().partition("\n")[0])
            return (Preempted.exit_code, None) if getattr(error, "preempted", False) else None
        if found[0] != 0:
            _log.warning("a node has ended with exit code %d", found[0])
        return found

    def _newest_result(self, found: Result | None) -> Result | None:
        """Return the result of the job's last world, once the other nodes have ended as well.

        If `run.dir` is each node's own, only rank 0's node has it; others may have that of an earlier start.
        """
        results = [found, *(end[1] for node in self._await_ends() if (end := self._end_of(node)) is not None)]
        return max(filter(None, results), key=lambda result: int(result.get("term", 0)), default=None)

    def _await_ends(self) -> list[_Running]:
        """Wait for the placed nodes within their grace period; return those that have ended."""
        self._note_placed(0.0)
        at_work = {node.ended: node for node in self._nodes if node.placed is None}
        if not at_work:
            return []
        ended, _ = self._ray.wait(list(at_work), num_returns=len(at_work), timeout=self._job.grace_s)
        return [at_work[ref] for ref in ended]


def _ray() -> Any:
    with needed_for("a job on Ray"):
        import ray.util
    return ray
