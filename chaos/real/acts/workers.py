"""Faults inside one worker, of which nobody tells it: wrong numbers, a flipped bit, no room for one more open file.

What a worker computes cannot be reached from outside. So a task of `chaos.tasks` looks for a file that is named after
the fault in the failpoints of its node, and does what that asks for; the first process that finds it renames it.
"""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.real.acts.effects import gone
from chaos.real.acts.job_view import Act, JobView
from chaos.real.acts.outcome import Struck
from chaos.real.acts.targets import targets
from chaos.tasks.orders import done_by, give, withdraw

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due
    from chaos.services.torchrun_node import Node


_LEAVING_S = 60.0
"""A node whose machine fails its health check leaves some seconds after its start: it has imports to do before."""


def nan_loss(job: JobView, fault: Due) -> Struck | None:
    """Have the next lane of a node give a loss that is not a number."""
    return _by_a_task(job, fault, [])


def flip_gradient(job: JobView, fault: Due) -> Struck | None:
    """Have a bit of the gradient of a node's next lane flip, before it is added to anything."""
    return _by_a_task(job, fault, [])


def flip_memory(job: JobView, fault: Due) -> Struck | None:
    """Have a process of a node flip a bit of its weights, if others hold the same ones; all of them end over it."""
    members = [*job.followed.pids.values()]
    return _by_a_task(job, fault, members) if len(members) > 1 else None


def _by_a_task(job: JobView, fault: Due, pids: list[int]) -> Struck | None:
    nodes = targets(job, fault)[:1]
    if not nodes or not give(job.around.points[nodes[0].number], fault.kind):
        return None
    folder, kind = job.around.points[nodes[0].number], fault.kind
    return Struck(pids, nodes, effect=lambda: done_by(folder, kind))


def unfit_node(job: JobView, fault: Due) -> Struck | None:
    """Kill a node, and start it again on a processor that computes wrongly, until that is replaced.

    It is not replaced before the node has left by itself, for a minute: to start takes longer than most faults last.
    """
    nodes = [node for node in targets(job, fault)[:1] if node.is_up]
    if not nodes or not give(job.around.points[nodes[0].number], fault.kind):
        return None
    node, folder, kind = nodes[0], job.around.points[nodes[0].number], fault.kind
    until, killed, over = time.monotonic() + _LEAVING_S, node.kill(), list[str]()
    node.start()

    def came() -> str | None:
        """See that it computes wrongly, and what became of it; that it was killed, if another fault came before."""
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
    """Let a worker open no file and no connection more than it has: all numbers below its limit are in use."""
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
    """Set a process's limit to its lowest free number; return the limits before, None if it has ended.

    The soft limit, since not even root may raise a hard one again everywhere; the process could raise it by itself.
    """
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = _lowest_free(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
    except (ProcessLookupError, FileNotFoundError):
        return None
    return soft, hard


def _full(pid: int) -> str | None:
    """See that the kernel gives a process no further number: it has all that are below its limit."""
    try:
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return f"process {pid} has all {limit} files open that it may" if _lowest_free(pid) >= limit else None
    except (ProcessLookupError, FileNotFoundError):
        return None


def _lowest_free(pid: int) -> int:
    used = {int(link.name) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return min(set(range(len(used) + 1)) - used)


ACTS: dict[str, Act] = {act.__name__: act for act in (nan_loss, flip_gradient, flip_memory, unfit_node, cap_fds)}
