"""The nodes of a simulated job, and what faults do to them: kill, stop, freeze, restart."""

from __future__ import annotations

from chaos.sim.job.fault import SimFault
from chaos.sim.job.host import Host, Worker
from chaos.sim.job.live_node import RUN_ID, Node
from chaos.sim.job.restart_node import RestartNode
from chaos.sim.job.run_record import named
from chaos.sim.machine.kernel import Process

OTHER_RUN_ID = "other"
"""Run id of the other job that is started in the simulated job's folder."""


class Fleet:
    """All nodes of a job; `busy_until` is when all pending faults are over."""

    def __init__(self, host: Host) -> None:
        self.around, self.record, self.shape, self.kernel = host.around, host.record, host.shape, host.kernel
        self._host = host
        self.nodes = [self._make_node(number) for number in range(host.shape.nodes)]
        self.busy_until = 0.0

    @property
    def restarts(self) -> bool:
        """True if a fault restarts all processes of a world from a commit."""
        return self.shape.recovery == "restart"

    # Targets of faults.

    def node(self, fault: SimFault) -> int:
        if fault.node >= 0:
            return fault.node % self.shape.nodes
        leader = self.record.leader
        return leader.node if leader is not None else 0

    def worker(self, fault: SimFault) -> list[Process]:
        """Return the worker that a fault targets, if it lives."""
        leader = self.record.leader
        if fault.node < 0 and leader is not None:
            return [] if leader.is_dead else [leader]
        process = self.nodes[self.node(fault)].workers.get(fault.rank % self.shape.ranks)
        return [] if process is None or process.is_dead else [process]

    def member(self, fault: SimFault) -> list[Process]:
        """Return the process that holds the worker's lease: the agent's in `restart` mode."""
        hit = self.worker(fault)
        return [agent for process in hit for agent in self.nodes[process.node].live_agent()] if self.restarts else hit

    def all_workers(self) -> list[Process]:
        return [process for node in self.nodes for process in node.live_workers()]

    def worker_of(self, process: Process) -> Worker:
        return self._host.workers[process]

    # Operations on nodes.

    def freeze(self, processes: list[Process], for_s: float) -> None:
        for process in processes:
            self.kernel.pause(process)
            self.nodes[process.node].look()
            self.kernel.after(for_s, lambda process=process: self.kernel.resume(process))  # type: ignore[misc]
        self.keep_busy(for_s)

    def kill_node(self, number: int, for_s: float) -> list[Process]:
        hit = self.nodes[number].kill()
        self._start_after(number, for_s)
        return hit

    def stop_node(self, number: int, for_s: float) -> list[Process]:
        hit = self.nodes[number].stop()
        self._start_after(number, for_s)
        return hit

    def start_guests(self, for_s: float) -> None:
        """Start a second set of nodes under the same run id, and kill it after `for_s`."""
        first = self.shape.nodes
        self.nodes += [self._make_node(number) for number in range(len(self.nodes), 2 * first)]
        self._visit(self.nodes[first : 2 * first], "start_twin", for_s)

    def start_other_job(self, for_s: float) -> list[Process]:
        """Start a second set of nodes with another run id, kill it after `for_s`, and return its agents."""
        first = max(len(self.nodes), 2 * self.shape.nodes)  # lower numbers belong to twins
        self.nodes += [self._make_node(number) for number in range(len(self.nodes), first)]
        others = [self._make_node(first + place, OTHER_RUN_ID) for place in range(self.shape.nodes)]
        self.nodes += others
        self._visit(others, "twin_dir", for_s)
        return [agent for node in others for agent in node.live_agent()]

    def start_again(self, number: int) -> None:
        """Restart a node that a fault stopped."""
        if not self.nodes[number].is_up:
            self.record.write("chaos", "undo", kind="kill_node", node=number, pids=[])
        self.start_node(number)

    def start_node(self, number: int) -> None:
        """Start a node, unless it is up or the job is done."""
        if not self.record.is_done:
            self.nodes[number].start()

    def keep_busy(self, for_s: float) -> None:
        self.busy_until = max(self.busy_until, self.kernel.now + for_s)

    def _visit(self, guests: list[Node], kind: str, for_s: float) -> None:
        for guest in guests:
            self.start_node(guest.number)
            self.kernel.after(for_s, lambda guest=guest: self._end_guest(guest, kind))  # type: ignore[misc]
        self.keep_busy(for_s)

    def _end_guest(self, node: Node, kind: str) -> None:
        self.record.write("chaos", "undo", kind=kind, node=node.number, **named(node.live_workers()))
        node.kill()

    def _start_after(self, number: int, for_s: float) -> None:
        self.kernel.after(for_s, lambda: self.start_again(number))
        node = self.nodes[number]
        node.away_until = max(node.away_until, self.kernel.now + for_s)
        self.keep_busy(for_s)

    def _make_node(self, number: int, run_id: str = RUN_ID) -> Node:
        return (RestartNode if self.restarts else Node)(self._host, number, run_id)
