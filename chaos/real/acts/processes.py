"""Faults of processes, by real signals: killed, asked to leave, started, frozen, slowed, crowded, launched twice."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from chaos.errors import RunError
from chaos.real.acts.effects import connected, running
from chaos.real.acts.job_view import JobView, Struck, targets
from chaos.services.neighbours import Crowd, Hungry
from chaos.services.torchrun_node import signal_all

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due
    from chaos.services.torchrun_node import Node

_STOPPED_S, _RUNS_S = 0.15, 0.05
"""A slowed worker gets a quarter of its time, in stops too short to count as a freeze."""
_NEIGHBOURS = 3
"""Busy programs on the core of a node's workers, which then get a fourth of it."""
_COMING_S = 30.0
"""Most seconds that a twin's kill waits for it to reach etcd, or a memory hog's for its memory."""
_LOOKING_S = 60.0
"""Most seconds for another job to start and find out whether one is running in its folder."""


def kill_worker(job: JobView, fault: Due) -> Struck | None:
    nodes = targets(job, fault)
    pids = [pid for node in nodes for pid in node.hit_worker(job.followed.pids, signal.SIGKILL)]
    return Struck(pids, nodes, "SIGKILL") if pids else None


def kill_node(job: JobView, fault: Due) -> Struck | None:
    return _kill(job, fault, targets(job, fault))


def kill_job(job: JobView, fault: Due) -> Struck | None:
    return _kill(job, fault, [node for node in job.nodes if node.is_up])


def _kill(job: JobView, fault: Due, nodes: list[Node]) -> Struck | None:
    found = [pid for node in nodes for pid in node.pids()]
    signal_all(found, signal.SIGKILL)
    pids = list(dict.fromkeys([*found, *(pid for node in nodes for pid in node.kill())]))
    return _ended(job, fault, nodes, pids, "SIGKILL")


def stop_node(job: JobView, fault: Due) -> Struck | None:
    nodes = targets(job, fault)
    return _ended(job, fault, nodes, [pid for node in nodes for pid in node.stop()], "SIGTERM")


def _ended(job: JobView, fault: Due, nodes: list[Node], pids: list[int], how: str) -> Struck | None:
    """Restart ended nodes after a while, or count them as lost until they are started."""
    if not pids:
        return None
    if fault.for_s is None:
        job.lost += nodes
        return Struck(pids, nodes, how)
    down, started = [(node, node.agent) for node in nodes], list[int]()

    def start_again() -> list[int] | None:
        # A stopping node may not be down yet, or be frozen; one that was hit again may be up already.
        started.extend(pid for node, agent in down if not node.is_up and node.agent == agent for pid in node.start())
        down[:] = [(node, agent) for node, agent in down if node.agent == agent]
        return None if down else started

    return Struck(pids, nodes, how, start_again)


def start_node(job: JobView, fault: Due) -> Struck | None:
    if fault.target == "lost" and not job.lost:
        raise RunError("no node is lost, so none can be started")
    node = targets(job, fault)[0]
    if node.is_up:
        return None  # still stopping, possibly frozen: do not wait here
    job.lost = [lost for lost in job.lost if lost is not node]
    pids = node.start()
    return Struck(pids, [node], effect=running(pids))


def freeze_worker(job: JobView, fault: Due) -> Struck | None:
    nodes = targets(job, fault)
    return _frozen(nodes, [pid for node in nodes for pid in node.hit_worker(job.followed.pids, signal.SIGSTOP)])


def freeze_node(job: JobView, fault: Due) -> Struck | None:
    nodes = targets(job, fault)
    return _frozen(nodes, [pid for node in nodes for pid in node.freeze()])


def freeze_agent(job: JobView, fault: Due) -> Struck | None:
    """Freeze the agent but none of its workers: it answers nobody, and does not see a worker die."""
    nodes = [node for node in targets(job, fault) if node.is_up]
    pids = [pid for node in nodes if (pid := node.agent) is not None]
    signal_all(pids, signal.SIGSTOP)
    return _frozen(nodes, pids)


def freeze_standby(job: JobView, fault: Due) -> Struck | None:
    """Freeze the process that workers are forked from, as a machine does that swaps it out."""
    nodes = targets(job, fault)
    pids = [pid for node in nodes if (pid := node.standby()) is not None]
    signal_all(pids, signal.SIGSTOP)
    return _frozen(nodes, pids)


def kill_standby(job: JobView, fault: Due) -> Struck | None:
    """Kill the standby process, as a machine does that is short of memory; no worker depends on it."""
    nodes = targets(job, fault)
    pids = [pid for node in nodes if (pid := node.standby()) is not None]
    signal_all(pids, signal.SIGKILL)
    return Struck(pids, nodes, "SIGKILL") if pids else None


def _frozen(nodes: list[Node], pids: list[int]) -> Struck | None:
    def thaw() -> list[int]:
        signal_all(pids, signal.SIGCONT)
        return pids

    return Struck(pids, nodes, "SIGSTOP", thaw) if pids else None


def slow_worker(job: JobView, fault: Due) -> Struck | None:
    """Stop a worker for most of the time, again and again."""
    nodes = targets(job, fault)
    pids = [pid for node in nodes for pid in node.hit_worker(job.followed.pids, signal.SIGSTOP)]
    if not pids:
        return None
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.wait(_STOPPED_S):
            signal_all(pids, signal.SIGCONT)
            if not is_over.wait(_RUNS_S):
                signal_all(pids, signal.SIGSTOP)

    slowing = threading.Thread(target=slow, name="slow_worker", daemon=True)
    slowing.start()

    def let_go() -> list[int]:
        is_over.set()
        slowing.join()
        signal_all(pids, signal.SIGCONT)
        return pids

    return Struck(pids, nodes, "SIGSTOP", let_go)


def slow_cpu(job: JobView, fault: Due) -> Struck | None:
    """Restrict a node's workers to one core, which they share with busy programs."""
    nodes = targets(job, fault)
    own = {pid for node in nodes for pid in node.pids()}
    workers = [pid for pid in job.followed.pids.values() if pid in own]
    if not workers:
        return None
    crowd = Crowd(workers, _NEIGHBOURS)

    def clear() -> list[int]:
        crowd.leave()
        return workers

    return Struck(workers, nodes, undo=clear, effect=crowd.has_bitten)


def memory_pressure(job: JobView, fault: Due) -> Struck | None:
    """Start a program that takes memory and memory bandwidth; all nodes on this machine share both."""
    nodes = targets(job, fault)
    if not nodes:
        return None
    hungry, until = Hungry(), time.monotonic() + _COMING_S

    def clear() -> list[int] | None:
        """End it once it has its memory, or time is up: that may take longer than a short fault."""
        if hungry.has_bitten() is None and hungry.is_there and time.monotonic() < until:
            return None
        hungry.leave()
        return []

    pids = [pid for node in nodes for pid in node.pids()]
    return Struck(pids, nodes, undo=clear, recorded={"bytes": hungry.num_bytes}, effect=hungry.has_bitten)


def start_twin(job: JobView, fault: Due) -> Struck | None:
    """Launch the job a second time, as an operator may who believes that it is gone."""
    nodes = targets(job, fault)
    if not nodes:
        return None  # there is no leader at the moment
    twin, until = nodes[0].twin(), time.monotonic() + _COMING_S
    endpoint = job.around.endpoint(nodes[0].number)
    assert endpoint is not None, "every job has an etcd"
    looks, seen = connected(twin.pids, {int(one.rpartition(":")[2]) for one in endpoint.split(",")}), list[str]()

    def came() -> str | None:
        if not seen and (proof := looks()) is not None:
            seen.append(proof)
        return seen[0] if seen else None

    def kill() -> list[int] | None:
        """Kill it once it has reached etcd, or time is up: its start takes longer than most faults."""
        return twin.kill() if came() or not twin.is_up or time.monotonic() > until else None

    return Struck(twin.start(), [], undo=kill, effect=came)


def twin_dir(job: JobView, fault: Due) -> Struck | None:
    """Launch the job's command under another run id: another job, which finds this one in its folder.

    The fault is over once the other job has ended by itself or claimed a term; until then it runs for at most a minute.
    """
    nodes = targets(job, fault)
    if not nodes:
        return None
    other, until = nodes[0].of_another_job(), time.monotonic() + _LOOKING_S

    def came() -> str | None:
        if other.code is not None:
            return f"the other job has ended with code {other.code}"
        claims = [path.name for path in (job.folder / "terms").glob("*.json") if other.run_id in path.read_text()]
        return f"the other job has claimed {claims[0]}" if claims else None

    def kill() -> list[int] | None:
        return other.kill() if came() or time.monotonic() > until else None

    return Struck(other.start(), [], undo=kill, effect=came)
