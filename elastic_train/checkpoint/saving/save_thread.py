"""One save on its own thread: it copies the state, writes this rank's part, and on rank 0 publishes all parts.

It uses no collectives, so it can be abandoned at any time: once its gate is closed, no publish begins, and the state is
not read any more.

A save is abandoned when its world ends or it makes no progress: storage that hangs cannot be interrupted, but nobody
has to wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter, Draft
from elastic_train.checkpoint.format.dcp import WrittenPart, write_part
from elastic_train.checkpoint.saving.staging import Buffer, Snapshot, Staged, Staging
from elastic_train.checkpoint.stores.store import KeyMissing, Store, create_once, read
from elastic_train.errors import StorageError
from elastic_train.system.failpoints import reach
from rendezvous.waiting import GivenUp, begin, start_thread

T = TypeVar("T")
TIMES_LONGEST, LEAST_S, MOST_S = 10.0, 20.0, 600.0
"""Limit without progress: this multiple of the longest published save, within bounds in seconds."""

SLOWEST_BYTES_S = 20e6
"""Slowest rate that counts as progress: uploading or syncing a whole part reports nothing before its end."""


LOOK_EVERY_S = 0.1


class Abandoned(Exception):  # noqa: N818 - not a failure: the world has ended
    """Raised in a save that is no longer wanted."""


class PublishGate:
    """A gate that a save may pass to publish until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise Abandoned if the gate is closed."""
        if self._closed.is_set():
            raise Abandoned

    def pause(self, seconds: float) -> None:
        """Sleep, or raise Abandoned as soon as the gate is closed."""
        if self._closed.wait(seconds):
            raise Abandoned

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Hold the gate open during a publish; raise Abandoned if it is closed."""
        with self._lock:
            self.check()
            yield

    def close(self, patience_s: float) -> None:
        """Prevent any new publish, and wait up to `patience_s` seconds for one in progress."""
        self._closed.set()
        if self._lock.acquire(timeout=patience_s):
            self._lock.release()


class AdaptiveTimeout:
    """The limit on a save without progress; each abandoned save doubles it, in case storage is only slow."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._num_abandoned = 0

    def limit_s(self, num_bytes: int) -> float:
        """Return the limit in seconds if no rank writes more than about `num_bytes`."""
        learned_s = min(MOST_S, max(LEAST_S, TIMES_LONGEST * self._longest_s) * 2.0**self._num_abandoned)
        return max(learned_s, num_bytes / SLOWEST_BYTES_S)

    def learn(self, seconds: float) -> None:
        self._longest_s, self._num_abandoned = max(seconds, self._longest_s), 0

    def lengthen(self) -> None:
        """Double the limit after an abandoned save."""
        self._num_abandoned = min(self._num_abandoned + 1, 10)


class LastProgress:
    """Time of the last progress, initially now."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        self._at_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._at_s


def call_abandonable(act: Callable[[Callable[[], None]], T], limit_s: float) -> T:
    """Run a storage operation on another thread; return its result or raise its error.

    `act` gets a function to call on every sign of progress. Raise StorageError, and leave the thread behind, after
    `limit_s` seconds without progress; the thread's later actions may still take effect.
    """
    progress = LastProgress()
    call = begin("abandonable", lambda: act(progress.note))
    try:
        return call.result_unless(lambda: progress.idle_s > limit_s, LOOK_EVERY_S)
    except GivenUp:
        raise StorageError(
            f"the storage made no progress for {limit_s:.0f} s and was abandoned; is it reachable?"
        ) from None
    except OSError as error:
        raise StorageError(str(error)) from error


RETRY_PAUSES_S = (0.2, 1.0)
Contents = Staged | Sequence[memoryview]
"""Bytes of a part's tensors in order, for one or more passes."""
PUBLISH_PATIENCE_S = 1.0
"""Seconds that an ending world waits for a publish in progress; after that the fence alone decides."""


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The outcome of a save: a commit on rank 0, an error on a rank that failed.

    `seconds` is from its start to its publication or failure; training waited for `stall_s` of them. `awaits` is the
    place of the rank whose part is missing, None if no other part was awaited; `is_silent`: this rank's part failed,
    and its receipt could not be written either.
    """

    step: int
    commit: CommitRecord | None
    error: BaseException | None
    tidying_error: StorageError | None
    seconds: float
    stall_s: float
    awaits: int | None = None
    is_silent: bool = False


class SaveInFlight:
    """One save, started at once; `num_bytes` is the size of the largest part, which rank 0 may have to wait for.

    Without `staging` the state is written in place: it does not change while the save is wanted.
    """

    def __init__(
        self,
        store: Store,
        commits: CommitWriter,
        tidy: Callable[[CommitRecord], object],
        staging: Staging | None,
        place: int,
        draft: Draft,
        snapshot: Snapshot,
    ) -> None:
        self._store, self._commits, self._tidy = store, commits, tidy
        self._staging, self.place, self._draft, self._snapshot = staging, place, draft, snapshot
        self.num_bytes = max(part.num_bytes for part in draft.plan.parts)
        self._began_at, self._seconds = time.perf_counter(), 0.0
        self.progress = LastProgress()
        self.gate, self.ended = PublishGate(), threading.Event()
        self.staged, self.awaited = threading.Event(), threading.Event()
        self.stall_s = 0.0
        self.commit: CommitRecord | None = None
        self._error: BaseException | None = None
        self._tidying_error: StorageError | None = None
        self._awaits: int | None = None
        self._is_silent = False
        try:
            start_thread(f"save of step {draft.facts.step}", self._supervise)
        except OSError as error:
            self._error, self._is_silent = StorageError(str(error)), place != 0
            self.staged.set()
            self.ended.set()

    def await_staging(self) -> None:
        """Wait until nothing reads the state any more; the time counts as a stall."""
        if not self.staged.is_set():
            started = time.perf_counter()
            self.awaited.set()
            self.staged.wait()
            self.stall_s += time.perf_counter() - started

    def abandon(self) -> None:
        """Prevent it from publishing and from reading the state; the next save may reuse its memory."""
        self.gate.close(PUBLISH_PATIENCE_S)
        self.staged.wait()

    def report_failure(self, why: str) -> None:
        """Tell rank 0 that this part will not be written, as soon as storage accepts that."""
        begin("reporting to rank 0", lambda: self._post(None, why))

    def _report(self, why: str) -> None:
        try:
            self._post(None, why)
        except StorageError:
            self._is_silent = True
            raise

    def _post(self, written: WrittenPart | None, error: str | None = None) -> None:
        post(self._store, self._draft.attempt, self.place, PartReceipt(written, error))

    def outcome(self) -> SaveOutcome:
        """Return what is known of its end."""
        step = self._draft.facts.step
        known = (self._error, self._tidying_error, self._seconds, self.stall_s, self._awaits, self._is_silent)
        return SaveOutcome(step, self.commit, *known)

    def _supervise(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised, or reported, where it is collected
            self._error = error
        finally:
            self._seconds = self._seconds or time.perf_counter() - self._began_at
            del self._snapshot  # an error would keep it, by its frames
            self.staged.set()
            self.ended.set()

    def _run(self) -> None:
        if self.place == 0:
            self.commit = self._commits.publish(self._draft, self._write_all, self._publishing())
            self._seconds = time.perf_counter() - self._began_at
            self.progress.note()
            try:
                self._tidy(self.commit)
            except StorageError as error:
                self._tidying_error = error
            return
        try:
            written = self._write_mine()
        except StorageError as error:
            self._report(str(error))
            raise
        self.gate.check()  # after closing, the written bytes may be another save's
        self._post(written)

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Pass the gate; from here on the state is not read any more."""
        self.staged.set()
        with self.gate.passing():
            yield

    def _write_all(self) -> Sequence[WrittenPart]:
        """Write this rank's part, and wait for the others."""
        mine = self._write_mine()
        others = range(1, len(self._draft.plan.parts))
        return [mine, *(self._await_part(part) for part in others)]

    def _await_part(self, part: int) -> WrittenPart:
        self._awaits = part
        written = wait_for(self._store, self._draft.attempt, part, self.gate.pause)
        self._awaits = None
        self.progress.note()
        return written

    def _write_mine(self) -> WrittenPart:
        with self._contents() as contents:
            if self.place == 0:
                self._commits.look()  # while the state is copied: training does not wait for the store
            reach("write")
            return self._write_stubbornly(contents)

    def _contents(self) -> contextlib.AbstractContextManager[Contents]:
        snapshot = self._snapshot
        if self._staging is None:
            self.staged.set()
            return snapshot.in_place()
        return self._copying(self._staging.buffer(snapshot.num_bytes, snapshot.device))

    @contextlib.contextmanager
    def _copying(self, buffer: Buffer) -> Iterator[Staged]:
        """Copy the state on a thread of its own, and wait for it at the end; yield the bytes to write."""
        contents = Staged(buffer.contents_of(self._snapshot.part), self.awaited.is_set)
        try:
            start_thread(f"copy of step {self._draft.facts.step}", lambda: self._copy(buffer, contents))
        except OSError as error:
            raise StorageError(str(error)) from error
        try:
            yield contents
        finally:
            self.staged.wait()

    def _copy(self, buffer: Buffer, contents: Staged) -> None:
        try:
            self._snapshot.copy(buffer, self.gate.check, contents.advance)
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are written
            contents.fail(error)
        finally:
            self.progress.note()
            self.staged.set()

    def _write_stubbornly(self, contents: Contents) -> WrittenPart:
        for pause_s in RETRY_PAUSES_S:
            try:
                return self._write(contents)
            except StorageError:
                if isinstance(contents, Staged):
                    contents.wait()  # a state that cannot be copied is not worth a retry
                self.gate.pause(pause_s)
        return self._write(contents)

    def _write(self, contents: Contents) -> WrittenPart:
        part = self._draft.plan.parts[self.place]
        plain = self._draft.plain if self.place == 0 else {}
        checked = self._checking(contents)
        return write_part(self._store, self._draft.attempt, part, checked, plain, on_progress=self.progress.note)

    def _checking(self, contents: Contents) -> Iterator[memoryview]:
        """Yield the bytes while the save is wanted; then raise Abandoned."""
        for content in contents:
            self.gate.check()
            yield content


STALLED_S = 600.0
"""Seconds that rank 0 waits for another part, once its own is written."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """A written part, or the error that prevented it."""

    written: WrittenPart | None
    error: str | None


_ADAPTER = TypeAdapter(PartReceipt)


def post(store: Store, attempt: str, part: int, receipt: PartReceipt) -> None:
    """Record that a part is in the store, or will not be.

    Part receipts: through the shared store, rank 0 learns that another rank has written its part.

    A receipt is canonical JSON with a seal, like a commit record; it says what was written, or why not. It is
    created last, so a part with a receipt is complete.
    """
    content = _ADAPTER.dump_json(receipt)
    create_once(store, _key(attempt, part), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def wait_for(store: Store, attempt: str, part: int, pause: Callable[[float], None]) -> WrittenPart:
    """Wait until another rank has written its part; `pause` sleeps, or raises to give up.

    Raise StorageError if that rank could not write it, or if no receipt can be read within `STALLED_S`, or in several
    tries.
    """
    key, waited_s, look_s, num_left = _key(attempt, part), 0.0, _FIRST_LOOK_S, len(RETRY_PAUSES_S)
    while waited_s < STALLED_S:
        try:
            receipt = _decode(read(store, key), f"{store.url}/{key}")
        except KeyMissing:
            pause(look_s)
            waited_s, look_s = waited_s + look_s, min(1.5 * look_s, _LONGEST_LOOK_S)
            continue
        except StorageError:
            if not num_left:
                raise
            num_left -= 1
            pause(RETRY_PAUSES_S[-num_left - 1])
            continue
        if receipt.written is None:
            raise StorageError(f"part {part} was not written: {receipt.error}")
        return receipt.written
    raise StorageError(f"{store.url}/{key}: part {part} was not written in {STALLED_S:.0f} s")


def _key(attempt: str, part: int) -> str:
    return f"{attempt}/done-{part:05d}.json"


def _decode(content: bytes, where: str) -> PartReceipt:
    seal, _, body = content.partition(b"\n")
    try:
        if hashlib.sha256(body).hexdigest().encode() != seal:
            raise StorageError(f"{where}: does not match its seal; it was damaged")
        return _ADAPTER.validate_python(json.loads(body))
    except (ValueError, ValidationError) as error:
        raise StorageError(f"{where}: is not a valid part receipt: {error}") from error
