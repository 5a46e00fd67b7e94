"""Faults at failpoints: armed on a node, they come when a process of it comes to the place, and are recorded then."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.acts.done import Done, targets
from chaos.node import signal_all
from elastic_train.failpoints import arm, disarm

if TYPE_CHECKING:
    from chaos.local import Job
    from chaos.node import Node
    from chaos.schedule import Due

PATIENCE_S = 5.0
"""How long a healthy job may take to come to a place before that is given up."""


@dataclass(frozen=True, slots=True)
class _Armed:
    fault: Due
    node: Node
    folder: Path
    since: float
    name: str


@dataclass(slots=True)
class Points:
    """What is armed, and has not come yet; at each place of a node one fault at most."""

    _armed: list[_Armed] = field(default_factory=list)

    def arm(self, job: Job, fault: Due) -> None:
        """Arm a failpoint on the fault's node; nothing if nobody has its role."""
        assert fault.point is not None, "it is due at one"
        nodes = targets(job, fault)
        for node in nodes:
            folder = job.around.points[node.number]
            if any((armed.folder, armed.name) == (folder, fault.point.name) for armed in self._armed):
                continue  # one that waits there would be lost, and this one be taken for it
            arm(folder, fault.point.name, fault.kind, fault.point.nth)
            self._armed.append(_Armed(fault, node, folder, time.time(), fault.point.name))

    def look(self, job: Job) -> None:
        """Record what has come."""
        for armed in list(self._armed):
            if not (armed.folder / armed.name).exists():
                self._armed.remove(armed)
                self._note(job, armed)

    def are_over(self, job: Job) -> bool:
        """Say whether all has come; a job that is well and does not come to a place does not hold others up."""
        for armed in [armed for armed in self._armed if time.time() > armed.since + PATIENCE_S]:
            self._take_back(job, armed)
        return not self._armed

    def give_up(self, job: Job) -> None:
        """Take back all that has not come, at the end of the job."""
        for armed in list(self._armed):
            self._take_back(job, armed)

    def _take_back(self, job: Job, armed: _Armed) -> None:
        self._armed.remove(armed)
        if disarm(armed.folder, armed.name):
            job.record("missed", kind=armed.fault.kind, point=armed.name, node=armed.node.number)
        else:
            self._note(job, armed)

    def _note(self, job: Job, armed: _Armed) -> None:
        """Record a fault with the time at which its file was renamed, which is just before it came."""
        taken = sorted(armed.folder.glob(f"{armed.name}.[0-9]*"), key=lambda path: path.stat().st_ctime)
        assert taken, "nobody else takes it away"
        at, pid = taken[-1].stat().st_ctime, int(taken[-1].suffix[1:])
        for path in taken:
            path.unlink()
        is_stop = armed.fault.kind == "stop"
        how = {"stop": "SIGSTOP", "kill": "SIGKILL"}.get(armed.fault.kind)
        job.note(armed.fault, Done([pid], [armed.node], how), at)
        if is_stop:

            def go_on() -> list[int]:
                signal_all([pid], signal.SIGCONT)
                return [pid]

            job.undo_after(armed.fault.for_s or 0.0, armed.fault.kind, go_on)


def folders(folder: Path, count: int) -> list[Path]:
    """Make the folders in which the failpoints of each node are armed."""
    made = [folder / "failpoints" / str(number) for number in range(count)]
    for path in made:
        path.mkdir(parents=True, exist_ok=True)
    return made
