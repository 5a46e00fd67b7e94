"""Saves in the background: one in flight for each rank, on a thread without collectives that can be walked away from.

At a step boundary `begin` fixes what is saved. The thread copies it (`await_staging` returns when it has, and must be
called before the state changes), writes this rank's part and says that it is done; on rank 0 it waits for the others'
parts and publishes. What became of it is picked up at a later boundary, by `collect`.

A world that ends abandons its save: nothing of it is published from then on, except by a publish that has begun, which
is the fence's to judge. So the next world, which may be in this process, reads a lineage that nobody here extends.

A save that gets no further is given up in the same way, within its world: the thread is left where it is stuck, the
save counts as failed, and the next one begins. When that is, is learned from saves that ended well, as with steps.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_train.checkpoint import done
from elastic_train.checkpoint.format import WrittenPart, write_part
from elastic_train.checkpoint.giving_up import LOOK_EVERY_S, Abandoned, Gate, Patience
from elastic_train.checkpoint.layout import Planner, State, leaves_by_path
from elastic_train.checkpoint.prompt import PromptStore
from elastic_train.checkpoint.record import CommitFacts, CommitRecord, Path
from elastic_train.checkpoint.staging import Buffer, Snapshot, Staged, Staging
from elastic_train.checkpoint.stores import Store
from elastic_train.checkpoint.writer import CommitWriter, Draft, attempt_folder
from elastic_train.errors import StorageError
from elastic_train.failpoints import reach
from elastic_train.lineage import Interval

log = logging.getLogger(__name__)

RETRY_PAUSES_S = (0.2, 1.0)
PUBLISH_PATIENCE_S = 1.0
"""How long a world that ends waits for a publish that has begun; after that the fence alone decides."""


@dataclass(frozen=True, slots=True)
class Role:
    """A rank's part in its world's saves: it writes as `place` of `num_writers`, place 0 being rank 0; None: nothing.

    `unique` is a word that this world shares and no other has.
    """

    place: int | None
    num_writers: int
    unique: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a save ended: rank 0 has a commit, or whoever failed an error; `stall_s` is what training waited for it."""

    step: int
    commit: CommitRecord | None
    error: BaseException | None
    tidying_error: StorageError | None
    seconds: float
    stall_s: float


class SaveMemory:
    """What saves keep over all worlds of a process: plan, staging memory, patience, and whether one was given up."""

    def __init__(self) -> None:
        self.planner = Planner()
        self.staging = Staging()
        self.patience = Patience()
        self.is_owed = False


class Saves:
    """One rank's saves in one world; `tidy` is called, on the thread, behind every commit."""

    def __init__(
        self,
        store: Store,
        commits: CommitWriter,
        term: int,
        role: Role,
        memory: SaveMemory,
        tidy: Callable[[CommitRecord], None] = lambda commit: None,
    ) -> None:
        self._store, self._commits, self._term, self._role = store, commits, term, role
        self._memory, self._tidy = memory, tidy
        self._flight: _Flight | None = None
        self._num_begun = 0

    @property
    def is_busy(self) -> bool:
        """Say whether a save is in flight."""
        return self._flight is not None and not self._flight.ended.is_set()

    @property
    def is_staging(self) -> bool:
        """Say whether the state may not change yet."""
        return self._flight is not None and not self._flight.staged.is_set()

    @property
    def is_owed(self) -> bool:
        """Say whether the last save was given up, and none has begun since."""
        return self._memory.is_owed

    def begin(
        self,
        state: State,
        facts: CommitFacts,
        intervals: tuple[Interval, ...] | None = None,
        is_still: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        """Begin to save a state; the last save must have been collected, and no other rank may skip this one.

        Tensors at paths that `is_still` may be read until `await_staging` has returned. Raises ConfigError if the
        state holds what cannot be saved.
        """
        assert self._flight is None, "a save is in flight"
        started = time.perf_counter()
        self._num_begun += 1
        self._memory.is_owed = False
        role, planner, leaves = self._role, self._memory.planner, leaves_by_path(state)
        plan = planner.plan(state, leaves, role.num_writers)
        attempt = attempt_folder(facts.step, self._term, f"{role.unique}-{self._num_begun:04d}")
        if role.place is None or role.place >= len(plan.parts):
            return
        draft = Draft(attempt, plan, planner.encode(plan, leaves), facts, intervals)
        snapshot = Snapshot(plan.parts[role.place], leaves, is_still)
        self._flight = _Flight(
            self._store, self._commits, self._tidy, self._memory.staging, role.place, draft, snapshot
        )
        self._flight.stall_s = time.perf_counter() - started

    def await_staging(self) -> None:
        """Return when nothing reads the state any more."""
        if self._flight is not None:
            self._flight.await_staging()

    def collect(self) -> Ended | None:
        """Return how a save ended that has ended, once; one that gets no further on this rank ends here, failed."""
        flight = self._flight
        if flight is None or not (flight.ended.is_set() or self._is_stuck(flight)):
            return None
        self._flight = None
        if not flight.ended.is_set() and flight.commit is None:
            return self._give_up(flight)
        ended = flight.outcome()
        if ended.error is None:
            self._memory.patience.learn(ended.seconds)
        return ended

    def wait(self, check: Callable[[float], None] = lambda waited_s: None) -> Ended | None:
        """Wait for the save in flight; return how it ended.

        `check`, asked now and then with the seconds waited, may raise: a rank that is lost never writes its part.
        """
        started = time.monotonic()
        while (flight := self._flight) is not None and not flight.ended.wait(LOOK_EVERY_S):
            if self._is_stuck(flight):
                break
            check(time.monotonic() - started)
        return self.collect()

    def abandon(self, patience_s: float = 0.0) -> Ended | None:
        """Give the save in flight up, after some patience; return how it ended if it has."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        flight.ended.wait(patience_s)
        flight.abandon()
        ended = flight.outcome() if flight.ended.is_set() or flight.commit is not None else None
        self._memory.is_owed = ended is None or ended.error is not None
        return ended

    def _is_stuck(self, flight: _Flight) -> bool:
        return time.monotonic() - flight.moved_at_s > self._memory.patience.limit_s(flight.num_bytes)

    def _give_up(self, flight: _Flight) -> Ended:
        limit_s = self._memory.patience.limit_s(flight.num_bytes)
        flight.abandon()
        if flight.commit is not None:  # a publish had begun, and was waited for
            return flight.outcome()
        self._memory.patience.lengthen()
        self._memory.is_owed = True
        where = f"part {flight.place}" if flight.place else "rank 0"
        why = f"{self._store.url}: the save got no further for {limit_s:.0f} s ({where}) and was given up"
        log.warning("%s; does the storage answer?", why)
        if flight.place:  # rank 0 may have more patience, and all wait for it at a job's end
            threading.Thread(target=flight.tell_why, args=(why,), name="telling rank 0", daemon=True).start()
        return replace(flight.outcome(), error=StorageError(why))


class _Flight:
    """One save, on a thread of its own."""

    def __init__(
        self,
        store: Store,
        commits: CommitWriter,
        tidy: Callable[[CommitRecord], None],
        staging: Staging,
        place: int,
        draft: Draft,
        snapshot: Snapshot,
    ) -> None:
        self._store, self._commits, self._tidy = store, commits, tidy
        self._staging, self.place, self._draft, self._snapshot = staging, place, draft, snapshot
        self.num_bytes = snapshot.num_bytes
        self._began_at, self._seconds = time.perf_counter(), 0.0
        self.moved_at_s = time.monotonic()
        self.gate, self.ended = Gate(), threading.Event()
        self.staged, self.awaited = threading.Event(), threading.Event()
        self.stall_s = 0.0
        self.commit: CommitRecord | None = None
        self._error: BaseException | None = None
        self._tidying_error: StorageError | None = None
        threading.Thread(target=self._supervise, name=f"save of step {draft.facts.step}", daemon=True).start()

    def await_staging(self) -> None:
        if not self.staged.is_set():
            started = time.perf_counter()
            self.awaited.set()
            self.staged.wait()
            self.stall_s += time.perf_counter() - started

    def abandon(self) -> None:
        """Let nothing of it be published from here on, nor read of the state; its memory is the next save's then."""
        self.gate.close(PUBLISH_PATIENCE_S)
        self.staged.wait()

    def tell_why(self, why: str) -> None:
        """Tell rank 0 that this part will not be written, if the storage takes it."""
        with contextlib.suppress(StorageError):
            done.post(self._store, self._draft.attempt, self.place, done.Done(None, why))

    def outcome(self) -> Ended:
        step = self._draft.facts.step
        return Ended(step, self.commit, self._error, self._tidying_error, self._seconds, self.stall_s)

    def _supervise(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised, or told, where it is collected
            self._error = error
        finally:
            self._seconds = self._seconds or time.perf_counter() - self._began_at
            self.staged.set()
            self.ended.set()

    def _run(self) -> None:
        if self.place == 0:
            self.commit = self._commits.publish(self._draft, self._write_all, self._publishing())
            self._seconds = time.perf_counter() - self._began_at
            self._move()
            try:
                self._tidy(self.commit)
            except StorageError as error:
                self._tidying_error = error
            return
        try:
            written = done.Done(self._write_mine(), None)
        except StorageError as error:
            done.post(self._store, self._draft.attempt, self.place, done.Done(None, str(error)))
            raise
        self.gate.check()  # else its memory may have been another save's already
        done.post(self._store, self._draft.attempt, self.place, written)

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Pass the gate; from here on the state is not read any more, nor was it if the commit exists already."""
        self.staged.set()
        with self.gate.passing():
            yield

    def _write_all(self) -> Sequence[WrittenPart]:
        """Write this rank's part, and wait for those of the others."""
        mine = self._write_mine()
        others = range(1, len(self._draft.plan.parts))
        return [mine, *(self._await_part(part) for part in others)]

    def _await_part(self, part: int) -> WrittenPart:
        written = done.wait_for(self._store, self._draft.attempt, part, self.gate.pause)
        self._move()
        return written

    def _write_mine(self) -> WrittenPart:
        snapshot = self._snapshot
        buffer = self._staging.buffer(snapshot.num_bytes, is_pinned=snapshot.is_on_device)
        with self._copying(buffer) as contents:
            reach("write")
            return self._write_stubbornly(contents)

    @contextlib.contextmanager
    def _copying(self, buffer: Buffer) -> Iterator[Staged]:
        """Copy the state on a thread of its own, and wait for it at the end; give what is written."""
        contents = Staged(buffer.contents_of(self._snapshot.part), self.awaited.is_set)
        name = f"copy of step {self._draft.facts.step}"
        threading.Thread(target=self._copy, args=(buffer, contents), name=name, daemon=True).start()
        try:
            yield contents
        finally:
            self.staged.wait()

    def _copy(self, buffer: Buffer, contents: Staged) -> None:
        try:
            self._snapshot.copy(buffer, self.gate.check, contents.tell)
        except BaseException as error:  # noqa: BLE001 - raised to who writes
            contents.fail(error)
        finally:
            self._move()
            self.staged.set()

    def _write_stubbornly(self, contents: Staged) -> WrittenPart:
        for pause_s in RETRY_PAUSES_S:
            try:
                return self._write(contents)
            except StorageError:
                contents.wait()  # what cannot be copied will not be written by trying again
                self.gate.pause(pause_s)
        return self._write(contents)

    def _write(self, contents: Iterable[memoryview]) -> WrittenPart:
        part = self._draft.plan.parts[self.place]
        plain = self._draft.plain if self.place == 0 else {}
        return write_part(
            PromptStore(self._store, self._move), self._draft.attempt, part, self._checking(contents), plain
        )

    def _move(self) -> None:
        self.moved_at_s = time.monotonic()

    def _checking(self, contents: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the bytes as long as the save is wanted."""
        for content in contents:
            self.gate.check()
            yield content


__all__ = ["Abandoned", "Ended", "Gate", "Role", "SaveMemory", "Saves"]
