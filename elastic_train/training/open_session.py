"""Open a session: enter a world, bring the state to its furthest step, and bind the gradients, in this order.

A sample that kills its process, or a device that computes wrongly, ends every world at the same step. Processes die
with their knowledge, so a job whose worlds get no further is known from the histories in `run.dir`. It ends with an
exit code that says not to restart it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import dataclass

import torch

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.config.schema import Config
from elastic_train.core.accounting import Hole
from elastic_train.core.lanes import Assignment
from elastic_train.errors import NoProgressError
from elastic_train.insight.phases import StepClock
from elastic_train.job.auditor import Auditor
from elastic_train.job.cells.stage import Context, Stage, context_of, stage_of
from elastic_train.job.crash_isolation import find_deadly
from elastic_train.job.optimizers.choice import precision_hazard
from elastic_train.job.optimizers.schedule import say_end_of_rates
from elastic_train.job.plan import Plan
from elastic_train.job.plan_facts import describe_tests, redundancy_of
from elastic_train.job.reshard import take_place
from elastic_train.job.sharded.share import Offloaded
from elastic_train.job.state import AppliedState
from elastic_train.job.warm_up import FIRST_LOSS, FirstLoss
from elastic_train.parallel.attention.choice import current
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.devices.device import device_times_of, nccl_hazard
from elastic_train.parallel.devices.switches import describe_tuning
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum, make_sum
from elastic_train.system.file_systems import hazards
from elastic_train.system.wording import counted, size
from elastic_train.tasks.placements import Running
from elastic_train.tasks.task import Counting
from elastic_train.tracking.history_files import Stagnation
from elastic_train.training.commits import Commits
from elastic_train.training.opening.inspection import inspect_rows, say_changes, versions_of
from elastic_train.training.opening.resources import (
    open_cadence,
    open_memory_watch,
    open_saves,
    open_tracer,
    open_watch,
    start_tracker,
)
from elastic_train.training.session import Process, Session
from elastic_train.world.agreement import agree, check_alike, check_can_be_sharded, differing_kernels
from elastic_train.world.forming import Formed
from elastic_train.world.quarantine import known_holes, quarantine_deadly
from elastic_train.world.restore import restore
from elastic_train.world.world import World, enter_world, form_cells

_RATES = "rates"
_PRECISION = "precision"
_KERNELS = "kernels"
log = logging.getLogger(__name__)
TRIAL_EVERY = 3
"""Number of worlds that must end at one step before its samples are tried for crashes, and between such trials."""
TRIAL_SHARE = 0.5
"""Fraction of the peer timeout that such a trial may take."""


def open_session(process: Process, formed: Formed) -> Session:
    """Enter a world that has formed, bring its state to the furthest applied step, and bind the gradients."""
    world = enter_world(
        process.plan.config, formed, process.started_at, process.files, process.watchdog.moved, process.use
    )
    with contextlib.ExitStack() as undo:
        undo.callback(world.close)
        session = _open_in(process, world)
        undo.pop_all()
    return session


def _open_in(process: Process, world: World) -> Session:
    plan, state = process.plan, process.state
    world, entered = _bring_state(process, world)
    head, differing = entered.head, entered.differing
    kind = _pick_reduction(plan, world, differing)
    assigned = state.shards.table.assigned(plan.num_lanes)
    gradients = sum_of_gradients(state, kind, world, plan.num_lanes)
    versions = versions_of(plan)
    say_changes(process, world, head, versions)
    saves = open_saves(process, world, head, versions)
    tracker = start_tracker(process, world, head)
    cadence, clock = open_cadence(process, world, head), StepClock(world.group, device_times_of(plan.device))
    buffers = open_buffers(plan, world, state, kind, assigned)
    stage = _open_stage(plan, world, state)
    auditor = _open_auditor(plan, world, state, kind, buffers, assigned, stage)
    session = Session(
        plan=plan,
        world=world,
        state=state,
        gradients=gradients,
        buffers=buffers,
        assigned=assigned,
        leave=process.leave,
        worlds=process.worlds,
        watchdog=process.watchdog,
        commits=Commits(
            plan,
            world,
            state,
            process.watchdog,
            saves,
            cadence,
            tracker,
            head,
            process.use,
            world.keeper,
            rounds_alike=not differing,
            switches=process.switches,
            looked_at=state.step,
        ),
        tracker=tracker,
        holes=_holes(process, world, entered.stuck),
        reduction=kind,
        auditor=auditor,
        stage=stage,
        clock=clock,
        page=process.page,
        utilisation=process.utilisation,
        tracer=open_tracer(plan.config, world, clock, state.step),
        watch=open_watch(process, world, tracker, assigned),
        memory=open_memory_watch(process, world, gradients),
        first=_first_loss(process, world, kind),
    )
    _announce(process, world)
    return session


@dataclass(frozen=True, slots=True)
class _Entered:
    """The state that a world begins with: its commit, and the differences between its ranks.

    `differing` has a line for each reason why ranks round differently; `stuck` counts worlds that ended without a step.
    """

    head: CommitRecord | None
    differing: list[str]
    stuck: Stagnation


def _bring_state(process: Process, world: World) -> tuple[World, _Entered]:
    """Bring this rank to the world's first state and check everything not checked before; return the world with groups.

    Raises ConfigError and DataError.
    """
    plan, state = process.plan, process.state
    check_alike(world.group, plan, state.outline, state.shards.cut.outline)
    differing = differing_kernels(world.group, plan.device, compiles=plan.config.compile is True)
    check_can_be_sharded(world.group, plan, differing)
    world, before = form_cells(world, plan.config.parallel), state.reached.intervals
    if take_place(state, world.mesh, world.cell, plan.first_weights):
        process.worlds.note_state(is_there=False)
    head = restore(plan, world, state, before)
    process.worlds.note_state(is_there=True)
    stuck = check_progress(world, plan)
    if head is None and state.step == 0 and stuck.num_terms < TRIAL_EVERY:  # a row may crash the rank that inspects it
        inspect_rows(process, world)
        plan.feed.try_collate(plan.order)
    return world, _Entered(head, differing, stuck)


def _announce(process: Process, world: World) -> None:
    """Announce what begins, where, and how many steps a fault may lose."""
    plan, state = process.plan, process.state
    if process.page is not None:
        facts, num_ranks = process.page.facts, world.group.size
        facts.enter_world(world.term, num_ranks, state.step, plan.total_steps, is_leader=world.is_leader)
    world.announce_elsewhere(
        f"rank {world.group.rank} of {world.group.size} trains (term {world.term}); the progress is shown by the node "
        "of rank 0"
    )
    world.announce(
        f"training on {counted(world.group.size, 'rank')} (term {world.term}): {counted(plan.num_lanes, 'lane')}, "
        f"{counted(plan.total_steps, 'step')}, {plan.device}"
    )
    _say_of_rates(process, world)
    if said := redundancy_of(world.mesh, state.shards.table):
        world.announce(said)
    if (offloaded := state.shards.share.offloaded) is not None:
        world.announce(_saving_of(offloaded, plan.device))
    if state.compiled is not None:
        world.announce(f"{state.compiled}")
    _say_of_tests(process, world)
    _say_of_kernels(process, world)
    _warn_of_file_system(process, world)
    _warn_of_precision(process, world)


def _say_of_rates(process: Process, world: World) -> None:
    """Report once a warm-up or schedule that does not fit the run's length."""
    state = process.state
    said = None if state.recipe is None else say_end_of_rates(state.recipe, state.step)
    if said is not None and _RATES not in process.warned:
        process.warned.add(_RATES)
        world.announce(said)


def _say_of_tests(process: Process, world: World) -> None:
    """Announce once what was never tested on such hardware."""
    said = describe_tests(process.plan.config, process.plan.device)
    if said is not None and said not in process.warned:
        process.warned.add(said)
        world.announce(said)


def _say_of_kernels(process: Process, world: World) -> None:
    """Announce once the chosen kernels, and the task's own kernels whose choice may vary between processes."""
    if _KERNELS in process.warned:
        return
    process.warned.add(_KERNELS)
    if (said := process.plan.why_compiled) is not None:
        world.announce(said)
    is_nccl = process.plan.device.type == "cuda" and process.plan.config.parallel.transport != "gloo"
    if is_nccl and world.group.size > 1 and (said := nccl_hazard()) is not None:
        world.announce(f"WARNING: {said}")
    if (choice := current()) is not None:
        world.announce(f"{choice}")
    if (
        process.plan.device.type == "cuda"
        and process.plan.config.reduction == "canonical"
        and (said := describe_tuning())
    ):
        world.announce(f"WARNING: {said}")


def _first_loss(process: Process, world: World, kind: Reduction) -> FirstLoss | None:
    """Return the check that computes a rank's first loss twice; None within a cell, whose ranks compute it together."""
    if FIRST_LOSS in process.done or kind == "fast" or world.cell is not None:
        return None
    process.done.add(FIRST_LOSS)
    return FirstLoss(process.plan, process.state.model, tries_metrics=process.state.step == 0)


def _open_stage(plan: Plan, world: World, state: AppliedState) -> Stage:
    """Return this rank's stage: a part of the model, or all of it."""
    parallel, task, context = plan.config.parallel, plan.task, _open_context(plan, world)
    cut = state.shards.cut
    if parallel.pipeline == 1:
        return Stage(task, state.model, experts=cut.experts, context=context)
    assert isinstance(task, Running) and world.cell is not None, "it was checked"
    return stage_of(task, state.model, cut.plan, parallel.order, world.mesh, world.cell, cut.experts, context)


def _open_context(plan: Plan, world: World) -> Context | None:
    """Return this rank's part of rows under context parallelism; None if it computes whole rows."""
    if plan.config.parallel.context == 1:
        return None
    assert isinstance(plan.task, Running) and world.cell is not None, "it was checked"
    return context_of(plan.task, world.mesh, world.cell, plan.config.parallel.token_multiple)


def _open_auditor(
    plan: Plan,
    world: World,
    state: AppliedState,
    kind: Reduction,
    buffers: BufferMean,
    assigned: Assignment,
    stage: Stage,
) -> Auditor | None:
    """Return the auditor of lanes; None if audits are off, or ranks may round differently."""
    every = plan.config.run.audit_lanes
    if every is not None and kind == "fast":
        world.announce("no lanes are audited in this world: its ranks may have different bits")
    if every is None or kind == "fast":
        return None
    return Auditor(every, plan, state, buffers, assigned, world.group, world.mesh, world.cell, stage)


def _saving_of(offloaded: Offloaded, device: torch.device) -> str:
    """Describe the state that this rank keeps in host memory instead of on its device."""
    if device.type == "cpu":
        return f"parallel.offload saves nothing on {device}, whose memory is the host's"
    return (
        f"{size(offloaded.num_bytes)} of rank 0's state are in pinned host memory in place of {device}, which "
        f"has {size(offloaded.room_bytes)} for what it updates at a time"
    )


def _warn_of_file_system(process: Process, world: World) -> None:
    """Warn once about hazards of the commits' file system; on one rank of each node, as mounts may differ."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for hazard in hazards(process.plan.config.checkpoint_url):
        if hazard not in process.warned:
            process.warned.add(hazard)
            if world.is_leader:
                world.announce(f"WARNING: {hazard}")
            else:
                log.warning("on %s: %s", socket.gethostname(), hazard)


def _warn_of_precision(process: Process, world: World) -> None:
    """Warn in a process's first world, which is no recovery, if updates are lost in rounding."""
    if _PRECISION in process.warned:
        return
    process.warned.add(_PRECISION)
    keys = process.plan.config.optimizer
    if world.is_leader and (hazard := precision_hazard(process.state.model.parameters(), keys.name, keys.lr)):
        world.announce(f"WARNING: {hazard}")


def _holes(process: Process, world: World, stuck: Stagnation) -> tuple[Hole, ...]:
    """Return the holes that a world begins with; if no world gets past a step, try its samples for crashes first.

    Each rank tries its own lanes, in parallel; again after TRIAL_EVERY more worlds if the first trial found nothing.
    """
    plan, state = process.plan, process.state
    holes = known_holes(world, plan, state)
    step = max(stuck.step, state.step)
    if stuck.num_terms == 0 or stuck.num_terms % TRIAL_EVERY or step == plan.total_steps:
        return holes
    world.announce(
        f"{stuck.num_terms} worlds in a row did not get past step {step}: trying the samples of the next one"
    )
    lanes = world.mesh.assigned(plan.num_lanes)[world.mesh.owner]
    with process.watchdog.resting():
        deadly = find_deadly(plan, state, step, lanes, holes, TRIAL_SHARE * plan.config.peer_timeout_s)
    return quarantine_deadly(world, plan, step, deadly, holes)


def open_buffers(plan: Plan, world: World, state: AppliedState, kind: Reduction, assigned: Assignment) -> BufferMean:
    """Return the buffers that forward passes may change; the task names the integer ones to sum."""
    summed = plan.task.summed_buffers() if isinstance(plan.task, Counting) else ()
    owners = world.owners
    return BufferMean(state.model, summed, owners, lambda flats: make_sum(kind, flats, owners, assigned))


def _pick_reduction(plan: Plan, world: World, differing: list[str]) -> Reduction:
    """Return the configured reduction, or `fast` if the ranks' devices differ."""
    if plan.config.reduction == "canonical" and differing:
        world.announce(f"bits may not be equal, so `reduction: fast` is used in this world: {'; '.join(differing)}")
        return "fast"
    return plan.config.reduction


def sum_of_gradients(state: AppliedState, kind: Reduction, world: World, num_lanes: int) -> GradientSum:
    """Bind the gradients to a sum; a canonical one leaves each mean on the ranks that hold it."""
    return state.shards.sum_of(world.owners, num_lanes, kind, world.holders)


def make_repeatable(config: Config) -> None:
    """Make kernels reproducible: one thread count in all worlds, deterministic algorithms unless rounding may vary."""
    torch.set_num_threads(config.threads_per_rank)
    if config.reduction == "canonical":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Equal to use_deterministic_algorithms(True), without its import of the compiler: a second of every recovery.
        torch.set_deterministic_debug_mode("error")
        # Filling fresh memory costs time, and nothing here reads uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


MOST_COUNTED = 100


def check_progress(world: World, plan: Plan) -> Stagnation:
    """Return, on every rank, the number of consecutive worlds that got no further, and their step.

    Raises NoProgressError, on every rank, if there are too many.
    """
    num_terms, step = agree(world.group, lambda: _check(world, plan))
    return Stagnation(num_terms, step)


def _check(world: World, plan: Plan) -> tuple[int, int]:
    limit = plan.config.give_up_after_worlds
    found = world.history.stagnation(limit or MOST_COUNTED)
    if limit is None or found.num_terms < limit or 2 * world.history.num_ended(limit) < limit - 1:
        return found.num_terms, found.step  # processes that outlive their worlds count for themselves
    world.history.no_progress(step=found.step)
    raise NoProgressError(
        f"the last {limit} worlds, up to term {world.term - 1}, got no further than step {found.step}: the processes' "
        f"logs say how they ended; a signal at every try points to {_suspect(plan, found)} or to a device. "
        f"Starting again tries {limit} worlds more; give_up_after sets how many"
    )


def _suspect(plan: Plan, found: Stagnation) -> str:
    """Name the data that may contain a sample that kills its process."""
    if 2 * found.num_in_validation <= found.num_terms:
        return "the samples of the next step"
    times = f"{found.num_in_validation} of {found.num_terms}"
    return (
        f"the samples of the validation set {plan.config.data.validation} ({times} worlds ended while they validated)"
    )
