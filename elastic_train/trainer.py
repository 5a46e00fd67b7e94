"""The training loop: lane by lane to a sum, one update, one record, and at every boundary the same three questions.

Everything that depends on where the run happens (ranks, files, storage, tracker) is in the `Session` that the loop is
given. Between the gradient sum's return and the next step's start the applied state moves from s to s+1; a fault
anywhere else leaves it at s.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic_train.coverage import CoverageSums
from elastic_train.data.loader import LaneBatch
from elastic_train.lanes import lane_seed
from elastic_train.reduction import gather_lane_table, tree_sum
from elastic_train.session import Session

_LEAVE, _COMMIT = 1, 2  # flags that ride on the lane table


class Outcome(enum.Enum):
    """How a loop ended; the value is what histories and results call it."""

    DONE = "done"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the lanes of one step add up to, equal on every rank."""

    loss: float
    weight: float
    coverage: CoverageSums
    flags: int

    @property
    def divisor(self) -> float:
        return self.weight or 1.0


def train(session: Session) -> Outcome:
    """Train from the session's state to its last step, or until told to leave; commits before it returns."""
    state = session.state
    for lanes in session.steps():
        started = time.perf_counter()
        sums = compute_step(session, lanes)
        cursor = session.plan.order.advance(state.cursor, session.plan.micro_batch)
        norm = state.apply(cursor, sums.coverage)
        session.record_step(sums.loss / sums.divisor, norm, sums.coverage.count, time.perf_counter() - started)

        is_last = state.step == session.plan.total_steps
        if is_last or session.is_validation_due():
            session.validate()
        if is_last or sums.flags or session.is_commit_due():
            session.commit()
        if sums.flags & _LEAVE and not is_last:
            return Outcome.PREEMPTED
    return Outcome.DONE


def compute_step(session: Session, lanes: Sequence[LaneBatch]) -> StepSums:
    """Run forward and backward of this rank's lanes and leave the whole step's mean gradient in the parameters."""
    flags = _LEAVE * session.leave.is_set + _COMMIT * session.is_commit_overdue()
    gradients = session.gradients
    gradients.begin(session.lanes)
    rows = {batch.lane: [*_run_lane(session, batch), flags] for batch in lanes}
    sums = _fold(gather_lane_table(session.world.group, session.plan.num_lanes, rows))
    gradients.finish(sums.divisor)
    return sums


def _run_lane(session: Session, batch: LaneBatch) -> tuple[float, float, int, int, int]:
    """Add one lane's gradient; return its loss sum, weight, and coverage sums. A lane without samples adds zero."""
    with session.gradients.lane(batch.lane):
        if batch.tensors is None:
            return 0.0, 0.0, 0, 0, 0
        torch.manual_seed(lane_seed(session.plan.config.run.seed, session.state.step, batch.lane))
        with session.autocast():
            loss = session.plan.task.loss(session.state.model, session.to_device(batch.tensors))
        torch.autograd.backward(session.state.scaler.scale(loss.total))
    coverage = CoverageSums.of_ids(batch.ids)
    return float(loss.total.detach()), loss.weight, coverage.count, coverage.sum_a, coverage.sum_b


def _fold(table: Sequence[Sequence[float | int]]) -> StepSums:
    """Add the lanes' rows: floats along the tree, integers in any order."""
    coverage, flags = CoverageSums(), 0
    for row in table:
        coverage += CoverageSums(int(row[2]), int(row[3]), int(row[4]))
        flags |= int(row[5])
    loss, weight = (tree_sum([float(row[place]) for row in table]) for place in (0, 1))
    return StepSums(loss, weight, coverage, flags)
