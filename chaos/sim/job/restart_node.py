"""A machine in `restart` mode: torchrun's agent and our handler, round by round; only processes are modelled.

It runs `rendezvous.torchelastic.restart_handler.EtcdRendezvousHandler` under
`rendezvous.torchelastic.restart_agent.ElasticAgent`, hence TorchElastic's own loop: join a round, start a generation of
workers, poll it ten times a second, and end it for the next round. A worker trains in the one world that its
environment names, starting from the newest commit.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError as RoundError
from torch.distributed.elastic.rendezvous import RendezvousParameters

from chaos.sim.job.generation import STOP_GRACE_S, Generation
from chaos.sim.job.host import Host
from chaos.sim.job.live_node import RUN_ID, Node
from chaos.sim.machine.kernel import Kernel, Process
from chaos.sim.machine.stdlib import host_of
from elastic_train.launch.node import exit_code
from rendezvous.errors import RendezvousError
from rendezvous.torchelastic.conf import BACKEND, Conf
from rendezvous.torchelastic.entry_point import make_agent
from rendezvous.torchelastic.restart_handler import EtcdRendezvousHandler


class RestartNode(Node):
    """A machine whose workers form no worlds themselves.

    Its agent is two processes here: a signal ends the one that stands for the main thread, and the other does what
    torchrun does then.
    """

    def __init__(self, host: Host, number: int, run_id: str = RUN_ID) -> None:
        super().__init__(host, number, run_id)
        self._main: Process | None = None
        self._generation: Generation | None = None

    def live_agent(self) -> list[Process]:
        return [process for process in (self.agent, self._main) if process is not None and not process.is_dead]

    def stop(self) -> list[Process]:
        """Ask torchrun to stop, which passes that on to its workers."""
        hit, self._is_stopping = self.live_workers(), True
        self.look()
        return hit

    def start_generation(self, envs: Mapping[int, Mapping[str, str]]) -> Generation:
        """Start the workers of a round; the agent calls this in place of starting programs."""
        mine = self._host.environ_of(self._kernel.process)
        self.workers = {rank: self._spawn_worker(None, rank, {**mine, **env}) for rank, env in envs.items()}
        self._generation = Generation(self._host, self.workers)
        return self._generation

    def _watch_over(self) -> None:
        """Act as torchrun: make handler and agent, and end with the last round, an error, or on request."""
        agent, kernel, host = self._kernel.process, self._kernel, self._host
        self._watcher, self._main, self._generation = kernel.current, None, None
        agent.at_death["workers"] = self._kill_workers
        code = 1
        try:
            handler = self._make_handler()
        except RendezvousError as error:
            host.record.add_error(f"node {self.number}", error)
        else:
            main = self._main = host.around.process(self.number, "agent")
            main.at_death["agent"] = lambda: kernel.wake(self._watcher)  # type: ignore[arg-type]  # this very task
            kernel.spawn(main, lambda: self._run_rounds(main, handler))
            while not main.is_dead and not self._is_stopping:
                kernel.park()
            kernel.kill(main)
            if self._is_stopping and self._generation is not None:
                self._generation.close(signal.SIGTERM, STOP_GRACE_S)
            handler.node.leave()
            code = 0 if self._is_stopping else main.code or 0
        self._end(agent, code)

    def _run_rounds(self, main: Process, handler: EtcdRendezvousHandler) -> None:
        """Act as the agent's main thread."""
        shape = self._host.shape
        spec = WorkerSpec("default", shape.ranks, handler, entrypoint="train", max_restarts=shape.max_restarts)
        try:
            result = make_agent(spec, logs_specs=SimpleNamespace()).run()
            codes = [failure.exitcode for failure in result.failures.values()]
            main.code = exit_code(codes, has_failed=result.is_failed())
        except RoundError as error:
            main.code = 1
            self._host.record.errors.append(
                f"{self._kernel.now:.3f} node {self.number}: {type(error).__name__}: {error}"
            )
        self._kernel.kill(main)

    def _make_handler(self) -> EtcdRendezvousHandler:
        shape, conf, address = self._host.shape, Conf(), host_of(self.number)
        conf.ttl_s = shape.ttl_s
        limits = shape.min_nodes, shape.max_nodes
        params = RendezvousParameters(BACKEND, "etcd", self.run_id, *limits, local_addr=address)
        return EtcdRendezvousHandler(params, conf)

    def _kill_workers(self) -> None:
        """Workers die with their agent, whose main thread is a separate process here."""
        super()._kill_workers()
        if self._main is not None:
            self._kernel.kill(self._main)


def start_processes(
    nodes: Sequence[Node], kernel: Kernel, *, envs: Mapping[int, Mapping[str, str]], **_: object
) -> Generation:
    """Stand in for TorchElastic's function of this name; `envs` maps local rank to environment."""
    node = nodes[kernel.process.node]
    assert isinstance(node, RestartNode), "no other node has generations of workers"
    return node.start_generation(envs)
