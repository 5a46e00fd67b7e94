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
from functools import reduce
from operator import and_, or_

import numpy as np
import torch

from elastic_train.core.accounting import ranges_of
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lanes import lane_seed
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.parallel.gradient_sum import gather_lane_table, tree_sum
from elastic_train.system.failpoints import reach
from elastic_train.training.session import Session

_WORD = 1 << 64
_LEAVE, _COMMIT, _GROW, _BUSY, _GIVE_UP, _UNREADABLE = 1, 2, 4, 8, 16, 32  # flags that ride on the lane table


class Outcome(enum.Enum):
    """How a loop ended; the value is what histories and results call it.

    PREEMPTED: all were told to leave, or the world cannot go on without those who were. LEFT: this rank was, and the
    others go on. REGROUP: the world ends to make room, or because somebody left it.
    """

    DONE = "done"
    PREEMPTED = "preempted"
    LEFT = "left"
    REGROUP = "regroup"


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the lanes of one step add up to, equal on every rank."""

    loss: float
    weight: float
    coverage: CoverageSums
    num_left_out: int
    num_truncated: int
    any_flags: int
    all_flags: int

    @property
    def is_unreadable(self) -> bool:
        """Say whether a rank could not read a sample of the step, which must not be applied then."""
        return bool(self.any_flags & _UNREADABLE)

    @property
    def divisor(self) -> float:
        return self.weight or 1.0


def train_steps(session: Session) -> Outcome:
    """Train from the session's state to its last step, or until the world ends; a job that ends is committed."""
    state = session.state
    for lanes in session.steps():
        started = time.perf_counter()
        sums, flags = compute_step(session, lanes)
        if sums.is_unreadable:
            session.quarantine(lanes)
            continue
        cursor = session.plan.order.advance(state.cursor, session.plan.micro_batch)
        session.await_staging()
        reach("apply")
        account = state.reached.account.advance(state.step, session.holes, sums.num_left_out, sums.num_truncated)
        norm = state.apply(cursor, sums.coverage, session.world.term, account)
        reach("applied")
        seconds = time.perf_counter() - started
        session.record_step(sums.loss / sums.divisor, norm, sums.coverage.count, sums.num_left_out, seconds)

        if state.step == session.plan.total_steps:
            break
        if session.is_validation_due():
            session.validate()
        session.note_saves()
        end = _end(session, flags, sums)
        if end is Outcome.PREEMPTED:
            session.commit_or_fail()
        elif end is None and _is_time_to_commit(session, sums):
            session.commit(is_busy=bool(sums.any_flags & _BUSY))
        if end is not None:
            return end
    session.validate()
    session.commit_or_fail()
    return Outcome.DONE


def _flags(session: Session) -> int:
    """Return what this rank tells the others with the step that it has computed its lanes of."""
    flags = _LEAVE * session.leave.is_set + _GROW * session.worlds.wants_to_grow() + _BUSY * session.saves.is_busy
    return flags + _COMMIT * session.is_commit_overdue() + _GIVE_UP * session.is_saving_hopeless()


def _is_time_to_commit(session: Session, sums: StepSums) -> bool:
    """Say whether a commit is due behind this step; one that is overdue stays so until no rank is busy."""
    return session.is_commit_due() or sums.any_flags & (_COMMIT | _BUSY) == _COMMIT


def _end(session: Session, flags: int, sums: StepSums) -> Outcome | None:
    """Say whether the world ends behind this step, alike on every rank; None if it goes on."""
    if sums.any_flags & _GIVE_UP:
        raise session.saves_failed()
    if sums.all_flags & _LEAVE or (sums.any_flags & _LEAVE and not session.worlds.is_live):
        return Outcome.PREEMPTED
    if flags & _LEAVE:
        return Outcome.LEFT
    return Outcome.REGROUP if sums.any_flags & (_LEAVE | _GROW) else None


def compute_step(session: Session, lanes: Sequence[LaneBatch]) -> tuple[StepSums, int]:
    """Run forward and backward of this rank's lanes and leave the whole step's mean gradient in the parameters.

    Returns what the lanes add up to, and what this rank has told the others. Where a rank cannot read a sample of the
    step, all learn of it together, and the gradient is left unfinished.
    """
    gradients = session.gradients
    gradients.begin(session.lanes)
    losses = {batch.lane: _run_lane(session, batch) for batch in lanes}
    # As late as can be: who is told to leave, or comes, in the midst of a long step need not wait for the next one.
    flags = _flags(session) | _UNREADABLE * any(batch.unreadable for batch in lanes)
    rows: dict[int, list[float | int]] = {
        batch.lane: [*losses[batch.lane], 0, 0, 0, batch.num_left_out, batch.num_truncated, flags] for batch in lanes
    }
    coverage = _coverage_of(lanes)
    rows[session.lanes.start][2:5] = coverage.count, coverage.sum_a, coverage.sum_b  # of all of this rank's lanes
    if session.plan.config.run.forensic:
        _keep_ids(session, lanes)
    reach("reduce")
    sums = _fold(gather_lane_table(session.world.group, session.plan.num_lanes, rows))
    if not sums.is_unreadable:
        reach("exchange")
        gradients.finish(sums.divisor)
    return sums, flags


def _keep_ids(session: Session, lanes: Sequence[LaneBatch]) -> None:
    """Write the samples that this rank gives to the next step to the history."""
    ids = ranges_of(np.concatenate([batch.ids for batch in lanes]))
    session.world.history.read(step=session.state.step + 1, epoch=session.state.cursor.epoch, ids=ids)


def _coverage_of(lanes: Sequence[LaneBatch]) -> CoverageSums:
    """Return the sums over the samples that this rank's lanes have read, at once: a call costs as much as many ids."""
    return CoverageSums.of_ids(np.concatenate([batch.ids for batch in lanes]))


def _run_lane(session: Session, batch: LaneBatch) -> tuple[float, float]:
    """Add one lane's gradient; return its loss sum and weight. A lane without samples adds zero."""
    with session.gradients.lane(batch.lane):
        if batch.tensors is None:
            return 0.0, 0.0
        torch.manual_seed(lane_seed(session.plan.config.run.seed, session.state.step, batch.lane))
        reach("forward")
        with session.plan.autocast():
            loss = session.plan.task.loss(session.state.model, session.to_device(batch.tensors))
        reach("backward")
        torch.autograd.backward(session.state.scaler.scale(loss.total))
    return float(loss.total.detach()), loss.weight


def _fold(table: Sequence[Sequence[float | int]]) -> StepSums:
    """Add the lanes' rows: floats along the tree, integers in any order."""
    losses, weights, *integers = zip(*table, strict=True)
    *counts, flags = ([int(value) for value in column] for column in integers)
    count, sum_a, sum_b, num_left_out, num_truncated = (sum(column) for column in counts)
    return StepSums(
        tree_sum([float(loss) for loss in losses]),
        tree_sum([float(weight) for weight in weights]),
        CoverageSums(count, sum_a % _WORD, sum_b % _WORD),
        num_left_out,
        num_truncated,
        reduce(or_, flags),
        reduce(and_, flags),
    )
