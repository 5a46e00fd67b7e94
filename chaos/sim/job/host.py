"""Simulated machine as the product sees it: plan, context, environment and the duration of work."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from chaos.sim.job.run_record import RunRecord
from chaos.sim.job.shape import make_plan
from chaos.sim.job.surroundings import Surroundings
from chaos.sim.machine.kernel import Killed, Process
from chaos.sim.machine.stdlib import host_of
from chaos.sim.modelled.state import ModelledState
from elastic_train.checkpoint.saving.save_thread import LEAST_S
from elastic_train.job.state import AppliedState
from elastic_train.system.preemption import LeaveRequest
from rendezvous.context import LiveContext


class SimLeaveRequest(LeaveRequest):
    """A request to leave without the signals that make one."""

    def __init__(self) -> None:
        self.is_set = self.is_late = self._is_droppable = False
        self.since_s = 0.0
        self._grace_s = None

    def ask(self, now: float) -> None:
        if not self.is_set:
            self.is_set, self.since_s = True, now


@dataclass(eq=False)
class Worker:
    """A worker, as its launcher started it."""

    context: LiveContext | None
    """None in `restart` mode, which passes everything in the environment."""
    local_rank: int
    leave: SimLeaveRequest
    state: ModelledState | AppliedState | None = None
    """Its training state, from construction until it dies."""
    is_loss_spoilt: bool = False
    """True if the loss of its next lane will be NaN."""


class Host:
    """The product's side of a simulated job; answers are for the process that asks."""

    def __init__(self, around: Surroundings, record: RunRecord, nonfinite: Collection[int] = ()) -> None:
        """`nonfinite` lists the steps, counted from 0, without a finite loss."""
        self.around, self.record, self._nonfinite = around, record, nonfinite
        self.kernel, self.shape = around.kernel, around.shape
        self.plan = make_plan(around.shape, around.data, record.take_witness, self._take_state)
        self.pace = around.draws("pace")
        self.workers: dict[Process, Worker] = {}
        self._environs: dict[Process, dict[str, str]] = {}

    def context(self) -> LiveContext | None:
        return self.workers[self.kernel.process].context

    def identity(self) -> dict[str, object]:
        """Return what identifies the process across nodes and over time, beyond its pid."""
        process = self.kernel.process
        return {"host": host_of(process.node), "boot": host_of(process.node), "born": process.born}

    def environ_of(self, process: Process) -> dict[str, str]:
        """Return the environment of a process, which it may change."""
        return self._environs.setdefault(process, {})

    def compute(self, num_lanes: int) -> None:
        """Advance time by a step's lanes; a stopped process makes no progress."""
        process = self.kernel.process
        left_s = self.shape.lane_s * num_lanes * process.slowness * self.pace.uniform(0.8, 1.4)
        while left_s > 0:
            stopped_s = process.stopped_s
            self.kernel.sleep(left_s)
            left_s = max(process.stopped_s - stopped_s, process.hangs_until - self.kernel.now)

    def end(self, code: int) -> None:
        """End the calling process with a code, as `os._exit` does."""
        process = self.kernel.process
        process.code = code
        self.kernel.kill(process)
        raise Killed

    def takes_loss_away(self, step: int) -> bool:
        """Return True if the loss of a lane of this step must be NaN; each injected fault counts once."""
        worker = self.workers[self.kernel.process]
        is_spoilt, worker.is_loss_spoilt = worker.is_loss_spoilt, False
        return is_spoilt or step in self._nonfinite

    def _take_state(self, state: ModelledState | AppliedState) -> None:
        """Remember a worker's state while it lives."""
        process = self.kernel.process
        worker = self.workers[process]
        worker.state = state
        process.at_death["state"] = lambda: setattr(worker, "state", None)

    def copy(self) -> None:
        """Advance time by a save's copy: often less than a step, sometimes more, never so slow that it is given up."""
        seconds = min(self.shape.lane_s * self.pace.choice((0.1, 1.0, 5.0)), LEAST_S / 2)
        self.kernel.sleep(seconds * self.kernel.process.slowness)
