"""A machine of the simulated world: an agent that watches over workers, as `rendezvous.torchelastic.live_agent` does.

A worker runs `elastic_train.training.supervisor.supervise`, the whole of the product's loop. The agent is modelled: it
starts workers, has the product bury the dead, starts others in their place, and ends with the last of them; workers die
with it. What it is in `restart` mode is in `chaos.sim.job.restart_node`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from chaos.sim.job.host import Host, SimLeaveRequest, Worker
from chaos.sim.job.run_record import named
from chaos.sim.machine.etcd import EtcdClient
from chaos.sim.machine.kernel import EPOCH_S, Process, Task
from chaos.sim.machine.meeting import agent_port
from chaos.sim.machine.stdlib import host_of
from elastic_train.errors import CorruptError, ElasticTrainError
from elastic_train.training import supervisor as product
from rendezvous.context import LiveContext
from rendezvous.errors import RendezvousError
from rendezvous.membership.records import Keys
from rendezvous.torchelastic.bound_agent import FINAL_CODES
from rendezvous.torchelastic.live_agent import LEAVING_CODES
from rendezvous.torchelastic.live_handler import LiveRendezvousHandler

RUN_ID = "sim"
LOOK_S = 0.1
"""How long an agent takes to see that a worker has ended."""


class Node:
    """A machine, up or not."""

    def __init__(self, host: Host, number: int, run_id: str = RUN_ID) -> None:
        self.number, self.run_id = number, run_id
        self.agent: Process | None = None
        self.workers: dict[int, Process] = {}
        self.away_until = self.down_for_s = 0.0
        self.max_nodes = host.shape.max_nodes
        """As its --nnodes has it; other nodes turn it away if theirs differs."""
        self.code: int | None = None
        """What it ended with, None while it has not."""
        self._host, self._kernel = host, host.kernel
        self._ended: list[Process] = []
        self._watcher: Task | None = None
        self._is_stopping = False

    @property
    def is_up(self) -> bool:
        return self.agent is not None and not self.agent.is_dead

    @property
    def would_end_alike(self) -> bool:
        """Whether its exit code says that starting it again is in vain, and nobody has mended what was wrong."""
        around = self._host.around
        if self.code == CorruptError.exit_code and around.data.is_own(self.number):
            return False  # its copy can be restored, and is when it is started again
        return self.code in FINAL_CODES and not around.storage.is_mended(self.number)

    def live_workers(self) -> list[Process]:
        return [process for process in self.workers.values() if not process.is_dead]

    def live_agent(self) -> list[Process]:
        return [self.agent] if self.agent is not None and not self.agent.is_dead else []

    def start(self) -> None:
        """Start the agent, unless it is up."""
        if self.is_up:
            return
        self._host.around.net.silent.discard(self.number)
        if self.code == CorruptError.exit_code:
            self._host.around.data.restore(self.number)
        self.agent = self._host.around.process(self.number, "agent")
        self.workers, self._ended, self._is_stopping, self.code = {}, [], False, None
        self._kernel.spawn(self.agent, self._watch_over)

    def kill(self) -> list[Process]:
        hit = [*self.live_workers(), *self.live_agent()]
        for process in hit:
            self._kernel.kill(process)
        return hit

    def stop(self) -> list[Process]:
        """Ask all workers to leave; none is started in another's place any more."""
        hit, self._is_stopping = self.live_workers(), True
        for process in hit:
            self._host.workers[process].leave.ask(self._kernel.now)
        return hit

    def _watch_over(self) -> None:
        """Be the agent: start workers, bury the dead, start others, and end with the last of them."""
        agent, host = self._kernel.process, self._host
        shape = host.shape
        agent.at_death["workers"] = self._kill_workers
        node = f"{host_of(self.number)}-{agent.pid}-{agent.born:.6f}"
        context = LiveContext(
            endpoints=("etcd",),
            run_id=self.run_id,
            node=node,
            host=host_of(self.number),
            address=host_of(self.number),
            agent=agent_port(host.around.net, node),
            min_nodes=shape.min_nodes,
            max_nodes=self.max_nodes,
            ttl_s=shape.ttl_s,
            last_call_s=2.0,
            timeout_s=900.0,
        )
        undertaker = SimpleNamespace(
            _keys=Keys(self.run_id), _etcd=EtcdClient(host.around.etcd, agent), node=context.node
        )
        for local_rank in range(shape.ranks):
            self._start_worker(context, local_rank)
        self._watcher = self._kernel.current
        codes: list[int] = []
        while len(codes) < shape.ranks:
            if not self._ended:
                self._kernel.park()
            self._kernel.sleep(LOOK_S)
            for worker in [worker for worker in self._ended if worker in self.workers.values()]:
                self._ended.remove(worker)
                local_rank = host.workers[worker].local_rank
                code = -9 if worker.code is None else worker.code
                if code != 0:
                    LiveRendezvousHandler.bury(undertaker, local_rank)  # type: ignore[arg-type]  # all that it uses
                if code == 0 or self._is_stopping or code in LEAVING_CODES or code in FINAL_CODES:
                    codes.append(code)
                else:
                    self._start_worker(context, local_rank)
        worst = max(codes)
        self._end(agent, 0 if self._is_stopping or worst in LEAVING_CODES else worst)

    def _end(self, agent: Process, code: int) -> None:
        self.code = code
        self._host.record.write("chaos", "exit", node=self.number, code=code)
        self._kernel.kill(agent)

    def _kill_workers(self) -> None:
        """Workers die with their agent."""
        for worker in self.workers.values():
            self._kernel.kill(worker)

    def _start_worker(self, context: LiveContext, local_rank: int) -> None:
        env = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self._host.shape.ranks)}
        process = self._spawn_worker(context, local_rank, env)
        process.at_death["agent"] = lambda: self._end_worker(process)

    def _spawn_worker(self, context: LiveContext | None, local_rank: int, env: Mapping[str, str]) -> Process:
        process = self._host.around.process(self.number, "worker")
        leave = SimLeaveRequest()
        self.workers[local_rank] = process
        self._host.workers[process] = Worker(context, local_rank, leave)
        self._host.environ_of(process).update(env)
        self._host.record.write("chaos", "node", node=self.number, **named([process]))
        self._kernel.spawn(process, lambda: self._work(process, leave))
        return process

    def _end_worker(self, process: Process) -> None:
        self._ended.append(process)
        if self._watcher is not None:
            self._kernel.wake(self._watcher)

    def _work(self, process: Process, leave: SimLeaveRequest) -> None:
        """Be a worker: warm up, train, end with a code, as `elastic_train.training.run.run` does."""
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
