"""The training loop: sum over lanes, one update, one record, and the same checks at every step boundary.

Everything that depends on the environment (ranks, files, storage, tracker) is in the `Session`. A fault before the
ranks meet over a step's gradient leaves the applied state at s; after that, every rank can move it to s+1. Work that
may be dropped if there is no time to finish it is marked `droppable`.
"""

from __future__ import annotations

import enum
import logging
import math
import socket
import time
from collections.abc import Sequence

import torch

from elastic_train.core.accounting import check_epoch
from elastic_train.core.arrays import ranges_of
from elastic_train.core.mixture import Mixture, check_passes
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import ConfigError, NoProgressError, StorageError
from elastic_train.job.state import StepFacts, add_sources
from elastic_train.system.failpoints import reach
from elastic_train.training.evaluation import validate
from elastic_train.training.session import Session
from elastic_train.training.step import Computed, compute_step, meet
from elastic_train.training.step_sums import ABLE, BUSY, COMMIT, GIVE_UP, GROW, LEAVE, STOP, UNABLE, StepSums

log = logging.getLogger(__name__)
LEAVING_QUIET_S, MOST_LOOKS = 0.2, 6
"""Seconds without further requests to leave before some ranks leave the others, and how often to check."""
MOST_NONFINITE = 10
"""Consecutive non-finite steps that end training with `on_nonfinite: fail`."""
HEARD_S = 0.1
"""Seconds until all ranks have the result of a collective that one rank has."""


class Outcome(enum.Enum):
    """The end of a loop; histories and results contain the value.

    PREEMPTED: all ranks were asked to leave, or the world cannot continue without those that were. LEFT: this rank was
    asked to, and the others continue. REGROUP: the world ends to grow, or because a rank left it.
    """

    DONE = "done"
    PREEMPTED = "preempted"
    LEFT = "left"
    REGROUP = "regroup"


def train_steps(session: Session) -> Outcome:
    """Train from the session's state to its last step, or until the world ends; a finished job is committed."""
    clock = session.clock
    if (end := _end_before(session)) is not None:
        return end
    _catch_up(session)
    session.show_progress()
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
            validate(session, is_droppable=True)
            clock.start()
        if session.is_over:
            break
        clock.mark("rest")
        session.commits.collect()
        session.commits.prepare()
        end = _end(session, computed.flags, sums)
        if end is None and _is_time_to_commit(session, sums):
            session.commits.begin(is_any_busy=bool(sums.any_flags & BUSY), is_best=session.is_best)
        clock.mark("save")
        if end is not None:
            return end
    if not session.is_exhausted:
        validate(session)
    session.commits.finish()
    return Outcome.DONE


def _apply(session: Session, lanes: Sequence[LaneBatch], computed: Computed, started: float) -> None:
    """Move the state to the next step and record it; raise an error of the world that was deferred until then."""
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
    state.shards.share.refresh(session.world.holders)


def _facts_of(session: Session, computed: Computed) -> StepFacts:
    """Return the changes of a step besides the weights."""
    state, sums = session.state, computed.sums
    cursor = session.plan.order.advance(state.reached.cursor, session.plan.micro_batch)
    account = state.reached.account.advance(state.step, session.holes, sums.num_left_out, sums.num_truncated)
    is_fast, term = session.reduction == "fast", session.world.term
    has_target = sums.mean is not None or not sums.coverage.count
    buffers, loss = computed.buffers, sums.loss
    return StepFacts(cursor, sums.coverage, term, account, buffers, loss, is_fast, sums.sources, has_target)


def _check_ends(session: Session, facts: StepFacts) -> None:
    """Raise CoverageError if an epoch that ends with this step, or a mixture's source, did not get each sample once."""
    plan, reached = session.plan, session.state.reached
    if facts.cursor.epoch > reached.cursor.epoch:
        check_epoch(reached.cursor.epoch, plan.manifest.coverage, facts.account, reached.coverage + facts.coverage)
    if isinstance(plan.order, Mixture):
        sums = add_sources(reached.sources, facts.sources)
        check_passes(plan.order, plan.wholes, reached.cursor, facts.cursor, facts.account.holes, sums)


def _catch_up(session: Session) -> None:
    """Repeat the validation or commit that a fault prevented after this world's first state, if the end depends on it.

    Training then ends after the same step, with the same best commit, as without the fault.
    """
    if session.is_validation_missed():
        validate(session, is_droppable=True)
    if session.is_best and not session.is_over and not session.commits.has_head_at(session.state.step):
        session.commits.begin(is_any_busy=False)


def _end_before(session: Session) -> Outcome | None:
    """Return the outcome of a world whose ranks were asked to leave before its first step; None if it trains.

    There may be no time for a step: ranks that have dropped one meet here. A rank that a fault kept from a validation
    does not know yet that it has ended training, so all do as if it had not.
    """
    is_missed = session.is_validation_missed()
    may_go_on = not session.is_over or (is_missed and session.state.step < session.plan.total_steps)
    return _departure(session) if may_go_on and any(session.leaving()) else None


def _departure(session: Session) -> Outcome:
    """Return the outcome of a world in which ranks were asked to leave, equal on every rank.

    State that no remaining rank has is committed first.
    """
    leaving = _leaving_together(session)
    is_end = all(leaving) or not session.worlds.is_live
    if session.state.step and (is_end or session.state.shards.table.would_lose_state(leaving)):
        session.commits.finish()
    if is_end:
        return Outcome.PREEMPTED
    if leaving[session.world.group.rank]:
        return Outcome.LEFT
    time.sleep(HEARD_S)  # if a peer left first, the leaving ranks would count it as lost and form another world
    return Outcome.REGROUP


def _leaving_together(session: Session) -> list[bool]:
    """Return the ranks that leave the world, as flags by rank, equal on every rank.

    A job's nodes are usually asked one after another. A short wait lets all of them leave together, with one commit,
    instead of one world for each.
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
    """Return True if a commit is due after this step; an overdue one stays due until no rank is busy."""
    return session.commits.is_due() or session.is_best or sums.any_flags & (COMMIT | BUSY) == COMMIT


def _end(session: Session, flags: int, sums: StepSums) -> Outcome | None:
    """Return the outcome if the world ends after this step, equal on every rank; None if it continues."""
    session.commits.confirm_writable(is_asked=bool(sums.any_flags & UNABLE))
    if sums.any_flags & UNABLE and sums.any_flags & ABLE and _step_back(session, is_unable=bool(flags & UNABLE)):
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


def _step_back(session: Session, *, is_unable: bool) -> bool:
    """Exclude ranks that cannot write commits while others can; return True if another world should form.

    If this process has only one world, these ranks end and the others continue: with ConfigError if access is
    refused, or with StorageError, after which their launcher restarts them, if it may be temporary.
    """
    group, use = session.world.group, session.commits.use
    unable = [rank for rank, is_it in enumerate(group.all_gather(torch.tensor(int(is_unable)))) if is_it]
    for rank in unable:
        why = group.broadcast_object(f"on {socket.gethostname()} cannot write where the commits are ({use.why})", rank)
        what = "trains on, writes no part and does not lead until it can" if session.worlds.is_live else "ends"
        session.world.announce(f"rank {rank} {why}, and others can: it {what}")
    if is_unable:
        _stop_writing(session)
    return session.worlds.is_live


def _stop_writing(session: Session) -> None:
    use = session.commits.use
    what = f"this node cannot write to {session.world.store.url}, and others can: {use.why}"
    if not session.worlds.is_live and use.is_refused:
        raise ConfigError(f"{what}. Check how it is mounted here, permissions and credentials, and start it again")
    if not session.worlds.is_live:
        raise StorageError(f"{what}. It ends, and tries again if its launcher starts it again")
    log.warning("%s. It trains on, writes no part of commits and does not lead until it can", what)
    session.world.history.unwritable(step=session.state.step, why=use.why)
    use.exclude()


def _report_nonfinite(session: Session, lanes: Sequence[LaneBatch], sums: StepSums, norm: float) -> None:
    """Report a non-finite step that was just applied; raise NoProgressError, on every rank, after too many in a row.

    Its loss or gradient is NaN or infinite, so its update was skipped, and commits stay finite. If only the gradient is
    not finite, no lane can be blamed, and all lanes are listed.
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
