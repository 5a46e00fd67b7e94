"""The commits of a session: when one is due, its start and outcome, and the last commit of a job.

Saves run concurrently with the steps. A failed save is counted and reported, and training continues until too many in a
row have failed. The last commit of a job is retried before the job fails.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.retention_policies import pin
from elastic_train.checkpoint.commits.writer import FenceNotUpdated
from elastic_train.checkpoint.saving.background_saves import Saves
from elastic_train.checkpoint.saving.cadence import Cadence
from elastic_train.checkpoint.saving.save_thread import SaveOutcome
from elastic_train.checkpoint.saving.store_health import MOST_UNWRITTEN, StoreHealth, StoreKeeper
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.mixture import SourceFacts
from elastic_train.core.order import VERSION
from elastic_train.data.dataset.training_sources import fingerprint_of
from elastic_train.errors import SavesFailedError, StorageError
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState, TrainProgress
from elastic_train.parallel.devices.switches import KeptSwitches
from elastic_train.system.failpoints import reach
from elastic_train.system.watchdog import Watchdog
from elastic_train.system.wording import POWERS_OF_TEN
from elastic_train.tracking.tracker import Tracker
from elastic_train.world.agreement import agree
from elastic_train.world.equal_weights import check_same_weights, level
from elastic_train.world.world import World

log = logging.getLogger(__name__)
LAST_COMMIT_TRIES = 3
LAST_COMMIT_PAUSE_S = 2.0
LAST_SAVE_PATIENCE_S = 5.0
"""Seconds that a process whose world ends waits for a save in flight, because the job resumes from it."""
MOST_FAILED = 10
"""Consecutive failed commits before training may end, which also takes the time in `give_up_after`."""


@dataclass(slots=True)
class Commits:
    """The commits that one process takes part in during one world.

    Only rank 0 knows the outcome of saves: `head` is the newest commit that it knows of, and the counters are its own.
    `num_skipped` is equal on every rank. Ranks whose machines round differently (`rounds_alike` is False) diverge in
    the last bits, and take rank 0's state before a commit.
    """

    plan: Plan
    world: World
    state: AppliedState
    watchdog: Watchdog
    saves: Saves
    cadence: Cadence
    tracker: Tracker | None
    head: CommitRecord | None
    use: StoreHealth
    keeper: StoreKeeper | None = None
    rounds_alike: bool = True
    switches: KeptSwitches | None = None
    looked_at: int = 0
    """Last step at which the switches were verified."""
    is_confirming_writable: bool = False
    is_pin_due: bool = False
    """True if the commit being saved is to be pinned, or the head if that save fails."""
    is_asked: bool = False
    """True if rank 0 was asked for a commit before the next regular one."""
    has_prepared: bool = False
    last_stall_s: float = 0.0
    num_failed: int = 0
    num_failed_in_a_row: int = 0
    why_failed: str = "on another rank"
    """Error of this rank's last failed save."""
    failing_since_s: float = 0.0
    """Time (monotonic) at which the first of these failures was found."""
    num_skipped: int = 0

    @property
    def is_busy(self) -> bool:
        """True if this rank's part of the last save is still being written."""
        return self.saves.is_busy

    def has_head_at(self, step: int) -> bool:
        """Return True if the newest commit is of this step; equal on every rank until this world's first commit."""
        return self.head is not None and self.head.step == step

    def is_due(self) -> bool:
        """Return True if the configuration commits at the step just applied; equal on every rank."""
        return self.cadence.is_due(self.state.step)

    def is_overdue(self) -> bool:
        """Return True if a commit is overdue: by rank 0's clock, or because an earlier world owes it."""
        if self.saves.is_busy:
            return False
        return self.saves.is_owed or (self.world.is_leader and (self.is_asked or self.cadence.is_overdue()))

    def is_hopeless(self) -> bool:
        """Return True if saves have failed so often, and for so long, that training should end; only rank 0 knows."""
        config = self.plan.config
        if config.give_up_after is None or self.num_failed_in_a_row < MOST_FAILED:
            return False
        return time.monotonic() - self.failing_since_s >= config.give_up_after_s

    def is_unable(self) -> bool:
        """Return True if this rank cannot write its part of commits or, as rank 0, their records."""
        return self.use.num_unwritten >= MOST_UNWRITTEN

    def confirm_writable(self, *, is_asked: bool) -> None:
        """Check in the background if this rank can write, when asked because another rank cannot."""
        self.is_confirming_writable = is_asked and self.use.confirm_writable()

    def begin(self, *, is_any_busy: bool, is_best: bool = False) -> None:
        """Begin to save the applied state.

        If a rank is still busy with the last save, skip this one; wait instead where every step is committed, or if the
        state `is_best`, as no later commit has it.
        """
        if is_any_busy and not is_best and self.plan.config.checkpoint.every_steps != 1:
            self.num_skipped += 1
            if self.num_skipped in POWERS_OF_TEN:
                self.world.announce(
                    f"commit at step {self.state.step} skipped ({self.num_skipped} so far): the last one is still "
                    "being written; commit less often: set checkpoint.every"
                )
            return
        if is_any_busy:
            with self.watchdog.resting():  # a store has its own deadlines
                self._take(self.saves.wait(self.world.group.check))
        self._check_weights()
        self._begin(is_last=False)

    def await_staging(self) -> None:
        """Wait until the state may change: a save in flight has its own copy."""
        if self.saves.is_staging:
            with self.watchdog.copying():
                self.saves.await_staging()

    def collect(self) -> None:
        """Record a save that has ended, if any; raise its error unless the storage caused it."""
        self._take(self.saves.collect())

    def prepare(self) -> None:
        """Allocate a GPU's staging memory, once per world and after a step, as many optimizers have no state before."""
        if self.plan.device.type == "cuda" and not self.has_prepared:
            self.has_prepared = True
            self.saves.prepare(self.state.pieces.tree(), self.state.layout.dims)

    def pin_newest(self) -> None:
        """Protect the newest commit, or the one being saved, from deletion; done by rank 0 only.

        A save in flight may delete the current head as soon as its own commit exists.
        """
        if not self.world.is_leader:
            return
        self.is_pin_due = is_busy = self.saves.is_busy
        self.collect()
        if not is_busy:
            self._pin(self.head)

    def finish(self) -> None:
        """Commit the final state: retry for a while, and raise StorageError on every rank if it fails.

        If etcd is unreachable for longer, the store's record is enough, because no later commit can follow. Until then
        only rank 0 retries, since parts that exist need not be written again.
        """
        self._check_weights()
        for num_left in range(LAST_COMMIT_TRIES, -1, -1):
            with self.watchdog.resting():
                ended = self.saves.wait(self.world.group.check)
                is_through, is_there = agree(self.world.group, lambda: self._look(ended, num_left))  # noqa: B023 - called at once
                if is_through:
                    return
                if num_left < LAST_COMMIT_TRIES:
                    time.sleep(LAST_COMMIT_PAUSE_S)
            self._begin(is_last=True, writes=self.world.is_leader or not is_there)

    def abandon(self, *, is_live: bool) -> None:
        """Abandon the save in flight; if the job resumes from commits rather than live members, wait for it first."""
        ended = self.saves.abandon(0.0 if is_live else LAST_SAVE_PATIENCE_S)
        if self.is_asked:
            self.saves.owe()
        if ended is not None and ended.commit is not None and self.world.is_leader:
            self._record_commit(ended, ended.commit)
        self._pin_if_due(ended)

    def failed(self) -> SavesFailedError:
        return SavesFailedError(
            f"at least {MOST_FAILED} saves in a row have failed, for {self.plan.config.give_up_after_s:.0f} s or more, "
            f"the last before step {self.state.step} ({self.why_failed}): make {self.world.store.url} writable and "
            "start again. The time in give_up_after sets for how long to try; null for ever"
        )

    def _check_weights(self) -> None:
        """Raise WeightsDifferError on every rank unless all hold the same weights: no commit mixes two models."""
        self._set_back_switches()
        if not self.rounds_alike:
            self.await_staging()
            with self.watchdog.resting():
                level(self.world.holders, self.state)
        check_same_weights(self.world.group, self.state.shards, self.state.step)

    def _set_back_switches(self) -> None:
        """Restore switches that have changed since the last check, and report them on the rank where they changed."""
        for line in () if self.switches is None else self.switches.set_back():
            log.warning(
                "%s after step %d, by the task or a library, and is set back at step %d: the bits of the steps between "
                "may differ from another run's. Set it where the model is built, on all ranks",
                line,
                self.looked_at,
                self.state.step,
            )
        self.looked_at = self.state.step

    def _begin(self, *, is_last: bool, writes: bool = True) -> None:
        """Begin to save the state that all ranks have assembled, including those that do not write it."""
        pieces = self.state.pieces
        if not writes:
            pieces.tree()
            return
        self.cadence.begin()
        self.is_asked = False
        if self.keeper is not None:
            self.keeper.keep_files()
        reach("commit")
        facts = describe_commit(self.plan, self.state, self.world.group.size)
        held, still = pieces.tree(), pieces.only_update_changes()
        self.saves.begin(held, facts, self.state.reached.intervals, still, is_last=is_last)

    def _take(self, ended: SaveOutcome | None) -> None:
        """Record a save's outcome, on rank 0 for all ranks; raise errors that the storage did not cause."""
        if ended is None:
            return
        if isinstance(ended.error, StorageError):
            self.why_failed = str(ended.error)
        if ended.error is None:
            self.use.note_written()
        elif (
            isinstance(ended.error, StorageError)
            and not isinstance(ended.error, FenceNotUpdated)
            and ended.awaits is None
        ):
            self.use.note_unwritten(ended.error, is_silent=ended.is_silent)
        if self.world.is_leader:
            self._record(ended)
        self._pin_if_due(ended)
        if ended.error is not None and not isinstance(ended.error, StorageError):
            raise ended.error

    def _pin_if_due(self, ended: SaveOutcome | None) -> None:
        if self.is_pin_due:
            error = ended.error if ended is not None else None
            self._pin(error.commit if isinstance(error, FenceNotUpdated) else self.head)

    def _pin(self, commit: CommitRecord | None) -> None:
        self.is_pin_due = False
        if commit is None:
            return
        try:
            pin(self.world.store, commit.key)
        except StorageError as error:
            self.world.announce(f"{commit.key} could not be pinned: {error}")

    def _record(self, ended: SaveOutcome) -> None:
        for noticed in self.keeper.take_said() if self.keeper is not None else ():
            self.world.announce(noticed)
        if ended.commit is not None:
            self._record_commit(ended, ended.commit)
        elif isinstance(ended.error, FenceNotUpdated):
            self.num_failed_in_a_row = 0  # it exists in the store
            self.world.announce(f"the commit of step {ended.step} is saved, but not yet known to etcd: {ended.error}")
        elif isinstance(ended.error, StorageError):
            if self.num_failed_in_a_row == 0:
                self.failing_since_s = time.monotonic()
            self.num_failed += 1
            self.num_failed_in_a_row += 1
            self.world.announce(
                f"commit at step {ended.step} FAILED ({self.num_failed} so far), training continues: {ended.error}"
            )
        if self.tracker is not None:
            counts = {"failed": self.num_failed, "skipped": self.num_skipped}
            times = {"seconds": ended.seconds, "stall_s": ended.stall_s}
            # At the saved step: two saves may be recorded in one step, and MLflow takes one value per step.
            self.tracker.log(ended.step, {f"commit/{name}": value for name, value in {**counts, **times}.items()})

    def _record_commit(self, ended: SaveOutcome, commit: CommitRecord) -> None:
        self.head, self.num_failed_in_a_row, self.last_stall_s = commit, 0, ended.stall_s
        self.world.history.commit(
            step=commit.step,
            key=commit.key,
            digest=commit.digest,
            parent=commit.parent,
            weights_sha256=commit.weights_sha256,
            created_at=commit.created_at,
            seconds=ended.seconds,
            stall_s=ended.stall_s,
        )
        if (reason := self.cadence.measured(ended.stall_s, ended.seconds)) is not None:
            self.world.announce(reason)
        if self.tracker is not None:
            self.tracker.commit(commit.step, commit.key)
        if ended.tidying_error is not None:
            self.world.announce(f"old commits could not be deleted: {ended.tidying_error}")

    def _look(self, ended: SaveOutcome | None, num_left: int) -> tuple[bool, bool]:
        """Return two flags: the applied state is committed; its commit exists, if only in the store."""
        self._take(ended)
        if self._is_committed():
            return True, True
        if (
            ended is not None
            and isinstance(ended.error, FenceNotUpdated)
            and ended.error.commit.step == self.state.step
        ):
            if num_left == 0:
                self._record_commit(ended, ended.error.commit)
            return num_left == 0, True
        if num_left == 0:
            why = ended.error if ended is not None else "the last save has not ended"
            raise StorageError(
                f"step {self.state.step} could not be committed in {LAST_COMMIT_TRIES} tries: {why}. Mend that, and "
                f"start again to resume from step {self.head.step if self.head else 0}"
            )
        return False, False

    def _is_committed(self) -> bool:
        """Return True if the newest commit has the applied state, and the validation that decides which is the best.

        Another process may have committed the state before its last validation.
        """
        head = self.head
        if head is None or head.step != self.state.step:
            return False
        return head.term == self.world.term or head.improvement == self.state.reached.improvement


def describe_commit(plan: Plan, state: AppliedState, world_size: int) -> CommitFacts:
    """Return the facts that a commit of the state records."""
    return CommitFacts(
        step=state.step,
        cursor=state.reached.cursor,
        coverage=state.reached.coverage,
        rng={"policy": "seed, step, lane", "seed": plan.config.run.seed},
        metrics=state.reached.validation,
        config_digest=plan.config.identity(),
        manifest_digest=plan.manifest.digest,
        world_size=world_size,
        account=state.reached.account,
        order=order_facts(plan),
        fast_steps=state.reached.fast_steps or None,
        skipped_steps=state.reached.skipped_steps or None,
        improvement=state.reached.improvement,
        sources=source_facts(plan, state.reached) or None,
        cut_dims=state.layout.dims or None,
    )


def source_facts(plan: Plan, reached: TrainProgress) -> tuple[SourceFacts, ...]:
    """Return a mixture's sources with the sums of their applied samples; empty for a single training set."""
    sums = reached.sources or [CoverageSums()] * len(plan.sources)
    return tuple(
        SourceFacts(source.name, source.share, source.manifest.num_rows, source.manifest.digest, applied)
        for source, applied in zip(plan.sources, sums, strict=True)
    )


def order_facts(plan: Plan) -> dict[str, int]:
    """Return the numbers that, with the seed, determine the sample order."""
    return {
        "version": VERSION,
        "num_samples": plan.manifest.num_rows,
        "num_lanes": plan.num_lanes,
        "micro_batch": plan.micro_batch,
        "block_row_groups": plan.order.block_row_groups,
        "lengths": fingerprint_of(plan.order),
    }
