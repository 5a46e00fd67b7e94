"""One process's part in a run: what the loop needs, and the few things it asks for at a step boundary."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.checkpoint import SaveMemory
from elastic_train.checkpoint.commits.improvement import improvement_for, is_exhausted
from elastic_train.checkpoint.saving.store_health import StoreHealth
from elastic_train.config.recipe import parse_best
from elastic_train.core.accounting import Hole
from elastic_train.core.lanes import Assignment
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import ConfigError, DataError, StorageError, WeightsDifferError
from elastic_train.insight.page import Facts, Page
from elastic_train.insight.phases import StepClock, slowest
from elastic_train.insight.recovery_traces import RecoveryTraces
from elastic_train.insight.totals import PhaseTotals
from elastic_train.insight.tracing import Tracer
from elastic_train.insight.utilisation import Utilisation
from elastic_train.job.auditing.auditor import Auditor, WrongGradient
from elastic_train.job.cells.stage import Stage
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.job.warm_up import FirstLoss
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.devices.switches import KeptSwitches
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.reductions import Reduction
from elastic_train.system.failpoints import reach
from elastic_train.system.preemption import LeaveRequest
from elastic_train.system.watchdog import Watchdog
from elastic_train.system.wording import counted
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import Standing
from elastic_train.tracking.progress import Status
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.commits import Commits
from elastic_train.training.evaluation import evaluate
from elastic_train.training.memory.meter import Meter
from elastic_train.training.memory.watching import MemoryWatch
from elastic_train.training.step_sums import StepSums
from elastic_train.training.watch import Watch
from elastic_train.world.forming import Worlds
from elastic_train.world.quarantine import find_holes
from elastic_train.world.world import World

log = logging.getLogger(__name__)
MOST_REPEATS = 3
"""How often in a row a rank may say that it can read now what it could not read for its step, or compute it wrongly."""


Unfit = tuple[int, int, str]
"""The number of a dataset, a sample, and what is wrong with it."""


class Inspected(NamedTuple):
    """How many rows a process has had inspected, the first unfit one, the error that ended it, and other unfit rows.

    Of the error it has the name and the text. `num_cut` of the rows are longer than the task takes.
    """

    num_rows: int
    unfit: Unfit | None = None
    failure: tuple[str, str] | None = None
    others: tuple[Unfit, ...] = ()
    num_cut: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """What a process keeps over all of its worlds."""

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
    """What it serves for Prometheus."""
    traces: RecoveryTraces | None = None
    totals: PhaseTotals = field(default_factory=PhaseTotals)
    """Of the worlds that it has led."""
    utilisation: Utilisation | None = None
    """None where the FLOPs of a sample or the device's peak are unknown."""
    warned: set[str] = field(default_factory=set)
    """What it has said once, about the file system of its commits and about rates."""
    switches: KeptSwitches | None = None
    """Those of this process, and its model's training modes, as they were before the first forward pass."""
    done: set[str] = field(default_factory=set)
    """What it has done once, and need not do again."""
    inspected: list[Inspected] = field(default_factory=list)
    """What came of its part of the rows, once it has had that inspected before the run's first step."""


@dataclass(slots=True)
class Session:
    """A process in a world."""

    plan: Plan
    world: World
    state: AppliedState
    stage: Stage
    """What this rank runs of its lanes."""
    gradients: GradientSum
    buffers: BufferMean
    assigned: Assignment
    """The lanes of every replica, or of every rank that computes its own."""
    leave: LeaveRequest
    worlds: Worlds
    watchdog: Watchdog
    commits: Commits
    tracker: Tracker | None
    reduction: Reduction = "canonical"
    auditor: Auditor | None = None
    """Has lanes computed twice, if some are to be."""
    clock: StepClock = field(default_factory=StepClock)
    watch: Watch | None = None
    """Rank 0's."""
    page: Page | None = None
    utilisation: Utilisation | None = None
    tracer: Tracer | None = None
    """Takes traces of this rank, if its steps are to be traced."""
    holes: tuple[Hole, ...] = ()
    num_repeats: int = 0
    """How often a step has to come again because samples of it could not be read."""
    unread: tuple[int, int] = (0, 0)
    """The last such step, and how often."""
    wrong: tuple[int, int] = (0, 0)
    """The last step of which a gradient was wrong, and how often."""
    memory: MemoryWatch | None = None
    first: FirstLoss | None = None
    """Computes this rank's next loss twice, if that was not done."""
    lane: int | None = None
    """The lane that is being computed."""
    num_untargeted: int = 0
    """Steps of this session of which no sample has a target."""
    remarks: set[str] = field(default_factory=set)
    """What was said of the validation set."""
    loss: float | None = None
    """Of the step that was applied last in this world."""

    @property
    def lanes(self) -> range:
        """The lanes that this rank has a part in."""
        return self.assigned[self.world.mesh.owner]

    def steps(self) -> Iterator[Sequence[LaneBatch]]:
        """Yield the lanes' micro-batches of every step from the state's cursor to the last.

        When samples could not be read, the step that was not applied comes again, without those of holes.
        """
        plan, state = self.plan, self.state
        while not self.is_over:
            num_left = plan.total_steps - state.step
            holes, repeats = self.holes, self.num_repeats
            self.watchdog.await_first()
            for lanes in self.watchdog.beating(
                plan.feed.training(plan.order, self.lanes, state.cursor, num_left, holes)
            ):
                yield lanes
                if self.num_repeats != repeats:
                    break

    def leaving(self) -> list[bool]:
        """Return, by rank, which processes of the world have been asked to leave; equal on every rank."""
        mine = torch.tensor(int(self.leave.is_set))
        return [bool(asked) for asked in self.world.group.all_gather(mine).flatten().tolist()]

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.plan.device, non_blocking=True) for name, tensor in tensors.items()}

    @property
    def is_over(self) -> bool:
        """Whether no step follows: all are applied, or validations do not improve any more; alike on every rank."""
        return self.state.step >= self.plan.total_steps or self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """Whether so many validations in a row were no better that training ends."""
        return is_exhausted(self.plan.config.validation.early_stopping, self.state.reached.improvement)

    @property
    def is_best(self) -> bool:
        """Whether the validation of this very step was the best so far; known with early stopping alone."""
        improvement = self.state.reached.improvement
        return improvement is not None and self.state.step == improvement.best_step > 0

    def is_validation_due(self) -> bool:
        every = self.plan.validates_every
        return every is not None and self.state.step % every == 0

    def is_validation_missed(self) -> bool:
        """Say whether a rank lacks a validation of this step, on which it depends when training ends: a fault came.

        Alike on every rank.
        """
        stopping, reached = self.plan.config.validation.early_stopping, self.state.reached
        if stopping is None or self.state.step == 0 or not self.is_validation_due():
            return False
        known = improvement_for(stopping, reached.improvement)
        has_it = known is not None and known.validated_at == self.state.step
        return not bool(self.world.group.all_gather(torch.tensor(int(has_it))).all())

    def quarantine(self, lanes: Sequence[LaneBatch]) -> None:
        """Make holes of the row groups of the next step that nobody can read; `steps` then repeats it.

        Raises UnreadableError where others can read what this rank cannot, and PeerLostError on those. A hole that was
        found at a later step before, and given up with that step, begins here now.
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
        """Say whose gradients are wrong in a step, which `steps` then repeats, as nothing has changed yet.

        Raises WeightsDifferError where that has come too often in a row.
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

    def step_back(self, *, is_unable: bool) -> bool:
        """Let the ranks that cannot write the commits, as others can, step back; say whether another world is to form.

        Where this process has one world only, they end, and the others continue: with ConfigError where they may not
        write, with StorageError, after which their launcher starts them again, where it may have been an accident.
        """
        group, use = self.world.group, self.commits.use
        unable = [rank for rank, is_it in enumerate(group.all_gather(torch.tensor(int(is_unable)))) if is_it]
        for rank in unable:
            why = group.broadcast_object(
                f"on {socket.gethostname()} cannot write where the commits are ({use.why})", rank
            )
            what = "trains on, writes no part and does not lead until it can" if self.worlds.is_live else "ends"
            self.world.announce(f"rank {rank} {why}, and others can: it {what}")
        if is_unable:
            self._stop_writing()
        return self.worlds.is_live

    def _stop_writing(self) -> None:
        use = self.commits.use
        what = f"this node cannot write to {self.world.store.url}, and others can: {use.why}"
        if not self.worlds.is_live and use.is_refused:
            raise ConfigError(f"{what}. Check how it is mounted here, permissions and credentials, and start it again")
        if not self.worlds.is_live:
            raise StorageError(f"{what}. It ends, and tries again if its launcher starts it again")
        log.warning("%s. It trains on, writes no part of commits and does not lead until it can", what)
        self.world.history.unwritable(step=self.state.step, why=use.why)
        use.exclude()

    def record_step(self, sums: StepSums, norm: float, seconds: float, *, standing: Standing) -> None:
        """Write the step that was just applied, or is pending, to the history; to tracker and progress on rank 0."""
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
        if self.world.progress is not None:
            self.world.progress.update(
                Status(
                    step=state.step,
                    total_steps=self.plan.total_steps,
                    loss=loss,
                    samples_per_s=rate,
                    world=self.world.group.size,
                    term=self.world.term,
                    last_commit_step=head.step if (head := self.commits.head) else None,
                    epoch=self.plan.order.num_epochs(state.cursor),
                    slowest=slowest(sums.ranks, self.world.mesh.num_lanes(self.assigned), self.world.mesh.alike),
                )
            )

    def _show(self, facts: Facts, sums: StepSums, norm: float, seconds: float) -> None:
        """Put the step that was just applied on the node's page."""
        facts.add_step(self.state.step, sums.mean, norm, seconds, sums.coverage.count)
        facts.add_row(sums.ranks[self.world.group.rank])
        facts.samples_left_out = self.state.reached.account.left_out
        if self.watch is not None:
            commits = self.commits
            facts.events, facts.save_stall_s = self.watch.num_events, commits.last_stall_s
            facts.num_failed_saves, facts.num_skipped_saves = commits.num_failed, commits.num_skipped
            if commits.head is not None:
                facts.last_commit_step, facts.last_commit_at = commits.head.step, commits.head.created_at

    def validate(self) -> None:
        """Validate over all ranks and record the values; nothing without a validation set."""
        reach("validate")
        mesh = self.world.mesh
        batches = self.plan.feed.validation(mesh.assigned(self.plan.num_lanes)[mesh.owner])
        if batches is None:
            return
        self.world.history.validate(step=self.state.step)
        with self.watchdog.resting():  # the first time a process asks, it imports them, for seconds
            higher = {name: metric.higher_is_better for name, metric in self.plan.task.metrics().items()}
        shards, shows = self.state.shards, self.plan.config.validation.weights
        averaged = shards.averaged(self.world.group) if shows == "ema" else contextlib.nullcontext()
        with self.buffers.untouched(), averaged:
            values = evaluate(
                self.plan.task,
                self.state.model,
                self.watchdog.beating(batches),
                shards,
                self.world,
                self.plan.num_lanes,
                self.plan.device,
                self.stage,
                self._remark,
            )
        self._note(values)
        if self.tracker is not None:
            better = {"loss": False, **higher}
            self.tracker.log(
                self.state.step,
                {f"validation/{name}": value for name, value in values.items() if value is not None},
                {f"validation/{name}": is_so for name, is_so in better.items() if is_so is not None},
            )
        shown = ", ".join(
            f"{name} is no number" if value is None else f"{name} {value:.4f}"
            for name, value in values.items()
            if name != "samples" and "/" not in name  # those of classes are logged
        )
        self.world.announce(f"validation at step {self.state.step}: {shown}")

    def _remark(self, text: str) -> None:
        """Say once what is wrong with the validation set."""
        if text not in self.remarks:
            self.remarks.add(text)
            self.world.announce(f"WARNING: data.validation {self.plan.config.data.validation}: {text}")

    def note_targets(self, sums: StepSums) -> None:
        """Say that no sample of the step that was applied has a target: the first time, and after every tenfold."""
        if sums.mean is not None or not sums.coverage.count:
            return
        self.num_untargeted += 1
        if self.num_untargeted in (10**power for power in range(10)):
            self.world.announce(
                f"WARNING: step {self.state.step}: no sample of it has a target, in data.train "
                f"{', '.join(self.plan.config.data.sources)} ({counted(self.num_untargeted, 'such step')} so far): its "
                "loss is no number, and nothing is learned from it; check labels and masks, or leave such rows out "
                "(a loss that is not to be divided has the weight None)"
            )

    def _note(self, values: Mapping[str, float | None]) -> None:
        """Keep what a validation has found, and say so if training ends by it."""
        stopping, reached = self.plan.config.validation.early_stopping, self.state.reached
        improvement = improvement_for(stopping, reached.improvement)
        if stopping is not None and improvement is not None:
            metric, _ = parse_best(stopping.metric)
            improvement = improvement.after(self.state.step, values.get(metric), stopping.min_delta)
        self.state.reached = replace(reached, validation=values, improvement=improvement)
        if stopping is not None and improvement is not None and self.is_exhausted:
            self.world.announce(
                f"early stopping after step {self.state.step}: {improvement.num_since} validations in a row were not "
                f"better ({stopping.metric}) than that of step {improvement.best_step}, {improvement.best}"
            )

    def pause(self) -> None:
        """End this world's saves, displays and records; the tracker's run continues in the next world."""
        self._end_saves_and_views()
        if self.tracker is not None:
            self.tracker.pause()
        self.world.close()

    def close(self, status: str, *, goes_on: bool = False) -> None:
        """End the saves, the displays, and the tracker's run truthfully: FINISHED, FAILED or KILLED.

        `goes_on` says that another process may take this one's place.
        """
        self._end_saves_and_views()
        if self.tracker is not None:
            self.tracker.finish(status, goes_on=goes_on)
        self.world.close()

    def say_rest(self) -> None:
        """Say what the steps since the last time have taken, of time and memory."""
        if self.memory is not None:
            self.memory.say()
        if self.watch is not None:
            self.watch.say_rest()

    def _end_saves_and_views(self) -> None:
        self.commits.abandon(is_live=self.worlds.is_live)
        if self.tracer is not None:
            self.tracer.close()
        self.say_rest()
