"""List a store's commits for people: one row each, with marks for the one to resume from and the best.

This is cheap: records are read, and file sizes compared with one listing. Only `is_thorough` reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.commits.pins_and_holds import held, pinned
from elastic_train.checkpoint.commits.reader import (
    damage_of,
    discover,
    records,
    wrong_sizes,
)
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Best, Candidate
from elastic_train.checkpoint.commits.sweeping import place_of_attempt
from elastic_train.checkpoint.stores.store import Store
from elastic_train.core.lineage import ATTEMPTS, place_of, tiling_problems
from elastic_train.errors import CommitError


@dataclass(frozen=True, slots=True)
class Row:
    """One commit; `record` is None and `wrong` says why if it cannot be read."""

    key: str
    record: CommitRecord | None
    wrong: str | None
    marks: tuple[str, ...]

    def fields(self, metric: str, now: float) -> dict[str, object]:
        """Return the columns of the row; None where unknown."""
        term, step = place_of(self.key) or (0, 0)
        record = self.record
        return {
            "key": self.key,
            "step": step,
            "term": term,
            "epoch": record and record.cursor.epoch,
            "age_s": record and round(now - record.created_at, 1),
            "bytes": record and record.num_bytes,
            "world": record and record.world_size,
            metric: record and record.metrics.get(metric),
            "metrics": record and dict(record.metrics),
            "parent": record and record.parent_key,
            "is_valid": self.wrong is None,
            "wrong": self.wrong,
            "marks": list(self.marks),
        }


@dataclass(frozen=True, slots=True)
class Listing:
    """All commits, newest first; bytes of commits, and number and bytes of attempts without a record."""

    rows: tuple[Row, ...]
    num_bytes: int
    abandoned: int
    abandoned_bytes: int


def survey_store(store: Store, best: Best, *, is_thorough: bool = False) -> Listing:
    """List every commit and attempt of a store."""
    sizes = {entry.key: entry.size for entry in store.list(ATTEMPTS)}
    found = list(records(store))
    wrong = {
        key: wrong_with(store, record, None if is_thorough else sizes) if record else problem
        for key, record, problem in found
    }
    marks = _marks(store, best, {key: record for key, record, _ in found}, wrong)
    rows = tuple(Row(key, record, wrong[key], marks[key]) for key, record, _ in found)
    named = {record.attempt for _, record, _ in found if record}
    unreadable = {place_of(key) for key, record, _ in found if record is None}
    loose = {
        key: num_bytes
        for key, num_bytes in sizes.items()
        if (attempt := key.rpartition("/")[0]) not in named and place_of_attempt(attempt) not in unreadable
    }
    return Listing(
        rows,
        num_bytes=sum(sizes.values()) - sum(loose.values()),
        abandoned=len({key.rpartition("/")[0] for key in loose}),
        abandoned_bytes=sum(loose.values()),
    )


def wrong_with(store: Store, record: CommitRecord, sizes: Mapping[str, int] | None = None) -> str | None:
    """Return what is wrong with a commit's files (only sizes if `sizes` is given) or lineage; else None."""
    damage = damage_of(store, record.key) if sizes is None else "; ".join(wrong_sizes(record, sizes))
    if damage:
        return damage
    problems = tiling_problems(record.intervals, record.step)
    return f"its lineage does not tile: {'; '.join(problems)}" if problems else None


def _marks(
    store: Store, best: Best, found: Mapping[str, CommitRecord | None], wrong: Mapping[str, str | None]
) -> dict[str, tuple[str, ...]]:
    """Return each commit's marks: head (to resume from), best, pinned, held."""
    try:
        head = discover(store, damage=lambda _, key: wrong.get(key)).head
    except CommitError:
        head = None  # every row has the reason
    whole = [Candidate(key, record.step, _always(record)) for key, record in found.items() if record and not wrong[key]]
    named = {
        "head": {head.key} if head else set(),
        "best": set(best.wanted(whole)),
        "pinned": pinned(store),
        "held": held(store),
    }
    return {key: tuple(mark for mark, keys in named.items() if key in keys) for key in found}


def _always(record: CommitRecord) -> Callable[[], CommitRecord]:
    return lambda: record
