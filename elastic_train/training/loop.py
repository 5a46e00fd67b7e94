"""The training loop: lane by lane to a sum, one update, one record, and at every boundary the same three questions.

Everything that depends on where the run happens (ranks, files, storage, tracker) is in the `Session` that the loop is
given. A fault before the ranks meet over a step's gradient leaves the applied state at s; one after that finds every
rank able to move it to s+1. What may be dropped when there is no time left to finish it is marked `droppable`.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence

from elastic_train.core.accounting import check_epoch
from elastic_train.core.arrays import ranges_of
from elastic_train.core.mixture.account import check_passes
from elastic_train.core.mixture.dealing import Mixture
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import NoProgressError
from elastic_train.job.state import StepFacts, add_sources
from elastic_train.system.failpoints import reach
from elastic_train.training.session import Session
from elastic_train.training.step import Computed, compute_step, meet
from elastic_train.training.step_sums import ABLE, BUSY, COMMIT, GIVE_UP, GROW, LEAVE, STOP, UNABLE, StepSums

LEAVING_QUIET_S, MOST_LOOKS = 0.2, 6
MOST_NONFINITE = 10
"""Steps in a row, not finite, that end training with `on_nonfinite: fail`."""
"""How long nobody else may have been asked to leave before some of a world's ranks leave the others, and how often that
is looked for."""


HEARD_S = 0.1
"""How long it takes until all ranks have the result of a collective that one of them has."""


class Outcome(enum.Enum):
    """How a loop ended; the value is what histories and results call it.

    PREEMPTED: all ranks were asked to leave, or the world cannot continue without those that were. LEFT: this rank was,
    and the others continue. REGROUP: the world ends to make room, or because a rank left it.
    """

    DONE = "done"
    PREEMPTED = "preempted"
    LEFT = "left"
    REGROUP = "regroup"


def train_steps(session: Session) -> Outcome:
    """Train from the session's state to its last step, or until the world ends; a job that ends is committed."""
    clock = session.clock
    if (end := _end_before(session)) is not None:
        return end
    _catch_up(session)
    clock.start()
    for lanes in session.leave.dropping(session.steps()):
        clock.mark("data")
        started = time.perf_counter()
        with session.leave.droppable():
            computed = compute_step(session, lanes)
        sums = computed.sums
        if sums.is_unreadable:
            session.quarantine(lanes)
            clock.start()
            continue
        if computed.wrong:
            session.repeat(computed.wrong)
            clock.start()
            continue
        _apply(session, lanes, computed, started)
        if session.is_over:
            break
        if session.is_validation_due():
            with session.leave.droppable():
                session.validate()
            clock.start()
        if session.is_over:
            break
        clock.mark("rest")
        session.commits.collect()
        session.commits.prepare()
        end = _end(session, computed.flags, sums)
        if end is None and _is_time_to_commit(session, sums):
            session.commits.begin(is_any_busy=bool(sums.any_flags & BUSY))
        clock.mark("save")
        if end is not None:
            return end
    if not session.is_exhausted:
        session.validate()
    session.commits.finish()
    return Outcome.DONE


def _apply(session: Session, lanes: Sequence[LaneBatch], computed: Computed, started: float) -> None:
    """Move the state to the next step, and record it; raise what was lost of the world meanwhile."""
    state, clock, sums = session.state, session.clock, computed.sums
    clock.mark("rest")
    session.commits.await_staging()
    clock.mark("save")
    reach("apply")
    facts = _facts_of(session, computed)
    _check_ends(session, facts)
    clock.mark("rest")
    measured = state.measure()
    clock.mark("optimizer")
    norm, lost = meet(session, measured)
    clock.mark("wait")
    if norm is None:
        state.hold(facts, measured)
        session.record_step(sums, math.nan, time.perf_counter() - started, standing="pending")
        raise lost or AssertionError("a norm is unknown only where a peer is lost")
    state.apply(facts, norm)
    clock.mark("optimizer")
    reach("applied")
    seconds = time.perf_counter() - started
    session.record_step(sums, float(norm), seconds, standing="settled" if lost is None else "unsettled")
    if state.reached.num_nonfinite:
        _report_nonfinite(session, lanes, sums, float(norm))
    if lost is not None:
        raise lost
    session.note_targets(sums)
    state.shards.refresh(session.world.group)


def _facts_of(session: Session, computed: Computed) -> StepFacts:
    """Return what a step changes beside the weights."""
    state, sums = session.state, computed.sums
    cursor = session.plan.order.advance(state.cursor, session.plan.micro_batch)
    account = state.reached.account.advance(state.step, session.holes, sums.num_left_out, sums.num_truncated)
    is_fast, term = session.reduction == "fast", session.world.term
    has_target = sums.mean is not None or not sums.coverage.count
    buffers, loss = computed.buffers, sums.loss
    return StepFacts(cursor, sums.coverage, term, account, buffers, loss, is_fast, sums.sources, has_target)


def _check_ends(session: Session, facts: StepFacts) -> None:
    """Raise CoverageError if an epoch that a step ends, or one of a mixture's source, has not had each sample once."""
    plan, state = session.plan, session.state
    if facts.cursor.epoch > state.cursor.epoch:
        check_epoch(state.cursor.epoch, plan.manifest.coverage, facts.account, state.coverage + facts.coverage)
    if isinstance(plan.order, Mixture):
        sums = add_sources(state.reached.sources, facts.sources)
        check_passes(plan.order, plan.wholes, state.cursor, facts.cursor, facts.account.holes, sums)


def _catch_up(session: Session) -> None:
    """Do what a fault may have kept ranks from after the step that this world begins with, if its end depends on it.

    So training ends after the same step as without the fault, with the same best commit.
    """
    if session.is_validation_missed():
        with session.leave.droppable():
            session.validate()
    if session.is_best and not session.is_over and not session.commits.has_head_at(session.state.step):
        session.commits.begin(is_any_busy=False)


def _end_before(session: Session) -> Outcome | None:
    """Say how a world ends whose ranks were asked to leave before its first step; None if it trains.

    There may be no time for a step: this is where ranks meet that have dropped one.
    """
    return _departure(session) if not session.is_over and any(session.leaving()) else None


def _departure(session: Session) -> Outcome:
    """Say how a world ends of which some ranks have been asked to leave, alike on every rank.

    What nobody has after them is committed before they go.
    """
    leaving = _leaving_together(session)
    is_end = all(leaving) or not session.worlds.is_live
    if session.state.step and (is_end or session.state.shards.table.would_lose_state(leaving)):
        session.commits.finish()
    if is_end:
        return Outcome.PREEMPTED
    if leaving[session.world.group.rank]:
        return Outcome.LEFT
    time.sleep(HEARD_S)  # to those that leave, a peer that is gone already is a lost one, and costs them another world
    return Outcome.REGROUP


def _leaving_together(session: Session) -> list[bool]:
    """Return, by rank, which ranks leave the world, alike on every rank.

    Whatever ends a whole job asks its nodes one after another. So those that were not asked yet have a moment in which
    they may be: then all leave together, with one commit, and not one world for each.
    """
    leaving = session.leaving()
    for _ in range(MOST_LOOKS):
        if all(leaving) or not session.worlds.is_live:
            break
        before = leaving
        time.sleep(LEAVING_QUIET_S)
        if (leaving := session.leaving()) == before:
            break
    return leaving


def _is_time_to_commit(session: Session, sums: StepSums) -> bool:
    """Say whether a commit is due after this step; one that is overdue stays so until no rank is busy."""
    return session.commits.is_due() or session.is_best or sums.any_flags & (COMMIT | BUSY) == COMMIT


def _end(session: Session, flags: int, sums: StepSums) -> Outcome | None:
    """Say how the world ends after this step, alike on every rank; None if it continues."""
    session.commits.confirm_writable(is_asked=bool(sums.any_flags & UNABLE))
    if sums.any_flags & UNABLE and sums.any_flags & ABLE and session.step_back(is_unable=bool(flags & UNABLE)):
        return Outcome.REGROUP
    if sums.any_flags & GIVE_UP:
        raise session.commits.failed()
    if sums.any_flags & STOP:
        session.commits.finish()
        raise NoProgressError(
            f"an event that monitoring.on_event has end the job: step {session.state.step} is committed; the log and "
            f"{session.plan.config.run.dir}/history (op event) say what it was. Mend that, and start again to resume"
        )
    if sums.any_flags & LEAVE:
        return _departure(session)
    return Outcome.REGROUP if sums.any_flags & GROW else None


def _report_nonfinite(session: Session, lanes: Sequence[LaneBatch], sums: StepSums, norm: float) -> None:
    """Report the step that was just applied; raise NoProgressError, on every rank, after too many in a row.

    Its loss or gradient is NaN or infinite, so its update was left out, and commits stay finite.
    Where no lane's loss says which lanes did it, because the gradient alone is not finite, all lanes are listed.
    """
    state, config = session.state, session.plan.config.optimizer
    suspects = set(sums.nonfinite_lanes) or set(range(session.plan.num_lanes))
    samples = {batch.lane: ranges_of(batch.ids) for batch in lanes if batch.lane in suspects}
    session.world.history.nonfinite(step=state.step, loss=sums.loss, norm=norm, samples=samples)
    if state.reached.num_nonfinite == 1:
        where = f"lanes {list(sums.nonfinite_lanes)}" if sums.nonfinite_lanes else "no lane alone"
        what = "used all the same" if config.on_nonfinite == "keep" else "left out"
        session.world.announce(
            f"step {state.step}: loss {sums.mean}, gradient norm {norm}, by {where}; its update is {what}"
        )
        session.commits.pin_newest()
    if config.on_nonfinite == "fail" and state.reached.num_nonfinite >= MOST_NONFINITE:
        raise NoProgressError(
            f"loss or gradient of {MOST_NONFINITE} steps in a row, up to step {state.step}, was not finite; "
            f"the samples are in {session.plan.config.run.dir}/history (op nonfinite), and the last commit is pinned. "
            "Lower optimizer.lr, remove the samples, or set optimizer.on_nonfinite to skip or keep"
        )
