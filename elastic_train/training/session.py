"""One process's session in a world: what the loop needs, and its requests at a step boundary."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.checkpoint.commits.record import improvement_for, is_exhausted
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.saving.store_health import StoreHealth
from elastic_train.config.recipe import EarlyStoppingConfig, judged_by
from elastic_train.core.accounting import Hole
from elastic_train.core.lanes import Assignment
from elastic_train.core.mixture import epochs_at
from elastic_train.data.loading.loader import LaneBatch, patiently
from elastic_train.errors import DataError, WeightsDifferError
from elastic_train.insight.page import Facts, Page
from elastic_train.insight.phases import PhaseTotals, StepClock, Utilisation, slowest
from elastic_train.insight.tracing import Tracer
from elastic_train.job.auditor import Auditor, WrongGradient
from elastic_train.job.cells.stage import Stage
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.job.warm_up import FirstLoss
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.devices.switches import KeptSwitches
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.system.preemption import LeaveRequest
from elastic_train.system.watchdog import Watchdog
from elastic_train.system.wording import POWERS_OF_TEN, counted
from elastic_train.tasks.task import on_device
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import Standing
from elastic_train.tracking.progress import Status
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.commits import Commits
from elastic_train.training.memory import MemoryWatch, Meter
from elastic_train.training.step_sums import StepSums
from elastic_train.training.watch import Watch
from elastic_train.world.forming import Worlds
from elastic_train.world.quarantine import find_holes
from elastic_train.world.world import World

log = logging.getLogger(__name__)
MOST_REPEATS = 3
"""Consecutive repeats of a step that a rank may ask for, after unreadable samples or wrong gradients."""


Unfit = tuple[int, int, str]
"""Number of a data set, a sample, and the reason why it is unfit."""


class Inspected(NamedTuple):
    """Result of a process's row inspection: number of rows, first unfit one, error (name, text), and other unfit rows.

    `num_cut` is the number of rows that are longer than the task takes.
    """

    num_rows: int
    unfit: Unfit | None = None
    failure: tuple[str, str] | None = None
    others: tuple[Unfit, ...] = ()
    num_cut: int = 0


@dataclass(slots=True)
class Process:
    """State that a process keeps across its worlds."""

    plan: Plan
    state: AppliedState
    worlds: Worlds
    leave: LeaveRequest
    watchdog: Watchdog
    started_at: float
    use: StoreHealth
    meter: Meter
    save_memory: SaveMemory = field(default_factory=SaveMemory)
    files: BackgroundFiles = field(default_factory=BackgroundFiles)
    page: Page | None = None
    """The page it serves for Prometheus."""
    totals: PhaseTotals = field(default_factory=PhaseTotals)
    """Phase totals of the worlds that it has led."""
    utilisation: Utilisation | None = None
    """None if the FLOPs of a sample or the device's peak are unknown."""
    warned: set[str] = field(default_factory=set)
    """Warnings that are given once, e.g. about the commits' file system and about rates."""
    switches: KeptSwitches | None = None
    """This process's switches and its model's training modes before the first forward pass."""
    followed: set[str] = field(default_factory=set)
    """Actions that events have led to, according to `monitoring.on_event`."""
    done: set[str] = field(default_factory=set)
    """One-time work that is done."""
    inspected: list[Inspected] = field(default_factory=list)
    """Result of its row inspection before the run's first step."""


@dataclass(slots=True)
class Session:
    """A process in a world."""

    plan: Plan
    world: World
    state: AppliedState
    stage: Stage
    """This rank's stage."""
    gradients: GradientSum
    buffers: BufferMean
    assigned: Assignment
    """Lanes of every owner."""
    leave: LeaveRequest
    worlds: Worlds
    watchdog: Watchdog
    commits: Commits
    tracker: Tracker | None
    reduction: Reduction = "canonical"
    auditor: Auditor | None = None
    """Audits lanes, if configured."""
    clock: StepClock = field(default_factory=StepClock)
    watch: Watch | None = None
    """On rank 0 only."""
    page: Page | None = None
    utilisation: Utilisation | None = None
    tracer: Tracer | None = None
    """Traces this rank's steps, if configured."""
    holes: tuple[Hole, ...] = ()
    num_repeats: int = 0
    """Number of times that a step was repeated, after unreadable samples or wrong gradients."""
    unread: tuple[int, int] = (0, 0)
    """Last step with unreadable samples, and number of its repeats."""
    wrong: tuple[int, int] = (0, 0)
    """Last step with a wrong gradient, and number of its repeats."""
    memory: MemoryWatch | None = None
    first: FirstLoss | None = None
    """Computes this rank's next loss twice, unless done before."""
    lane: int | None = None
    """Lane being computed."""
    num_untargeted: int = 0
    """Number of this session's steps without any target."""
    remarks: set[str] = field(default_factory=set)
    """Remarks made about the validation set."""
    loss: float | None = None
    """Loss of the last step applied in this world."""

    @property
    def lanes(self) -> range:
        return self.assigned[self.world.mesh.owner]

    def steps(self) -> Iterator[Sequence[LaneBatch]]:
        """Yield the lanes' micro-batches of every step from the state's cursor to the last.

        A step that was not applied because samples could not be read is repeated without those in holes.
        """
        plan, state = self.plan, self.state
        while not self.is_over:
            num_left = plan.total_steps - state.step
            holes, repeats = self.holes, self.num_repeats
            self.watchdog.await_first()
            steps = plan.feed.training(plan.order, self.lanes, state.reached.cursor, num_left, holes)
            for lanes in self.watchdog.beating(self.patiently(steps)):
                yield lanes
                if self.num_repeats != repeats:
                    break

    def patiently(self, steps: Iterable[Sequence[LaneBatch]]) -> Iterator[Sequence[LaneBatch]]:
        """Yield the steps; wait while the storage of the data is away, half as long as peers wait for this rank."""
        return patiently(steps, self.plan.config.peer_timeout_s / 2, self.watchdog.resting)

    def leaving(self) -> list[bool]:
        """Return the processes that were asked to leave, as flags by rank; equal on every rank."""
        mine = torch.tensor(int(self.leave.is_set))
        return [bool(asked) for asked in self.world.group.all_gather(mine).flatten().tolist()]

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return on_device(tensors, self.plan.device, non_blocking=True)

    @property
    def is_over(self) -> bool:
        """True if no step follows: all are applied, or early stopping has ended training; equal on every rank."""
        return self.state.step >= self.plan.total_steps or self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """True if early stopping has ended training."""
        return is_exhausted(self.plan.config.validation.early_stopping, self.state.reached.improvement)

    @property
    def judged(self) -> EarlyStoppingConfig | None:
        """How validations are compared, so that the best state is committed; None if they are not."""
        config = self.plan.config
        return judged_by(config.validation.early_stopping, config.checkpoint.keep_best)

    @property
    def is_best(self) -> bool:
        """True if the validation of the current step was the best so far; only known if the job compares them."""
        improvement = self.state.reached.improvement
        return improvement is not None and self.state.step == improvement.best_step > 0

    def is_validation_due(self) -> bool:
        every = self.plan.validates_every
        return every is not None and self.state.step % every == 0

    def is_validation_missed(self) -> bool:
        """Return True if a fault left a rank without a validation of this step that is compared with others.

        Equal on every rank.
        """
        judged, reached = self.judged, self.state.reached
        if judged is None or self.state.step == 0 or not self.is_validation_due():
            return False
        known = improvement_for(judged, reached.improvement)
        has_it = known is not None and known.validated_at == self.state.step
        return not bool(self.world.group.all_gather(torch.tensor(int(has_it))).all())

    def quarantine(self, lanes: Sequence[LaneBatch]) -> None:
        """Make holes of row groups of the next step that no rank can read; `steps` then repeats the step.

        Raises UnreadableError if other ranks can read what this rank cannot, and PeerLostError on those. A hole found
        earlier at a later step, which was abandoned with that step, begins at this step instead.
        """
        step = self.state.step
        self.unread = (step, self.unread[1] + 1 if self.unread[0] == step else 1)
        self.num_repeats += 1
        may_have_passed = self.unread[1] <= MOST_REPEATS
        with self.watchdog.resting():
            found = find_holes(self.world, self.plan, self.state, lanes, may_have_passed=may_have_passed)
        clash = next((old for hole in found for old in self.holes if hole.overlaps(old)), None)
        if clash is not None:
            raise DataError(f"{clash}, left out already, is in a row group that cannot be read now: restore its file")
        again = {hole.lo for hole in found}
        self.holes = (*(hole for hole in self.holes if hole.lo not in again), *found)
        for hole in found:
            self.world.announce(f"QUARANTINED: {hole}: {hole.why}")

    def repeat(self, found: Sequence[WrongGradient]) -> None:
        """Report the ranks whose gradients of a step are wrong; `steps` then repeats the step, as nothing has changed.

        Raises WeightsDifferError after too many repeats in a row.
        """
        step = self.state.step
        self.wrong = (step, self.wrong[1] + 1 if self.wrong[0] == step else 1)
        self.num_repeats += 1
        if self.watch is not None:
            self.watch.tell_of(found, step)
        if self.wrong[1] > MOST_REPEATS:
            ranks = sorted({rank for one in found for rank in one.ranks})
            raise WeightsDifferError(
                f"step {step + 1}: ranks {ranks} compute other gradients than others do, {self.wrong[1]} times in a "
                "row: a kernel is not deterministic, or a device computes wrongly. The step is not applied: all ranks "
                "end, and the next start continues from the last commit. Leave out the machine that the events name"
            )

    def record_step(self, sums: StepSums, norm: float, seconds: float, *, standing: Standing) -> None:
        """Write the step just applied, or pending, to the history and, on rank 0, to tracker and progress."""
        state, loss, rate = self.state, sums.mean, sums.coverage.count / seconds
        done = state.step - (standing != "pending")
        before = self.plan.order.cursor_at(done, self.plan.micro_batch)
        self.world.history.step(
            step=done + 1,
            epoch=before.epoch,
            lo=before.offset,
            hi=before.offset + self.plan.micro_batch,
            lanes=self.lanes,
            num_samples=sums.coverage.count,
            num_left_out=sums.num_left_out,
            world=self.world.group.size,
            loss=loss,
            standing=standing,
            place=self.world.mesh.place if self.world.cell is not None else None,
        )
        if standing == "pending":
            return
        self.loss = loss
        if self.tracer is not None:
            self.tracer.applied(state.step)
        if self.memory is not None:
            self.memory.step(state.step)
        if self.page is not None:
            self._show(self.page.facts, sums, norm, seconds)
        if self.watch is not None:
            is_overflow = not math.isfinite(norm) and state.reached.num_nonfinite == 0
            num_failed = self.commits.num_failed_in_a_row
            self.watch.step(state.step, sums, norm, num_failed, is_overflow=is_overflow)
            self.commits.is_asked |= self.watch.take_wanted_commit()
        if self.tracker is not None:
            learning_rate = float(state.scheduler.get_last_lr()[0])
            values = {} if loss is None else {"train/loss": loss}
            values |= {"train/gradient_norm": norm, "train/learning_rate": learning_rate}
            account = state.reached.account
            counts = {"train/left_out": account.left_out, "train/truncated": account.truncated}
            values |= {name: count for name, count in counts.items() if count}
            values |= {
                f"train/samples/{source.name}": applied.count
                for source, applied in zip(self.plan.sources, state.reached.sources, strict=False)
            }
            if self.utilisation is not None:
                values["train/mfu"] = self.utilisation.mfu(rate, self.world.group.size)
            self.tracker.log(state.step, {**values, "train/samples_per_s": rate})
        self.show_progress(
            loss, rate, slowest(sums.ranks, self.world.mesh.num_lanes(self.assigned), self.world.mesh.alike)
        )

    def show_progress(
        self, loss: float | None = None, rate: float | None = None, late: tuple[int, float] | None = None
    ) -> None:
        """Show how far the run is, on rank 0."""
        if self.world.progress is None:
            return
        state, head = self.state, self.commits.head
        self.world.progress.update(
            Status(
                step=state.step,
                total_steps=self.plan.total_steps,
                loss=loss,
                samples_per_s=rate,
                world=self.world.group.size,
                last_commit_step=None if head is None else head.step,
                epochs=epochs_at(self.plan.order, state.reached.cursor, self.plan.micro_batch),
                total_epochs=None if self.plan.config.max_steps is not None else self.plan.config.epochs,
                slowest=late,
            )
        )

    def _show(self, facts: Facts, sums: StepSums, norm: float, seconds: float) -> None:
        """Show the step that was just applied on the node's page."""
        facts.add_step(self.state.step, sums.mean, norm, seconds, sums.coverage.count)
        facts.add_row(sums.ranks[self.world.group.rank])
        facts.samples_left_out = self.state.reached.account.left_out
        if self.watch is not None:
            commits = self.commits
            facts.events, facts.save_stall_s = self.watch.num_events, commits.last_stall_s
            facts.num_failed_saves, facts.num_skipped_saves = commits.num_failed, commits.num_skipped
            if commits.head is not None:
                facts.last_commit_step, facts.last_commit_at = commits.head.step, commits.head.created_at

    def note_targets(self, sums: StepSums) -> None:
        """Announce a step whose samples have no target: the first time, and at every tenfold number."""
        if sums.mean is not None or not sums.coverage.count:
            return
        self.num_untargeted += 1
        if self.num_untargeted in POWERS_OF_TEN:
            self.world.announce(
                f"WARNING: step {self.state.step}: no sample of it has a target, in data.train "
                f"{', '.join(self.plan.config.data.sources)} ({counted(self.num_untargeted, 'such step')} so far): its "
                "loss is no number, and nothing is learned from it; check labels and masks, or leave such rows out "
                "(a loss that is not to be divided has the weight None)"
            )

    def pause(self) -> None:
        """End this world's saves, displays and records; the tracker's run continues in the next world.

        Its first step reports this rank's memory again: until then, other ranks wait.
        """
        self.buffers.undo()  # this state may be committed, or continued by the next world
        self._end_saves_and_views()
        if self.watch is not None:
            self.watch.say_rest()
        if self.tracker is not None:
            self.tracker.pause()
        self.world.close()

    def close(self, status: str, *, goes_on: bool = False) -> None:
        """End the saves, the displays, and the tracker's run with its true status: FINISHED, FAILED or KILLED.

        `goes_on` is True if another process may replace this one.
        """
        self._end_saves_and_views()
        self.say_rest()
        if self.tracker is not None:
            self.tracker.finish(status, goes_on=goes_on)
        self.world.close()

    def say_rest(self) -> None:
        """Report the time and memory of the steps since the last report."""
        if self.memory is not None:
            self.memory.say()
        if self.watch is not None:
            self.watch.say_rest()

    def _end_saves_and_views(self) -> None:
        self.commits.abandon(is_live=self.worlds.is_live)
        if self.tracer is not None:
            self.tracer.close()
