"""One process's part in a run: what the loop needs, and the few things it asks for at a step boundary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from elastic_train.checkpoint import CommitRecord, SaveMemory, SaveOutcome, Saves, Unheard
from elastic_train.checkpoint.interval.cadence import Cadence
from elastic_train.core.accounting import Hole
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import SavesFailedError, StorageError
from elastic_train.job.commit_facts import describe_commit
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.system.failpoints import reach
from elastic_train.system.preemption import LeaveRequest
from elastic_train.system.watchdog import Watchdog
from elastic_train.tracking.progress import Status
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.evaluation import evaluate
from elastic_train.world.forming import Worlds
from elastic_train.world.quarantine import find_holes
from elastic_train.world.world import World, agree

LAST_COMMIT_TRIES = 3
LAST_COMMIT_PAUSE_S = 2.0
LAST_SAVE_PATIENCE_S = 5.0
"""How long a process that ends with its world waits for a save in flight: the job goes on from there."""


@dataclass(frozen=True, slots=True)
class Process:
    """What a process keeps over all of its worlds."""

    plan: Plan
    state: AppliedState
    worlds: Worlds
    leave: LeaveRequest
    watchdog: Watchdog
    started_at: float
    save_memory: SaveMemory = field(default_factory=SaveMemory)


@dataclass(slots=True)
class Session:
    """A process in a world."""

    plan: Plan
    world: World
    state: AppliedState
    gradients: GradientSum
    lanes: range
    leave: LeaveRequest
    worlds: Worlds
    watchdog: Watchdog
    saves: Saves
    tracker: Tracker | None
    head: CommitRecord | None
    cadence: Cadence
    holes: tuple[Hole, ...] = ()
    num_failed_saves: int = 0
    num_failed_in_a_row: int = 0
    num_skipped_saves: int = 0

    def steps(self) -> Iterator[Sequence[LaneBatch]]:
        """Yield the lanes' micro-batches of every step from the state's cursor to the last.

        When a hole has been found, the step that was not applied comes again, without its samples.
        """
        plan, state = self.plan, self.state
        while (num_left := plan.total_steps - state.step) > 0:
            holes = self.holes
            self.watchdog.await_first()
            for lanes in self.watchdog.beating(
                plan.feed.training(plan.order, self.lanes, state.cursor, num_left, holes)
            ):
                yield lanes
                if self.holes is not holes:
                    break

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.plan.device, non_blocking=True) for name, tensor in tensors.items()}

    def is_validation_due(self) -> bool:
        every = self.plan.config.validation.every_steps
        return every is not None and self.state.step % every == 0

    def is_commit_due(self) -> bool:
        return self.cadence.is_due(self.state.step)

    def is_commit_overdue(self) -> bool:
        """Say whether the time for a commit has come: by rank 0's clock, or since an earlier world's was given up."""
        if self.saves.is_busy:
            return False
        return self.saves.is_owed or (self.world.is_leader and self.cadence.is_overdue())

    def is_saving_hopeless(self) -> bool:
        """Say whether so many saves in a row have failed that training should end; only rank 0 knows."""
        limit = self.plan.config.checkpoint.give_up_after
        return limit is not None and self.num_failed_in_a_row >= limit

    def quarantine(self, lanes: Sequence[LaneBatch]) -> None:
        """Make holes of the row groups that any rank could not read of the next step; `steps` then begins it anew.

        A hole that was found at a later step before, and given up with that step, begins here now.
        """
        found = find_holes(self.world, self.plan, self.state, lanes)
        again = {hole.group for hole in found}
        self.holes = (*(hole for hole in self.holes if hole.group not in again), *found)
        for hole in found:
            self.world.tell(f"QUARANTINED: {hole}: {hole.why}")

    def record_step(self, loss: float, norm: float, num_samples: int, num_left_out: int, seconds: float) -> None:
        """Write the step that was just applied to the history, and to tracker and progress on rank 0."""
        state = self.state
        lo = (state.step - 1) % self.plan.order.num_steps(self.plan.micro_batch) * self.plan.micro_batch
        self.world.history.step(
            step=state.step,
            epoch=(state.step - 1) // self.plan.order.num_steps(self.plan.micro_batch),
            lo=lo,
            hi=lo + self.plan.micro_batch,
            lanes=(self.lanes.start, self.lanes.stop),
            num_samples=num_samples,
            num_left_out=num_left_out,
            world=self.world.group.size,
            loss=loss,
        )
        if self.tracker is not None:
            rate = float(state.scheduler.get_last_lr()[0])
            values = {"train/loss": loss, "train/gradient_norm": norm, "train/learning_rate": rate}
            account = state.reached.account
            counts = {"train/left_out": account.left_out, "train/truncated": account.truncated}
            values |= {name: count for name, count in counts.items() if count}
            self.tracker.log(state.step, {**values, "train/samples_per_s": num_samples / seconds})
        if self.world.progress is not None:
            self.world.progress.update(
                Status(
                    step=state.step,
                    total_steps=self.plan.total_steps,
                    loss=loss,
                    samples_per_s=num_samples / seconds,
                    world=self.world.group.size,
                    term=self.world.term,
                    last_commit_step=self.head.step if self.head else None,
                    epoch=state.cursor.epoch,
                )
            )

    def validate(self) -> None:
        """Validate over all ranks and record the values; nothing without a validation set."""
        reach("validate")
        batches = self.plan.feed.validation(self.lanes)
        if batches is None:
            return
        with self.watchdog.resting():  # the first time a process asks, it imports them, for seconds
            self.plan.task.metrics()
        values = evaluate(
            self.plan.task,
            self.state.model,
            self.watchdog.beating(batches),
            self.world.group,
            self.plan.num_lanes,
            self.plan.device,
        )
        self.state.reached = replace(self.state.reached, validation=values)
        if self.tracker is not None:
            better = {name: metric.higher_is_better for name, metric in self.plan.task.metrics().items()}
            self.tracker.log(
                self.state.step,
                {f"validation/{name}": value for name, value in values.items()},
                {f"validation/{name}": is_so for name, is_so in {"loss": False, **better}.items() if is_so is not None},
            )
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "samples")
        self.world.tell(f"validation at step {self.state.step}: {shown}")

    def commit(self, *, is_busy: bool) -> None:
        """Begin to save the applied state, if no rank `is_busy` with the last save; else do what the policy says."""
        if is_busy and self.plan.config.checkpoint.when_busy == "skip":
            self.num_skipped_saves += 1
            self.world.tell(
                f"commit at step {self.state.step} skipped ({self.num_skipped_saves} so far): the last one is still "
                "being written; commit less often, or set checkpoint.when_busy to wait"
            )
            return
        if is_busy:
            with self.watchdog.resting():  # a store has deadlines of its own
                self._note(self.saves.wait(self.world.group.check))
        self._begin_save()

    def await_staging(self) -> None:
        """Return when the state may change: a save in flight has its own copy."""
        if self.saves.is_staging:
            with self.watchdog.copying():
                self.saves.await_staging()

    def note_saves(self) -> None:
        """Record a save that has ended; one that failed is counted and shown, and training goes on."""
        self._note(self.saves.collect())

    def _begin_save(self) -> None:
        self.cadence.begin()
        reach("commit")
        facts = describe_commit(self.plan, self.state, self.world.group.size)
        self.saves.begin(self.state.tensors(), facts, self.state.reached.intervals, self.state.stillness())

    def _note(self, ended: SaveOutcome | None) -> None:
        if ended is None:
            return
        if self.world.is_leader:  # whoever could not write its part has told rank 0
            self._tell(ended)
        if ended.error is not None and not isinstance(ended.error, StorageError):
            raise ended.error

    def _tell(self, ended: SaveOutcome) -> None:
        if ended.commit is not None:
            self._note_commit(ended, ended.commit)
        elif isinstance(ended.error, Unheard):
            self.num_failed_in_a_row = 0  # the store has taken it
            self.world.tell(f"commit at step {ended.step} exists, which etcd has not heard of yet: {ended.error}")
        elif isinstance(ended.error, StorageError):
            self.num_failed_saves += 1
            self.num_failed_in_a_row += 1
            self.world.tell(
                f"commit at step {ended.step} FAILED ({self.num_failed_saves} so far), going on: {ended.error}"
            )
        if self.tracker is not None:
            counts = {"failed": self.num_failed_saves, "skipped": self.num_skipped_saves}
            times = {"seconds": ended.seconds, "stall_s": ended.stall_s}
            # At the step that was saved: two saves may be noted at one, and MLflow is sent one value a step.
            self.tracker.log(ended.step, {f"commit/{name}": value for name, value in {**counts, **times}.items()})

    def _note_commit(self, ended: SaveOutcome, commit: CommitRecord) -> None:
        self.head, self.num_failed_in_a_row = commit, 0
        self.world.history.commit(
            step=commit.step,
            key=commit.key,
            digest=commit.digest,
            parent=commit.parent,
            created_at=commit.created_at,
            seconds=ended.seconds,
            stall_s=ended.stall_s,
        )
        if (reason := self.cadence.measured(ended.stall_s, ended.seconds)) is not None:
            self.world.tell(reason)
        if self.tracker is not None:
            self.tracker.commit(commit.step, commit.key)
        if ended.tidying_error is not None:
            self.world.tell(f"old commits could not be deleted: {ended.tidying_error}")

    def saves_failed(self) -> SavesFailedError:
        """Return the error that ends training on every rank."""
        limit = self.plan.config.checkpoint.give_up_after
        return SavesFailedError(
            f"{limit} saves in a row have failed, the last before step {self.state.step}: make {self.world.store.url} "
            "writable and start again, or set checkpoint.give_up_after to null"
        )

    def commit_or_fail(self) -> None:
        """Commit what a job ends with: tries again for a while, and raises StorageError on every rank if it fails.

        Where etcd is away for longer the store's word is enough: behind the last commit none makes up for it. Until
        then rank 0 alone tries again, for what exists need not be written again.
        """
        for num_left in range(LAST_COMMIT_TRIES, -1, -1):
            with self.watchdog.resting():
                ended = self.saves.wait(self.world.group.check)
                is_through, is_there = agree(self.world.group, lambda: self._look(ended, num_left))  # noqa: B023 - called at once
                if is_through:
                    return
                if num_left < LAST_COMMIT_TRIES:
                    time.sleep(LAST_COMMIT_PAUSE_S)
            if self.world.is_leader or not is_there:
                self._begin_save()

    def _look(self, ended: SaveOutcome | None, num_left: int) -> tuple[bool, bool]:
        """Say whether the applied state is committed, and whether its commit exists, if only by the store."""
        self._note(ended)
        if self.head is not None and self.head.step == self.state.step:
            return True, True
        if ended is not None and isinstance(ended.error, Unheard) and ended.error.commit.step == self.state.step:
            if num_left == 0:
                self._note_commit(ended, ended.error.commit)
            return num_left == 0, True
        if num_left == 0:
            raise StorageError(
                f"step {self.state.step} could not be committed in {LAST_COMMIT_TRIES} tries: make room in "
                f"{self.world.store.url} and start again, to go on from step {self.head.step if self.head else 0}"
            )
        return False, False

    def _abandon_save(self) -> None:
        """Give up the save in flight; where the job goes on from commits, give it some time first."""
        ended = self.saves.abandon(0.0 if self.worlds.is_live else LAST_SAVE_PATIENCE_S)
        if ended is not None and ended.commit is not None and self.world.is_leader:
            self._note_commit(ended, ended.commit)

    def pause(self) -> None:
        """End this world's saves, displays and records; the tracker's run goes on with the next world's."""
        self._abandon_save()
        if self.tracker is not None:
            self.tracker.pause()
        self.world.close()

    def close(self, status: str, *, goes_on: bool = False) -> None:
        """End the saves, the displays, and the tracker's run truthfully: FINISHED, FAILED or KILLED.

        `goes_on` says that another process may take this one's place.
        """
        self._abandon_save()
        if self.tracker is not None:
            self.tracker.finish(status, goes_on=goes_on)
        self.world.close()
