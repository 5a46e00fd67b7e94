"""Writing a commit: files, record, fence, in this order, so that a checkpoint exists if and only if its record does.

1. every file goes into a fresh attempt's folder, durable and with its checksums;
2. the record is created conditionally, durable: from here on the commit exists;
3. the fence is asked to make it the head, which fails if a newer world has claimed a term.

A failure before 2 leaves nothing but, at worst, an abandoned attempt, which retention sweeps. A record that is fenced
in 3 stays: a newer world may have read it. If it has not, the order of commits passes it over.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Protocol

from elastic_train.checkpoint.checksums import FileRecord
from elastic_train.checkpoint.format import State, finish_attempt, plan_attempt, write_part
from elastic_train.checkpoint.record import CommitFacts, CommitRecord, library_versions
from elastic_train.checkpoint.stores import Store, Uncertain, create_once
from elastic_train.checkpoint.tree import survey
from elastic_train.errors import FencedError, StorageError
from elastic_train.failpoints import reach
from elastic_train.lineage import Interval, extend, tiling_problems

log = logging.getLogger(__name__)

ATTEMPTS = "data/"


class Publisher(Protocol):
    """What a writer needs of a fence (see `elastic_train.fencing`)."""

    def publish(self, term: int, commit: str) -> None:
        """Make a commit the head; FencedError if a newer term has been claimed."""


class CommitWriter:
    """Publishes the commits of one term, each the child of the one before; used by rank 0 alone."""

    def __init__(self, store: Store, fence: Publisher, term: int, parent: CommitRecord | None) -> None:
        self._store = store
        self._fence = fence
        self._term = term
        self._parent = parent

    @property
    def parent(self) -> CommitRecord | None:
        """The commit that the next one continues."""
        return self._parent

    def save(self, state: State, facts: CommitFacts, intervals: tuple[Interval, ...] | None = None) -> CommitRecord:
        """Publish a state of tensors and plain values; return its record.

        `intervals` name the terms that applied the steps up to here; without them, this term did since the parent.

        Raises StorageError if nothing was published, FencedError if a newer world owns the lineage (stop then), and
        ConfigError if the state holds what cannot be saved. Where only the fence did not answer, the commit exists
        already: saving the same step again asks the fence again, and the next step's commit is its child.
        """
        record = self._parent
        if record is None or (record.term, record.step) != (self._term, facts.step):
            record = self._create(state, facts, intervals)
        reach("publish")
        self._fence.publish(self._term, record.key)
        return record

    def _create(self, state: State, facts: CommitFacts, intervals: tuple[Interval, ...] | None) -> CommitRecord:
        """Write the files, then the record, after which the commit exists."""
        attempt = f"{ATTEMPTS}step-{facts.step:012d}/{self._term:08d}-{uuid.uuid4().hex[:12]}"
        with contextlib.ExitStack() as undo:
            undo.callback(self._abandon, attempt)
            record = self._describe(state, facts, attempt, self._write_files(state, attempt), intervals)
            reach("record")
            try:
                is_ours = create_once(self._store, record.key, record.encode())
            except Uncertain:
                undo.pop_all()  # the record may still come to exist, so its files must stay
                raise
            if not is_ours:
                raise FencedError(f"{self._store.url}/{record.key}: another writer of term {self._term} has created it")
            undo.pop_all()
        self._parent = record
        return record

    def _write_files(self, state: State, attempt: str) -> dict[str, FileRecord]:
        """Write all files and make sure that the store holds them in full."""
        plan = plan_attempt(state)
        files = finish_attempt(self._store, attempt, plan, [write_part(self._store, attempt, plan, part=0)])
        sizes = {entry.key: entry.size for entry in self._store.list(f"{attempt}/")}
        for name, file in files.items():
            size = sizes.get(f"{attempt}/{name}")
            if size != file.size:
                raise StorageError(f"{self._store.url}/{attempt}/{name}: the store has {size} bytes of {file.size}")
        return files

    def _describe(
        self,
        state: State,
        facts: CommitFacts,
        attempt: str,
        files: Mapping[str, FileRecord],
        intervals: tuple[Interval, ...] | None,
    ) -> CommitRecord:
        parent = self._parent
        lo = parent.step if parent else 0
        assert facts.step >= lo, f"step {facts.step} does not continue {lo}"
        if intervals is None:
            before = parent.intervals if parent else ()
            intervals = extend(before, self._term, lo, facts.step) if facts.step > lo else before
        assert not tiling_problems(intervals, facts.step), f"{intervals} do not tile the steps before {facts.step}"
        int_keyed, empty = survey(state)
        return CommitRecord(
            **{name: getattr(facts, name) for name in CommitFacts.__dataclass_fields__},
            term=self._term,
            parent=parent.digest if parent else None,
            parent_key=parent.key if parent else None,
            intervals=intervals,
            attempt=attempt,
            int_keyed=int_keyed,
            empty=empty,
            versions=library_versions(),
            created_at=time.time(),
            files=files,
        )

    def _abandon(self, attempt: str) -> None:
        """Remove what a failed save has written; what cannot be removed now is swept later."""
        try:
            for entry in self._store.list(f"{attempt}/"):
                self._store.delete(entry.key)
        except StorageError as error:
            log.warning("an abandoned attempt stays for now: %s", error)
