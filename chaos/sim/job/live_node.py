"""A machine of the simulated world whose agent supervises workers individually.

It runs `rendezvous.torchelastic.live_agent.LiveAgent`, with its restart budgets and pauses; only processes are
modelled. A worker runs `elastic_train.training.supervisor.supervise`, the product's whole loop. Workers die with their
agent. For `restart` mode see `chaos.sim.job.restart_node`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Literal

from torch.distributed.elastic.agent.server import api as torchelastic

from chaos.sim.job.generation import LOOK_S, Generation, Started
from chaos.sim.job.host import Host, SimLeaveRequest, Worker
from chaos.sim.job.run_record import named
from chaos.sim.machine.etcd import EtcdClient
from chaos.sim.machine.kernel import EPOCH_S, Kernel, Process, Task
from chaos.sim.machine.meeting import agent_port
from chaos.sim.machine.stdlib import host_of
from elastic_train.errors import CorruptError, ElasticTrainError
from elastic_train.launch.node import exit_code
from elastic_train.training import supervisor as product
from rendezvous.context import LiveContext
from rendezvous.errors import RendezvousError
from rendezvous.membership.records import Keys
from rendezvous.torchelastic.bound_agent import FINAL_CODES
from rendezvous.torchelastic.live_agent import LEAVING_CODES, LiveAgent
from rendezvous.torchelastic.live_handler import LiveRendezvousHandler

RUN_ID = "sim"


class SimLiveHandler(LiveRendezvousHandler):
    """The product's handler over the simulated etcd; it removes dead members, and nothing listens at its address."""

    def __init__(self, host: Host, context: LiveContext) -> None:
        self._run_id, self._keys, self.node, self.context = context.run_id, Keys(context.run_id), context.node, context
        self._etcd = EtcdClient(host.around.etcd, host.kernel.process)  # type: ignore[assignment]  # all that it uses


class Node:
    """A machine, up or not."""

    def __init__(self, host: Host, number: int, run_id: str = RUN_ID) -> None:
        self.number, self.run_id = number, run_id
        self.agent: Process | None = None
        self.workers: dict[int, Process] = {}
        self.away_until = self.down_for_s = 0.0
        self.max_nodes = host.shape.max_nodes
        """The upper limit of --nnodes; other nodes reject this one if theirs differs."""
        self.code: int | None = None
        """Exit code; None while it runs."""
        self._host, self._kernel = host, host.kernel
        self._watcher: Task | None = None
        self._is_stopping = False
        self._start: Callable[[int], Process] = lambda local_rank: self.workers[local_rank]

    @property
    def is_up(self) -> bool:
        return self.agent is not None and not self.agent.is_dead

    @property
    def would_end_alike(self) -> bool:
        """True if its exit code says that a restart is useless, and nobody has fixed the cause."""
        around = self._host.around
        if self.code == CorruptError.exit_code and around.data.is_own(self.number):
            return False  # its copy can be restored, which a restart does
        return self.code in FINAL_CODES and not around.storage.is_mended(self.number)

    def live_workers(self) -> list[Process]:
        return [process for process in self.workers.values() if not process.is_dead]

    def live_agent(self) -> list[Process]:
        return [self.agent] if self.agent is not None and not self.agent.is_dead else []

    def start(self) -> None:
        if self.is_up:
            return
        self._host.around.net.silent.discard(self.number)
        if self.code == CorruptError.exit_code:
            self._host.around.data.restore(self.number)
        self.agent = self._host.around.process(self.number, "agent")
        self.workers, self._is_stopping, self.code = {}, False, None
        self._kernel.spawn(self.agent, self._watch_over)

    def kill(self) -> list[Process]:
        hit = [*self.live_workers(), *self.live_agent()]
        for process in hit:
            self._kernel.kill(process)
        return hit

    def stop(self) -> list[Process]:
        """Ask all workers to stop, and replace none from now on."""
        hit, self._is_stopping = self.live_workers(), True
        for process in hit:
            self._host.workers[process].leave.ask(self._kernel.now)
        self.look()
        return hit

    def look(self) -> None:
        """Let the agent poll its workers at its next turn."""
        if self._watcher is not None:
            self._kernel.wake(self._watcher)

    def _watch_over(self) -> None:
        """Act as the agent: start workers, supervise them by the product's rules, end when it must."""
        agent, shape = self._kernel.process, self._host.shape
        agent.at_death["workers"] = self._kill_workers
        context = self._make_context(agent)
        handler = SimLiveHandler(self._host, context)
        spec = torchelastic.WorkerSpec(
            "default", shape.ranks, handler, entrypoint="train", max_restarts=shape.max_restarts
        )
        watching = LiveAgent(spec, logs_specs=SimpleNamespace())
        self._start = lambda local_rank: self._start_worker(context, local_rank)
        self._watcher = self._kernel.current
        started = {local_rank: self._start(local_rank) for local_rank in range(shape.ranks)}
        watching._pcontext = Generation(self._host, started)
        group = watching.get_worker_group()
        group.workers = [torchelastic.Worker(local_rank, local_rank) for local_rank in started]
        for worker in group.workers:
            worker.id = started[worker.local_rank].pid
        looked = watching._monitor_workers(group)
        while looked.state is torchelastic.WorkerState.HEALTHY:
            self._rest(agent, watching)
            if self._is_stopping:
                break
            looked = watching._monitor_workers(group)
        while self.live_workers():
            self._kernel.park()
        code = exit_code(watching.worker_codes(), has_failed=looked.is_failed())
        self._end(agent, 0 if self._is_stopping or code in LEAVING_CODES else code)

    def _rest(self, agent: Process, watching: LiveAgent) -> None:
        """Sleep until the agent may see something; its ten polls a second cost nothing while all is well."""
        stopped_s = agent.stopped_s
        if all(worker.is_running for worker in self.workers.values()) and not (watching._due_at or self._is_stopping):
            self._kernel.park()
        self._kernel.sleep(LOOK_S)
        if agent.stopped_s == stopped_s:
            watching._looked_at = self._kernel.now

    def _make_context(self, agent: Process) -> LiveContext:
        shape, host = self._host.shape, host_of(self.number)
        node = f"{host}-{agent.pid}-{agent.born:.6f}"
        return LiveContext(
            endpoints=("etcd",),
            run_id=self.run_id,
            node=node,
            host=host,
            address=host,
            agent=agent_port(self._host.around.net, node),
            min_nodes=shape.min_nodes,
            max_nodes=self.max_nodes,
            ttl_s=shape.ttl_s,
            last_call_s=2.0,
            timeout_s=900.0,
        )

    def _end(self, agent: Process, code: int) -> None:
        self.code = code
        self._host.record.write("chaos", "exit", node=self.number, code=code)
        self._kernel.kill(agent)

    def _kill_workers(self) -> None:
        """Workers die with their agent."""
        for worker in self.workers.values():
            self._kernel.kill(worker)

    def start_in_place(self, local_rank: int) -> Started:
        """Start a replacement worker; called by the agent."""
        return Started(self._host, self._start(local_rank))

    def stopped_by(self, pid: int) -> Literal["signal"] | None:
        """Do what `rendezvous.torchelastic.live_agent.stopped_by` does for a worker of this node."""
        return "signal" if any(worker.is_paused for worker in self._of_number(pid)) else None

    def kill_number(self, pid: int) -> None:
        for worker in self._of_number(pid):
            self._kernel.kill(worker)

    def _of_number(self, pid: int) -> list[Process]:
        return [worker for worker in self.live_workers() if worker.pid == pid]

    def _start_worker(self, context: LiveContext, local_rank: int) -> Process:
        env = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self._host.shape.ranks)}
        process = self._spawn_worker(context, local_rank, env)
        process.at_death["agent"] = self.look
        return process

    def _spawn_worker(self, context: LiveContext | None, local_rank: int, env: Mapping[str, str]) -> Process:
        process = self._host.around.process(self.number, "worker")
        leave = SimLeaveRequest()
        self.workers[local_rank] = process
        self._host.workers[process] = Worker(context, local_rank, leave)
        self._host.environ_of(process).update(env)
        self._host.record.write("chaos", "node", node=self.number, **named([process]))
        self._kernel.spawn(process, lambda: self._work(process, leave))
        return process

    def _work(self, process: Process, leave: SimLeaveRequest) -> None:
        """Act as a worker: warm up, train, and end with a code, as `elastic_train.training.run.run` does."""
        self._kernel.sleep(self._host.shape.warm_s * self._host.pace.uniform(0.7, 1.3))
        try:
            ended = product.supervise(self._host.plan.config, leave, EPOCH_S + self._kernel.now)
            process.code = ended.exit_code if isinstance(ended, ElasticTrainError) else 0
        except ElasticTrainError as error:
            process.code = error.exit_code
            self._host.record.errors.append(
                f"{self._kernel.now:.3f} pid {process.pid}: {type(error).__name__}: {error}"
            )
        except RendezvousError as error:
            process.code = 1
            self._host.record.errors.append(
                f"{self._kernel.now:.3f} pid {process.pid}: {type(error).__name__}: {error}"
            )
        except RuntimeError as error:
            if not str(error).startswith("planted at "):
                raise
            process.code = 1
        self._kernel.kill(process)


def here(nodes: Sequence[Node], kernel: Kernel) -> Node:
    return nodes[kernel.process.node]


def start_worker(nodes: Sequence[Node], kernel: Kernel, *, local_rank_id: int, **_: object) -> Started:
    """Stand in for TorchElastic's function that starts a program; agents call it for a replacement worker."""
    return here(nodes, kernel).start_in_place(local_rank_id)


def kill(nodes: Sequence[Node], kernel: Kernel, pid: int, number: signal.Signals) -> None:
    """Stand in for `os.kill`, which agents use only for SIGKILL."""
    assert number is signal.SIGKILL, "an agent sends no other signal"
    here(nodes, kernel).kill_number(pid)
