"""Saves in the background: one in flight per rank, on an abandonable thread without collectives.

`begin` fixes what is saved at a step boundary. The thread copies it (`await_staging` waits for that, and must be called
before the state changes), writes this rank's part and posts a receipt; on rank 0 it waits for the other parts and
publishes. `collect` returns the outcome at a later boundary.

A world that ends abandons its save: nothing is published from then on, except by a publish in progress, which the fence
judges. So the next world, possibly in this process, reads a lineage that nobody here extends.

A save without progress is abandoned within its world: its thread is left behind, the save counts as failed, and the
next one begins. The limit is learned from successful saves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_train.checkpoint.commits.record import CommitFacts, CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter, Draft, attempt_folder
from elastic_train.checkpoint.format.layout import Planner, State, leaves_by_path
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.saving.save_thread import LOOK_EVERY_S, AdaptiveTimeout, SaveInFlight, SaveOutcome
from elastic_train.checkpoint.saving.staging import Snapshot, Staging, staged_bytes
from elastic_train.checkpoint.stores.store import Store
from elastic_train.core.lineage import Interval
from elastic_train.errors import StorageError
from elastic_train.placement.grains import CutDims

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Role:
    """A rank's part in its world's saves: writer `place` of `num_writers`, 0 being rank 0; None writes nothing.

    A rank without a place must not be the only holder of any piece.

    `unique` is a word shared by all ranks of this world, and no other world.
    """

    place: int | None
    num_writers: int
    unique: str


class SaveMemory:
    """State that saves keep across worlds of a process: plan, staging memory, timeout, an abandonment."""

    def __init__(self) -> None:
        self.planner = Planner()
        self.staging = Staging()
        self.timeout = AdaptiveTimeout()
        self.is_owed = False


class Saves:
    """One rank's saves in one world; `tidy` is called on the save's thread after every commit.

    `store` needs no deadlines: a save that hangs is abandoned as a whole.
    """

    def __init__(
        self,
        store: Store,
        commits: CommitWriter,
        term: int,
        role: Role,
        memory: SaveMemory,
        tidy: Callable[[CommitRecord], object] = lambda commit: None,
    ) -> None:
        self._store, self._commits, self._term, self._role = store, commits, term, role
        self._memory, self._tidy = memory, tidy
        self._flight: SaveInFlight | None = None
        self._num_begun = 0

    @property
    def is_busy(self) -> bool:
        return self._flight is not None and not self._flight.ended.is_set()

    @property
    def is_staging(self) -> bool:
        """True if the state may not change yet."""
        return self._flight is not None and not self._flight.staged.is_set()

    @property
    def is_owed(self) -> bool:
        """True if the last save was abandoned, or one was asked for, and none has begun since."""
        return self._memory.is_owed

    def owe(self) -> None:
        """Make a save due, in this world or the next."""
        self._memory.is_owed = True

    def prepare(self, state: State, dims: CutDims) -> None:
        """Allocate staging memory for such a state in the background if it is on a device: a second per 12 GB."""
        leaves = leaves_by_path(state)
        parts = self._memory.planner.plan(state, leaves, self._role.num_writers, dims).parts
        if self._role.place is None or self._role.place >= len(parts):
            return
        part = parts[self._role.place]
        devices = (slot.memory(leaves).device for slot in part.slots)
        if (device := next((one for one in devices if one.type == "cuda"), None)) is not None:
            self._memory.staging.prepare(staged_bytes(part), device)

    def begin(
        self,
        state: State,
        facts: CommitFacts,
        intervals: tuple[Interval, ...] | None = None,
        is_still: Callable[[StatePath], bool] = lambda path: False,
        *,
        is_last: bool = False,
    ) -> None:
        """Start to save a state; the last save must have been collected, and no other rank may skip this one.

        Tensors at paths that are `is_still` may be read until `await_staging` returns. With `is_last` the state does
        not change before the save is collected: host tensors are written in place, without staging. Raise ConfigError
        if the state cannot be saved.
        """
        assert self._flight is None, "a save is in flight"
        started = time.perf_counter()
        self._num_begun += 1
        self._memory.is_owed = False
        role, planner, leaves = self._role, self._memory.planner, leaves_by_path(state)
        plan = planner.plan(state, leaves, role.num_writers, facts.cut_dims)
        attempt = attempt_folder(facts.step, self._term, f"{role.unique}-{self._num_begun:04d}")
        if role.place is None or role.place >= len(plan.parts):
            return
        draft = Draft(attempt, plan, planner.encode(plan, leaves), facts, intervals)
        snapshot = Snapshot(plan.parts[role.place], leaves, (lambda path: True) if is_last else is_still)
        staging = None if is_last and not snapshot.is_on_device else self._memory.staging
        self._flight = SaveInFlight(self._store, self._commits, self._tidy, staging, role.place, draft, snapshot)
        self._flight.stall_s = time.perf_counter() - started

    def await_staging(self) -> None:
        """Wait until nothing reads the state any more."""
        if self._flight is not None:
            self._flight.await_staging()

    def collect(self) -> SaveOutcome | None:
        """Return the outcome of a finished save, once; a save without progress on this rank fails here."""
        flight = self._flight
        if flight is None or not (flight.ended.is_set() or self._is_stuck(flight)):
            return None
        self._flight = None
        if not flight.ended.is_set() and flight.commit is None:
            return self._abandon_stuck(flight)
        ended = flight.outcome()
        if ended.error is None:
            self._memory.timeout.learn(ended.seconds)
        return ended

    def wait(self, check: Callable[[float], None] = lambda waited_s: None) -> SaveOutcome | None:
        """Wait for the save in flight; return its outcome, None if there is none.

        `check` is called regularly with the seconds waited, and may raise: a lost rank never writes its part.
        """
        started = time.monotonic()
        while (flight := self._flight) is not None and not flight.ended.wait(LOOK_EVERY_S):
            if self._is_stuck(flight):
                break
            check(time.monotonic() - started)
        return self.collect()

    def abandon(self, patience_s: float = 0.0) -> SaveOutcome | None:
        """Abandon the save in flight if it does not end within `patience_s` seconds; return its outcome if it ended."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        flight.ended.wait(patience_s)
        flight.abandon()
        ended = flight.outcome() if flight.ended.is_set() or flight.commit is not None else None
        self._memory.is_owed = ended is None or ended.error is not None
        return ended

    def _is_stuck(self, flight: SaveInFlight) -> bool:
        return flight.progress.idle_s > self._memory.timeout.limit_s(flight.num_bytes)

    def _abandon_stuck(self, flight: SaveInFlight) -> SaveOutcome:
        limit_s = self._memory.timeout.limit_s(flight.num_bytes)
        flight.abandon()
        if flight.commit is not None:  # a publish had begun, and was waited for
            return flight.outcome()
        self._memory.timeout.lengthen()
        self._memory.is_owed = True
        awaits = flight.outcome().awaits
        where = (
            f"part {flight.place}" if flight.place else "rank 0" if awaits is None else f"part {awaits} did not come"
        )
        why = f"{self._store.url}: the save made no progress for {limit_s:.0f} s ({where}) and was abandoned"
        log.warning("%s; is the storage reachable?", why)
        if flight.place:  # rank 0 may wait longer than this rank, and at a job's end all ranks wait for rank 0
            flight.report_failure(why)
        return replace(flight.outcome(), error=StorageError(why))
