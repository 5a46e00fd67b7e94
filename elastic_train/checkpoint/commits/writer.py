"""Write a commit: files, record, fence, in this order, so that a checkpoint exists if and only if its record does.

1. All files go into a fresh attempt's folder, durable and with checksums; 2. the record is created conditionally and
durably: from here on the commit exists; 3. the fence makes it the head, unless a newer world has claimed a term.

A failure before 2 leaves an abandoned attempt, which is swept later. A record that is fenced in 3 stays, as a newer
world may have read it; if not, the order of commits passes it over. A record that the fence did not learn of also
stays, as an ancestor of the next commit, which the fence will learn of.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_train.checkpoint.commits.reader import sizes_of
from elastic_train.checkpoint.commits.record import (
    VOID,
    CommitFacts,
    CommitRecord,
    library_versions,
)
from elastic_train.checkpoint.format.dcp import (
    WrittenPart,
    finish_attempt,
    live_contents,
    weights_sha256,
    write_part,
)
from elastic_train.checkpoint.format.layout import (
    AttemptPlan,
    Planner,
    State,
    leaves_by_path,
)
from elastic_train.checkpoint.stores.store import (
    FileRecord,
    Store,
    Uncertain,
    create_once,
    read,
)
from elastic_train.core.lineage import (
    ATTEMPTS,
    Interval,
    extend,
    tiling_problems,
)
from elastic_train.errors import FencedError, StorageError
from elastic_train.system.failpoints import reach

log = logging.getLogger(__name__)

_MOST_COPIES = 2  # of tensors on a device, beside the one that is written


class FenceNotUpdated(StorageError):  # noqa: N818 - the commit exists
    """Raised if the fence did not answer: `commit` exists and no newer term is known, but it was not made the head."""

    commit: CommitRecord


class Publisher(Protocol):
    """The part of a fence that a writer needs (see `elastic_train.world.fencing`)."""

    def publish(self, term: int, commit: str) -> None:
        """Make a commit the head.

        Raise FencedError if a newer term has been claimed, FenceNotUpdated if only the store knows the commit.
        """


@dataclass(frozen=True, slots=True)
class Draft:
    """The contents of a save, fixed at a step boundary; the same on every participating rank.

    `intervals` name the terms that applied the steps so far; by default, this term did since the parent.
    """

    attempt: str
    plan: AttemptPlan
    plain: Mapping[str, bytes]
    facts: CommitFacts
    intervals: tuple[Interval, ...] | None


def attempt_folder(step: int, term: int, unique: str) -> str:
    """Return the folder of a save's files; folders are never reused."""
    return f"{ATTEMPTS}step-{step:012d}/{term:08d}-{unique}"


class CommitWriter:
    """Publishes the commits of one term, each the child of the one before; used by rank 0 only.

    `look` is called with the parent before anything of a commit is written; a StorageError from it stops the commit.
    `versions` are recorded with those of this package, Python and torch.
    """

    def __init__(
        self,
        store: Store,
        fence: Publisher,
        term: int,
        parent: CommitRecord | None,
        look: Callable[[CommitRecord | None], None] = lambda parent: None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._fence = fence
        self._term = term
        self._parent = parent
        self._look, self._versions = look, versions or {}
        self._sent: list[CommitRecord] = []
        self._lock = threading.Lock()

    def save(self, state: State, facts: CommitFacts, intervals: tuple[Interval, ...] | None = None) -> CommitRecord:
        """Write and publish a state of tensors and plain values, alone and at once; return its record.

        For tensors in pieces, this rank must hold and write all of them.
        """
        planner, leaves = Planner(), leaves_by_path(state)
        plan = planner.plan(state, leaves, 1, facts.cut_dims)
        attempt = attempt_folder(facts.step, self._term, uuid.uuid4().hex[:12])
        draft = Draft(attempt, plan, planner.encode(plan, leaves), facts, intervals)
        part = plan.parts[0]

        def write() -> Sequence[WrittenPart]:
            self.look()
            contents = live_contents(part, leaves)
            return [write_part(self._store, attempt, part, contents, draft.plain, most_behind=_MOST_COPIES)]

        return self.publish(draft, write)

    def look(self) -> None:
        """Look at the store before anything is written there; it may hang. Raise StorageError to stop the commit."""
        self._look(self._parent)

    def publish(
        self,
        draft: Draft,
        write: Callable[[], Sequence[WrittenPart]],
        gate: contextlib.AbstractContextManager[object] | None = None,
    ) -> CommitRecord:
        """Let all parts be written, after `look`, then publish them inside `gate`; return the record.

        Raise StorageError if nothing was published, FencedError if a newer world owns the lineage (stop then), and
        errors of `write` and `gate`. After FenceNotUpdated the commit exists: publishing the same step again asks the
        fence again, and the next step's commit is its child.
        """
        parent = record = self._parent
        if record is not None and (record.term, record.step) == (self._term, draft.facts.step):
            with gate or contextlib.nullcontext():
                self.look()
                self._make_head(record)
            return record
        with contextlib.ExitStack() as undo:
            undo.callback(self._abandon, draft.attempt)
            record = self._describe(draft, write(), parent)
            reach("record")
            with gate or contextlib.nullcontext():
                self._note_sent(record)
                try:
                    is_ours = create_once(self._store, record.key, record.encode())
                except Uncertain:
                    undo.pop_all()  # the record may still appear, so its files must stay
                    raise
                if is_ours:
                    undo.pop_all()
                else:
                    record = self._sent_before(record.key)
                self._continue_from(record)
                self._make_head(record)
        return record

    def _note_sent(self, record: CommitRecord) -> None:
        with self._lock:
            self._sent = [*(sent for sent in self._sent if sent.step == record.step), record]

    def _sent_before(self, key: str) -> CommitRecord:
        """Return the record that has this name, if an earlier, unanswered save of this step sent it.

        Raise FencedError if it is another's.
        """
        content, where = read(self._store, key), f"{self._store.url}/{key}"
        for sent in self._sent:
            if sent.encode() == content:
                return sent
        if content == VOID:
            raise FencedError(f"{where}: a newer world has swept this save of term {self._term}")
        raise FencedError(f"{where}: another writer of term {self._term} has created it")

    def _continue_from(self, record: CommitRecord) -> None:
        """Make later commits continue this one, unless another was published while the store kept this one waiting."""
        with self._lock:
            if self._parent is not None and self._parent.step > record.step:
                raise Uncertain(f"{self._store.url}/{record.key}: came to exist after its save was abandoned")
            self._parent = record

    def _make_head(self, record: CommitRecord) -> None:
        reach("publish")
        if self._parent is not record:
            raise Uncertain(f"{record.key} was not made the head: a newer commit was published meanwhile")
        try:
            self._fence.publish(self._term, record.key)
        except FenceNotUpdated as error:
            error.commit = record
            raise

    def _describe(self, draft: Draft, written: Sequence[WrittenPart], parent: CommitRecord | None) -> CommitRecord:
        """Write the metadata, check that the store has all files in full, and return the record."""
        files = finish_attempt(self._store, draft.attempt, draft.plan, written)
        self._check_sizes(draft.attempt, files)
        facts, intervals = draft.facts, draft.intervals
        lo = parent.step if parent else 0
        assert facts.step >= lo, f"step {facts.step} does not continue {lo}"
        if intervals is None:
            before = parent.intervals if parent else ()
            intervals = extend(before, self._term, lo, facts.step) if facts.step > lo else before
        assert not tiling_problems(intervals, facts.step), f"{intervals} do not tile the steps before {facts.step}"
        return CommitRecord(
            **{name: getattr(facts, name) for name in CommitFacts.__dataclass_fields__},
            weights_sha256=weights_sha256(draft.plan, written),
            term=self._term,
            parent=parent.digest if parent else None,
            parent_key=parent.key if parent else None,
            intervals=intervals,
            attempt=draft.attempt,
            int_keyed=draft.plan.int_keyed,
            empty=draft.plan.empty,
            versions={**library_versions(), **self._versions},
            created_at=time.time(),
            files=files,
        )

    def _check_sizes(self, attempt: str, files: Mapping[str, FileRecord]) -> None:
        sizes = sizes_of(self._store, attempt, files)
        for name, file in files.items():
            size = sizes.get(f"{attempt}/{name}")
            if size != file.size:
                raise StorageError(f"{self._store.url}/{attempt}/{name}: the store has {size} of {file.size} bytes")

    def _abandon(self, attempt: str) -> None:
        """Delete the files of a failed save; what cannot be deleted now is swept later."""
        try:
            for entry in self._store.list(f"{attempt}/"):
                self._store.delete(entry.key)
        except StorageError as error:
            log.warning("an abandoned attempt could not be deleted, and is swept later: %s", error)
