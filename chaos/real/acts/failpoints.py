"""Faults at failpoints: armed on a node, they happen when one of its processes gets there, and are recorded then."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.real.acts.effects import came_there
from chaos.real.acts.job_view import JobLog, Struck, targets
from chaos.services.torchrun_node import signal_all
from elastic_train.system.failpoints import arm, disarm

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due
    from chaos.services.torchrun_node import Node

PATIENCE_S = 5.0
"""Seconds within which a healthy job must reach a failpoint before the fault is given up."""
_AGAIN_S = 0.05
"""Least seconds between searches for a node's processes, which take milliseconds."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A fault not yet armed on these nodes, where another is armed; no nodes while none has its role."""

    fault: Due
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class _Armed:
    fault: Due
    node: Node
    folder: Path
    since: float
    name: str


@dataclass(slots=True)
class Points:
    """Armed faults that have not happened; at most one per failpoint and node.

    Listed faults are armed as soon as possible, or recorded as missed; a soak draws enough to do without.
    """

    _armed: list[_Armed] = field(default_factory=list)
    _asked: list[_Asked] = field(default_factory=list)
    _again_at: float = 0.0

    def arm(self, job: JobLog, fault: Due) -> None:
        """Arm a failpoint on the fault's nodes: now, or once a node has its role and the failpoint is free."""
        self._asked.append(_Asked(fault, []))
        self._ask(job)

    def _ask(self, job: JobLog) -> None:
        """Arm, in order, whatever can be armed now."""
        asked, self._asked, self._again_at = self._asked, [], time.monotonic() + _AGAIN_S
        for each in asked:
            nodes = each.nodes or targets(job, each.fault)
            left = [node for node in nodes if not self._has_armed(job, each.fault, node)]
            if (left or not nodes) and job.scenario.soak is None:
                self._asked.append(_Asked(each.fault, left))

    def _has_armed(self, job: JobLog, fault: Due, node: Node) -> bool:
        """Arm a fault on a node and report it; return False if another is armed there, which would be lost."""
        assert fault.point is not None, "it is due at one"
        folder, name = job.around.points[node.number], fault.point.name
        if any((armed.folder, armed.name) == (folder, name) for armed in self._armed):
            return False
        only = None
        if fault.point.worker is not None:
            own = set(node.pids())
            workers = [pid for _, pid in sorted(job.followed.pids.items()) if pid in own]
            if len(workers) <= fault.point.worker:
                return False
            only = workers[fault.point.worker]
        arm(folder, name, fault.kind, fault.point.nth, only)
        self._armed.append(_Armed(fault, node, folder, time.time(), name))
        return True

    def look(self, job: JobLog) -> None:
        """Record faults that have happened, and arm those that could not be armed before."""
        for armed in list(self._armed):
            if not (armed.folder / armed.name).exists():
                self._armed.remove(armed)
                self._note(job, armed)
        if self._asked and time.monotonic() >= self._again_at:
            self._ask(job)

    def are_over(self, job: JobLog) -> bool:
        """Return True if no fault is pending; those that a healthy job did not reach in time are taken back first."""
        for armed in [armed for armed in self._armed if time.time() > armed.since + job.come_within_s]:
            self._take_back(job, armed)
        return not self._armed

    def give_up(self, job: JobLog) -> None:
        """Take back all pending faults at the job's end, and record those that could not be armed."""
        for armed in list(self._armed):
            self._take_back(job, armed)
        for asked in self._asked:
            for node in asked.nodes:
                _record_missed(
                    job, asked.fault, node, f"another fault waited there, on node {node.number}, until the job's end"
                )
            if not asked.nodes:
                why = f"no node was '{asked.fault.target}' until the job's end: list it before what ends that world"
                _record_missed(job, asked.fault, None, why)
        self._asked.clear()

    def _take_back(self, job: JobLog, armed: _Armed) -> None:
        self._armed.remove(armed)
        if disarm(armed.folder, armed.name):
            assert armed.fault.point is not None, "it was armed at one"
            often = "" if armed.fault.point.nth == 1 else f" {armed.fault.point.nth} times"
            _record_missed(job, armed.fault, armed.node, f"no process of node {armed.node.number} came there{often}")
        else:
            self._note(job, armed)

    def _note(self, job: JobLog, armed: _Armed) -> None:
        """Record a fault, at the time its file was renamed, just before it happened."""
        taken = sorted(armed.folder.glob(f"{armed.name}.[0-9]*"), key=lambda path: path.stat().st_ctime)
        assert taken, "nothing else takes it away"
        at, pid = taken[-1].stat().st_ctime, int(taken[-1].suffix[1:])
        for path in taken:
            path.unlink()
        is_stop = armed.fault.kind == "stop"
        how = {"stop": "SIGSTOP", "kill": "SIGKILL"}.get(armed.fault.kind)
        # A process that stops may not be stopped yet; one neither killed nor stopped shows nothing else.
        effect = None if how else came_there(armed.name)
        job.note(armed.fault, Struck([pid], [armed.node], how, effect=effect), at)
        if is_stop:

            def go_on() -> list[int]:
                signal_all([pid], signal.SIGCONT)
                return [pid]

            job.undo_after(armed.fault.for_s or 0.0, armed.fault.kind, go_on)


def _record_missed(job: JobLog, fault: Due, node: Node | None, why: str) -> None:
    assert fault.point is not None, "others come when they are due"
    job.record("missed", kind=fault.kind, point=fault.point.name, node=node.number if node else None, why=why)
