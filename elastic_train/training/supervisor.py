"""One process of a job across its worlds: plan, train in one world after another, and report the end."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from elastic_train.checkpoint.saving.store_health import StoreHealth
from elastic_train.config.schema import Config
from elastic_train.data.loading.loader import patiently
from elastic_train.data.worker_failures import ended_too_soon
from elastic_train.errors import (
    ConfigError,
    ElasticTrainError,
    FencedError,
    NoProgressError,
    PeerLostError,
    Preempted,
    StorageError,
    TooFewNodesError,
    UnfitError,
    explain,
)
from elastic_train.health.precheck import Proof, begin_proof
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.devices.switches import KeptSwitches
from elastic_train.system.preemption import LeaveNow, LeaveRequest, StepDropped
from elastic_train.system.watchdog import Watchdog
from elastic_train.system.wording import counted
from elastic_train.tasks.task import Finishing
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import MOST_BYTES, UnformedWorlds, note_unfit
from elastic_train.tracking.tracker import WRITE_TIMEOUT_S
from elastic_train.training.loop import Outcome, train_steps
from elastic_train.training.memory import Meter, Moment, held_by, note_out_of_memory, record_allocations
from elastic_train.training.open_session import make_repeatable, open_session
from elastic_train.training.opening.resources import Planning, commit_alone, open_page, warm_up_once
from elastic_train.training.result import TrainResult, last_line, result_of, write_result
from elastic_train.training.session import Process, Session
from elastic_train.world.agreement import heard, job_of, say_why
from elastic_train.world.equal_weights import digest_of_all, make_whole
from elastic_train.world.forming import Formed, open_worlds, own_run_id

CLOSED = "closed"
"""Status of a result if other members have finished the job."""

Ended = TrainResult | ElasticTrainError
"""The end of a job for one process, after an orderly close: a result, or an error.

The error says that the process was asked to leave, or that the result could not be written.
"""

LEAVING_PATIENCE_S = 8.0
RESUME = "the same command resumes"
MOST_FAILED_WORLDS, MOST_FIRST_WORLDS, FAILED_WORLD_PAUSE_S = 60, 10, 2.0
"""Attempts of live ranks to enter a world whose storage fails: with state, without state, and the pause in seconds.

Ranks without state stop earlier, since a rank with state may be in their world.
"""


@dataclass(slots=True)
class HowFar:
    """Progress of a job, for messages; `state` is None before it exists."""

    state: AppliedState | None = None
    total_steps: int = 0

    @property
    def step(self) -> int:
        return 0 if self.state is None else self.state.step

    def __str__(self) -> str:
        return "before the first step" if self.state is None else f"at step {self.step} of {self.total_steps}"


def supervise(config: Config, leave: LeaveRequest, started_at: float, how_far: HowFar | None = None) -> Ended:
    """Train to the end; refuse everything that can be refused before the first world.

    `started_at` is the process's start in unix seconds; `how_far` is kept up to date. Raises ElasticTrainError, and
    RendezvousError if membership fails.
    """
    how_far = how_far or HowFar()
    leave.may_go, leave.lost = lambda: how_far.step == 0, lambda: "nothing is lost, as no step was applied"
    try:
        if leave.is_set:
            raise LeaveNow
        return _prepare(config, leave, started_at, how_far)
    except LeaveNow:
        step = how_far.step
        saved = f"step {step} is committed" if step else "no step was applied, so there is nothing to commit"
        return Preempted(f"asked to leave{by(leave)}; {saved}: {RESUME}")
    finally:
        leave.may_go = lambda: False


def _prepare(config: Config, leave: LeaveRequest, started_at: float, how_far: HowFar) -> Ended:
    """Check everything that can be refused, build the state, and train it."""
    make_repeatable(config)
    with contextlib.closing(Watchdog(config.hang_timeout_s)) as watchdog:
        watchdog.prepare()
        plan = next(patiently(Planning(config, make_plan), config.peer_timeout_s / 2, watchdog.resting))
        proof, meter = begin_proof(config, plan.device), Meter(plan.device)  # the check runs concurrently with the rest
        if config.profile.memory:
            record_allocations(plan.device)
        try:
            state = plan.build_state(may_defer=True)
            how_far.state, how_far.total_steps = state, plan.total_steps
            return _train_on(plan, state, watchdog, leave, started_at, proof, meter)
        except Exception as error:
            note_out_of_memory(error, config, meter)
            if not isinstance(error, ElasticTrainError) and (why := ended_too_soon()) is not None:
                raise why from error  # torch raises its own error wherever this process is when the signal arrives
            raise


def _train_on(
    plan: Plan,
    state: AppliedState,
    watchdog: Watchdog,
    leave: LeaveRequest,
    started_at: float,
    proof: Proof | None,
    meter: Meter,
) -> Ended:
    """Train in one world after another, with a watchdog; at the end, flush the run's files."""
    config, files = plan.config, BackgroundFiles()
    worlds = open_worlds(
        config,
        plan.device,
        watchdog,
        lambda: _is_through(leave, state),
        job_of(plan),
        lambda: state.step,
        UnformedWorlds(files, config.run.dir, MOST_BYTES),
    )
    process = Process(
        plan,
        state,
        worlds,
        leave,
        watchdog,
        started_at,
        StoreHealth(config.checkpoint_url),
        meter,
        files=files,
        switches=KeptSwitches(state.model),
    )
    warm_up_once(process)
    if proof is not None:
        _prove(proof, files, config, leave)
    process.page = page = open_page(config, process.utilisation)
    try:
        return _train_through(process)
    except LeaveNow:
        worlds.leave(is_job_done=False)
        raise
    finally:
        if page is not None:
            page.close()
        process.files.flush(WRITE_TIMEOUT_S)


def _prove(proof: Proof, files: BackgroundFiles, config: Config, leave: LeaveRequest) -> None:
    """Refuse a machine that fails its health check, and record that in the run's history."""
    try:
        proof.demand(lambda: leave.is_set)
    except UnfitError as error:
        note_unfit(files, config.run.dir, str(error))
        files.flush(WRITE_TIMEOUT_S)
        raise


def _train_through(process: Process) -> Ended:
    """Train in one world after another, until one ends the job for this process."""
    plan, state, worlds, num_failed = process.plan, process.state, process.worlds, 0
    while (formed := _next_world(process)) is not None:
        try:
            process.watchdog.enter()
            ended = _train_or_say_why(process, formed)
        except (PeerLostError, FencedError) as error:
            if not worlds.is_live and process.leave.is_set and isinstance(error, PeerLostError):
                return _leave_alone(process)  # a peer that was asked to leave as well has dropped the step first
            if not worlds.is_live:
                raise  # the job, and the tracker's run, continue in the next world
            _let_go(process, formed, error)
            continue
        except StepDropped as error:
            if not worlds.is_live:
                return _leave_alone(process)
            _let_go(process, formed, error)
            continue
        except StorageError as error:
            num_failed += 1
            if not worlds.is_live or num_failed >= (MOST_FAILED_WORLDS if state.step else MOST_FIRST_WORLDS):
                raise
            sys.stderr.write(f"the world of step {state.step} could not begin, trying on: {error}\n")
            _let_go(process, formed, error)
            process.use.begin_probe()
            time.sleep(FAILED_WORLD_PAUSE_S)
            if formed.group.size > 1 and not process.use.has_probed():
                process.use.exclude()  # a leader that can write may lead the next world
            continue
        if ended is not None:
            return ended
        _let_go(process, formed)
        num_failed = 0
    return result_of(plan, state, CLOSED, digest_of_all(state.shards))


def _let_go(process: Process, formed: Formed, error: BaseException | None = None) -> None:
    """Abandon a world that has ended, and release its memory, which the next one needs.

    The answers to a request are those of its session from now on. But if the next world gives this rank a later state,
    it may not leave at once: it may be the only one that holds that state. The frames of an error, and of those that it
    came from, are cleared, as one may keep the error itself: such a cycle would keep gradients until Python next looks
    for cycles.
    """
    formed.group.abandon()
    leave = process.leave
    leave.lost, leave.may_go = functools.partial(str, leave.lost()), _until_later(process.state, leave.may_go)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _until_later(state: AppliedState, may_go: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that gives the present answer while the state stays at its step, and False afterwards."""
    step, answer = state.step, may_go()
    return lambda: answer and state.step == step


def _train_or_say_why(process: Process, formed: Formed) -> Ended | None:
    """Train in one world; in restart mode, all ranks end with the error message of the rank that failed."""
    if process.worlds.is_live:
        return _train_in(_enter(process, formed))
    try:
        return _train_in(_enter(process, formed))
    except PeerLostError as error:
        raise heard(formed.group, error) from None
    except FencedError:
        raise
    except (Exception, SystemExit) as error:
        say_why(formed.group, error)
        raise


def _enter(process: Process, formed: Formed) -> Session:
    """Open a world's session; an out-of-memory error lists what this rank held at that time."""
    try:
        return open_session(process, formed)
    except Exception as error:
        state, group = process.state, formed.group
        held = held_by(state, None, process.save_memory)
        moment = Moment(0 if formed.launched is None else formed.launched.term, group.rank, group.size)
        note_out_of_memory(error, process.plan.config, process.meter, moment, held, state.model)
        raise


def _is_through(leave: LeaveRequest, state: AppliedState) -> bool:
    """Return True to stop waiting for a world: asked to leave, with nothing to lose or after some patience.

    Nodes may be asked to leave at slightly different times. So a process with state enters one more world, in which all
    find out if any continues, and commit if none does.
    """
    patience_s = leave.patience_s if leave.is_late else min(LEAVING_PATIENCE_S, leave.patience_s)
    return leave.is_set and (state.step == 0 or time.monotonic() - leave.since_s > patience_s)


def _next_world(process: Process) -> Formed | None:
    """Wait for the next world; if none will take over the state, commit it before giving up."""
    process.watchdog.rest()
    try:
        return process.worlds.form(as_last=process.use.is_barred)
    except (TooFewNodesError, Preempted, StorageError, ConfigError, NoProgressError):
        try:
            commit_alone(process.plan, process.state, process.save_memory, process.worlds.published(), own_run_id())
        except ElasticTrainError as error:
            sys.stderr.write(f"the state of step {process.state.step} could not be committed: {error}\n")
        process.worlds.leave(is_job_done=False)
        raise


def _leave_alone(process: Process) -> Preempted:
    """Commit the applied state without its world, which is in the middle of a step that this process has dropped.

    One rank of a node commits, since all hold the same state. If the state is sharded, none can.
    """
    step = process.state.step
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return Preempted(f"asked to leave, the step after {step} was dropped: {RESUME}")
    if not commit_alone(process.plan, process.state, process.save_memory, run_id=own_run_id()):
        return Preempted(
            f"asked to leave, the step after {step} was dropped; of step {step} this rank holds a part alone, which it "
            f"cannot commit: {RESUME} from the newest commit"
        )
    return Preempted(f"asked to leave, the step after {step} was dropped; step {step} is committed: {RESUME}")


def by(leave: LeaveRequest) -> str:
    """Return the signal that asked a process to leave, for a message."""
    return f" by {leave.name}" if leave.name else ""


def _lost(session: Session) -> str:
    """Describe what is lost if this process ends now."""
    step, head, formed = session.state.step, session.commits.head, session.world.launched
    committed = 0 if head is None else head.step
    if not session.world.is_leader:
        return ""  # only the leader knows
    if step == committed:
        return f"nothing is lost: step {step} is committed" if step else "nothing is lost, as no step was applied"
    lost = counted(step - committed, "step")
    lost += f" since the commit of step {committed}" if committed else ""
    others = ", unless other members continue" if formed is not None and formed.num_nodes > 1 else ""
    return f"{lost} {'is' if step - committed == 1 else 'are'} lost{others}; {RESUME} from step {committed}"


def _has_nothing_to_lose(session: Session) -> bool:
    """Return True if nothing is lost when this process ends now."""
    step = session.state.step
    return step == 0 or (session.world.group.size == 1 and session.commits.has_head_at(step) and not session.is_over)


def _train_in(session: Session) -> Ended | None:
    """Train in one world; return how the job ended for this process, None if another world follows."""
    leave = session.leave
    leave.lost = functools.partial(_lost, session)
    leave.may_go = functools.partial(_has_nothing_to_lose, session)
    try:
        outcome = train_steps(session)
        session.watchdog.leave()
        if outcome is Outcome.REGROUP:
            session.pause()
            return None
        return _finish(session, outcome)
    except (PeerLostError, FencedError):
        session.watchdog.leave()
        session.pause()
        raise
    except LeaveNow:
        leave.may_go = lambda: False
        session.watchdog.leave()
        if session.world.group.size > 1:
            session.pause()  # others may continue
        else:
            session.close(status="KILLED")
        session.world.group.abandon()
        raise
    except StepDropped:
        sys.stderr.write(f"no time left to finish a step: the one after step {session.state.step} is dropped\n")
        session.watchdog.leave()
        session.pause()
        raise
    except (Exception, SystemExit) as error:
        session.watchdog.leave()
        if (memory := session.memory) is not None:
            world, step = session.world, session.state.step + 1
            moment = Moment(world.term, world.group.rank, world.group.size, step, session.lane)
            note_out_of_memory(error, session.plan.config, memory.meter, moment, memory.held(), session.state.model)
        session.close(status="FAILED", goes_on=session.worlds.is_launched)
        raise


def _finish(session: Session, outcome: Outcome) -> Ended:
    """Write the result, end the tracker's run with its true status, and leave the group in order."""
    step = session.state.step
    if outcome is Outcome.LEFT:
        session.say_rest()  # no next world of this process does
        session.world.history.leave(step=step)
        session.pause()
        session.world.group.abandon()
        session.worlds.leave(is_job_done=False)
        return Preempted(f"asked to leave{by(session.leave)} after step {step}; the other members continue")
    if session.state.compiled is not None and (share := session.state.compiled.describe_share()) is not None:
        session.world.announce(share)
    digest = digest_of_all(session.state.shards, session.world.group)
    result = result_of(session.plan, session.state, outcome.value, digest)
    if outcome is Outcome.DONE and isinstance(session.plan.task, Finishing):
        make_whole(session.state.shards, session.world.holders)
    # Past the last collective: a process frozen during it may have been replaced, and ends here.
    session.world.check_newest()
    if (error := write_result(session, result)) is not None:
        sys.stderr.write(explain(error) + "\n")
    session.close(status="FINISHED" if outcome is Outcome.DONE else "KILLED")
    if outcome is Outcome.DONE and error is None:
        session.world.announce(last_line(session, result))
        session.world.announce_elsewhere(
            f"Done: {counted(result.step, 'step')}; the node of rank 0 shows where the weights are"
        )
    session.world.group.close()  # no rank leaves while another still waits for an answer
    session.worlds.leave(is_job_done=outcome is Outcome.DONE)
    if outcome is not Outcome.DONE:
        return Preempted(f"asked to leave{by(session.leave)}; step {step} is committed: {RESUME} from it")
    # A launcher that restarts on any exit code but 0 would restart a finished job.
    is_restarted = session.worlds.is_launched and not session.worlds.is_live
    return result if error is None or is_restarted else error
