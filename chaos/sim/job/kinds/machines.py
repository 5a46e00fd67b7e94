"""Faults of processes and machines: killed, stopped, frozen, hung, slow, started twice, clock jumps."""

from __future__ import annotations

from collections.abc import Callable

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.job.live_node import RUN_ID
from chaos.sim.job.run_record import named
from chaos.sim.machine.kernel import Process
from rendezvous.membership.records import Keys

AWAY_S = 2.0
"""Time a machine takes to start again."""


def kill_worker(fleet: Fleet, fault: SimFault) -> list[Process]:
    hit = fleet.worker(fault)
    for process in hit:
        fleet.kernel.kill(process)
    return hit


def kill_node(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Kill agent and workers at once; restart them after a while."""
    return fleet.kill_node(fleet.node(fault), fault.for_s)


def private_storage(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Restart a node without its storage mount, on an empty folder; it gets the mount later."""
    number, storage = fleet.node(fault), fleet.around.storage
    is_bound = bool(fleet.around.etcd.show(Keys(RUN_ID).store).entries)
    if not is_bound or number in storage.private:
        return []  # the job may as well begin in this folder, or the mount is missing already
    return _come_back_wrong(fleet, fault, lambda: storage.isolate(number), lambda: storage.private.pop(number))


def other_limits(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Restart a node with another --nnodes than the others, until an operator notices that it is rejected."""
    node = fleet.nodes[fleet.node(fault)]
    if node.max_nodes != fleet.shape.max_nodes:
        return []

    def limit(max_nodes: int) -> None:
        node.max_nodes = max_nodes

    right = fleet.shape.max_nodes
    return _come_back_wrong(fleet, fault, lambda: limit(right + 1), lambda: limit(right))


def other_code(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Restart a node with another version of the package, until an operator installs the right one."""
    return _come_back_among(fleet, fault, fleet.around.other_code)


def wrong_address(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Restart a node with an unreachable address, such as a bridge's."""
    return _come_back_among(fleet, fault, fleet.around.net.refusing)


def unfit_node(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Restart a node on a processor that computes wrongly, until an operator replaces it.

    In `restart` mode workers start in a sealed world and examine nothing.
    """
    return [] if fleet.restarts else _come_back_among(fleet, fault, fleet.around.unfit)


def _come_back_among(fleet: Fleet, fault: SimFault, wrong: set[int]) -> list[Process]:
    """Restart a node as one of those with something wrong, unless it is one already."""
    number = fleet.node(fault)
    if number in wrong:
        return []
    return _come_back_wrong(fleet, fault, lambda: wrong.add(number), lambda: wrong.discard(number))


def _come_back_wrong(
    fleet: Fleet, fault: SimFault, spoil: Callable[[], object], mend: Callable[[], object]
) -> list[Process]:
    """Restart a node with something wrong, and again, repaired, after the fault's duration."""
    number = fleet.node(fault)
    hit = fleet.nodes[number].kill()
    if not hit:
        return []
    spoil()
    fleet.kernel.after(AWAY_S, lambda: fleet.start_again(number))

    def end() -> None:
        """Kill the workers that train with the fault, repair and restart."""
        ended = fleet.nodes[number].kill()
        mend()
        fleet.record.write("chaos", "undo", kind=fault.kind, node=number, pids=[process.pid for process in ended])
        fleet.start_again(number)

    fleet.kernel.after(AWAY_S + fault.for_s, end)
    fleet.keep_busy(AWAY_S + fault.for_s)
    return hit


def lose_node(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Remove a machine silently: connections stay open, ports do not refuse."""
    number = fleet.node(fault)
    fleet.around.net.silent.add(number)
    return fleet.kill_node(number, fault.for_s)


def kill_job(fleet: Fleet, fault: SimFault) -> list[Process]:
    return [process for number in range(len(fleet.nodes)) for process in fleet.kill_node(number, fault.for_s)]


def kill_rack(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Remove half of the machines at once, silently."""
    first, num_nodes = fleet.node(fault), fleet.shape.nodes
    hit = []
    for number in range(first, first + -(-num_nodes // 2)):
        fleet.around.net.silent.add(number % num_nodes)
        hit += fleet.kill_node(number % num_nodes, fault.for_s)
    return hit


def stop_node(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Send SIGTERM to all workers of a node; restart it after a while."""
    return fleet.stop_node(fleet.node(fault), fault.for_s)


def flap_node(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Stop and restart a node three times."""
    number = fleet.node(fault)
    for turn in (1, 2):
        fleet.kernel.after(2 * turn * fault.for_s, lambda: _flap(fleet, number, fault.for_s))
    return fleet.stop_node(number, fault.for_s)


def _flap(fleet: Fleet, number: int, for_s: float) -> None:
    if hit := fleet.stop_node(number, for_s):
        fleet.record.write("chaos", "undo", kind="flap_node", node=number, **named(hit))


def scale_down(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Stop half of the nodes; they return much later: the job shrinks and grows again."""
    first, num_nodes = fleet.node(fault), fleet.shape.nodes
    hit = []
    for number in range(first, first + num_nodes // 2):
        hit += fleet.stop_node(number % num_nodes, 5 * fault.for_s)
    return hit


def start_twin(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Start the same job a second time under the same run id, and stop it after a while."""
    fleet.start_guests(5 * fault.for_s)
    return fleet.all_workers()


def twin_dir(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Start another job, with its own run id, in the job's folder."""
    return [] if fleet.restarts else fleet.start_other_job(fault.for_s)


def freeze_worker(fleet: Fleet, fault: SimFault) -> list[Process]:
    hit = fleet.worker(fault)
    fleet.freeze(hit, fault.for_s)
    return hit


def freeze_node(fleet: Fleet, fault: SimFault) -> list[Process]:
    hit = fleet.nodes[fleet.node(fault)].live_workers()
    fleet.freeze([*hit, *fleet.nodes[fleet.node(fault)].live_agent()], fault.for_s)
    return hit


def freeze_agent(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Freeze only the agent; its workers continue if they can."""
    hit = fleet.nodes[fleet.node(fault)].live_agent()
    fleet.freeze(hit, fault.for_s)
    return hit


def hang_worker(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Stop a worker's computation for a while; its threads renew its lease, and its saves continue."""
    hit = fleet.worker(fault)
    for process in hit:
        process.hangs_until = fleet.kernel.now + fault.for_s
    return hit


def slow_worker(fleet: Fleet, fault: SimFault) -> list[Process]:
    hit = fleet.worker(fault)
    for process in hit:
        process.slowness = 10.0
        fleet.kernel.after(fault.for_s, lambda process=process: setattr(process, "slowness", 1.0))  # type: ignore[misc]
    return hit


def jump_clock(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Set a node's wall clock by minutes, forward or back."""
    hit = fleet.nodes[fleet.node(fault)].live_workers()
    for process in hit:
        process.skew_s += 30.0 * (fault.for_s if fault.other % 2 else -fault.for_s)
    return hit


def skew_clocks(fleet: Fleet, fault: SimFault) -> list[Process]:
    """Shift a node's clock for good, forward or back, by the fault's duration."""
    number, ahead_s = fleet.node(fault), fault.for_s if fault.other % 2 else -fault.for_s
    fleet.kernel.skews[number] = ahead_s
    hit = fleet.nodes[number].live_workers()
    for process in hit:
        process.skew_s += ahead_s
    return hit


ACTS = (
    *(
        kill_worker,
        kill_node,
        private_storage,
        other_limits,
        other_code,
        wrong_address,
        unfit_node,
        lose_node,
        kill_rack,
        kill_job,
        stop_node,
        flap_node,
        scale_down,
    ),
    *(
        freeze_worker,
        freeze_node,
        freeze_agent,
        hang_worker,
        slow_worker,
        jump_clock,
        skew_clocks,
        start_twin,
        twin_dir,
    ),
)
