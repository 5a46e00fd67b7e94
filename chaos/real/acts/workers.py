"""Silent faults inside one worker: wrong numbers, a flipped bit, no free file descriptor.

A worker's computation is out of reach from outside. So a task of `chaos.tasks` looks for a file, named after the fault,
among its node's failpoints and acts on it; the first process that finds the file renames it.
"""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.real.acts.effects import gone
from chaos.real.acts.job_view import JobView, Struck, targets
from chaos.tasks.orders import done_by, give, withdraw

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due
    from chaos.services.torchrun_node import Node


_LEAVING_S = 60.0
"""Seconds for a node that fails its health check to leave: it has imports to do first."""


def nan_loss(job: JobView, fault: Due) -> Struck | None:
    """Make the loss of a node's next lane NaN."""
    return _by_a_task(job, fault, [])


def flip_gradient(job: JobView, fault: Due) -> Struck | None:
    """Flip a bit of the gradient of a node's next lane, before it is summed."""
    return _by_a_task(job, fault, [])


def flip_memory(job: JobView, fault: Due) -> Struck | None:
    """Make a process of a node flip a bit of its weights, if others hold the same ones; all of them end over it."""
    members = [*job.followed.pids.values()]
    return _by_a_task(job, fault, members) if len(members) > 1 else None


def _by_a_task(job: JobView, fault: Due, pids: list[int]) -> Struck | None:
    nodes = targets(job, fault)[:1]
    if not nodes or not give(job.around.points[nodes[0].number], fault.kind):
        return None
    folder, kind = job.around.points[nodes[0].number], fault.kind
    return Struck(pids, nodes, effect=lambda: done_by(folder, kind))


def unfit_node(job: JobView, fault: Due) -> Struck | None:
    """Kill a node, and restart it on a processor that computes wrongly, until that is replaced.

    It is replaced once the node has left by itself, or after a minute: starting takes longer than most faults.
    """
    nodes = [node for node in targets(job, fault)[:1] if node.is_up]
    if not nodes or not give(job.around.points[nodes[0].number], fault.kind):
        return None
    node, folder, kind = nodes[0], job.around.points[nodes[0].number], fault.kind
    until, killed, over = time.monotonic() + _LEAVING_S, node.kill(), list[str]()
    node.start()

    def came() -> str | None:
        """Return a proof that it computes wrongly, and its fate; that it was killed, if another fault came first."""
        if node.is_up and not over:
            return None
        said = done_by(folder, kind)
        return gone(killed)() if said is None else f"{said}; {over[0] if over else _left(node)}"

    def replace() -> list[int] | None:
        if node.is_up and time.monotonic() < until:
            return None
        withdraw(folder, kind)
        over.append(_left(node))
        left = node.kill()
        return [*left, *([] if node in job.lost else node.start())]

    return Struck(killed, nodes, "SIGKILL", replace, effect=came)


def _left(node: Node) -> str:
    return f"its node has ended with code {node.code}" if node.code is not None else "its node has not left"


def cap_fds(job: JobView, fault: Due) -> Struck | None:
    """Keep a worker from opening files or connections: all numbers below its limit are in use."""
    nodes = targets(job, fault)
    own = {pid for node in nodes for pid in node.pids()}
    victims = [pid for _, pid in sorted(job.followed.pids.items()) if pid in own][-1:]
    before = {pid: limits for pid in victims if (limits := _cap(pid)) is not None}

    def lift() -> list[int]:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        return [*before]

    return (
        Struck([*before], nodes, undo=lift, effect=lambda: next(filter(None, map(_full, before)), None))
        if before
        else None
    )


def _cap(pid: int) -> tuple[int, int] | None:
    """Set a process's limit to its lowest free number; return the previous limits, None if it has ended.

    Only the soft limit, as not even root may raise a hard one again everywhere; the process itself could raise it.
    """
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = _lowest_free(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
    except (ProcessLookupError, FileNotFoundError):
        return None
    return soft, hard


def _full(pid: int) -> str | None:
    """Return a proof that all descriptors below a process's limit are in use."""
    try:
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return f"process {pid} has all {limit} files open that it may" if _lowest_free(pid) >= limit else None
    except (ProcessLookupError, FileNotFoundError):
        return None


def _lowest_free(pid: int) -> int:
    used = {int(link.name) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return min(set(range(len(used) + 1)) - used)
