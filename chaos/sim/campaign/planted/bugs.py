"""Broken versions of product functions, which `chaos.sim.campaign.planted.catalogue` installs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from torch import Tensor

from chaos.sim.machine.kernel import EPOCH_S
from chaos.sim.machine.object_store import StorageClient
from elastic_train.checkpoint.commits import reader, writer
from elastic_train.checkpoint.commits.record import VOID
from elastic_train.checkpoint.saving import background_saves
from elastic_train.checkpoint.stores.checksums import CheckedFile
from elastic_train.checkpoint.stores.store import Entry, FileRecord, KeyMissing, Store
from elastic_train.core import lanes
from elastic_train.core.lanes import Part
from elastic_train.core.lineage import COMMITS, Interval, place_of
from elastic_train.core.order import Cursor
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import ConfigError
from elastic_train.job.plan import Plan
from elastic_train.job.state import StepFacts
from elastic_train.parallel.exchange import halving_turns
from elastic_train.parallel.group import Group
from elastic_train.tracking.delivery import Delivery
from elastic_train.tracking.metric_log import (
    LineageReader,
    MetricsWriter,
    Settled,
    Values,
)
from elastic_train.training.session import Session
from elastic_train.world import agreement
from elastic_train.world.quarantine import find_holes
from rendezvous.membership.lenient_json import UnreadableRecordError
from rendezvous.membership.records import Head, Keys, encode
from rendezvous.membership.rules.changes import Change
from rendezvous.membership.store import Snapshot


def meet_or_drop(session: Session, norm: Tensor) -> tuple[Tensor, None]:
    session.world.group.all_gather(norm)
    return norm, None


def facts_of_a_sound_step(*facts: Any) -> StepFacts:
    return replace(StepFacts(*facts), loss=0.0)


def merge_from_left_to_right(parts: Iterable[Part], num_lanes: int) -> list[tuple[Part, Part, Part]]:
    first, *others = sorted(parts, key=lambda part: part.lo)
    return [(first, other, first) for other in others]


def halving_off_by_one(rank: int, size: int, length: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    return [
        (partner, kept, (given[0] + 1, given[1])) if kept[0] < given[0] else (partner, (kept[0] + 1, kept[1]), given)
        for partner, kept, given in halving_turns(rank, size, length)
    ]


def carry_unfenced(snapshot: Snapshot, keys: Keys, term: int, commit: str) -> Change:
    return Change({keys.head: encode(Head(term, commit, ""))}, {})


def steps_from(shift: int) -> Callable[[Session], Iterator[Sequence[LaneBatch]]]:
    def steps(self: Session) -> Iterator[Sequence[LaneBatch]]:
        plan, state, order = self.plan, self.state, self.plan.order
        moved = min(max(0, state.step + shift), plan.total_steps - 1) if state.step else 0
        cursor: Cursor = order.cursor_at(moved, plan.micro_batch)
        return iter(plan.feed.training(order, self.lanes, cursor, plan.total_steps - state.step))

    return steps


def steps_run_dry(self: Session) -> Iterator[Sequence[LaneBatch]]:
    plan, state = self.plan, self.state
    left = max(0, plan.total_steps * 2 // 3 - state.step)
    return iter(plan.feed.training(plan.order, self.lanes, state.reached.cursor, left)) if left else iter(())


def record_first(self: writer.CommitWriter, draft: Any, write: Callable[[], Any], gate: Any = None) -> Any:
    kept, pending = self._store, _Pending(self._store)

    def write_pending() -> Any:
        written = write()
        pending.hold_back(f"{draft.attempt}/")
        return written

    self._store = pending
    try:
        record = _PUBLISH(self, draft, write_pending, gate)
    finally:
        self._store = kept
    pending.write_all()
    return record


_PUBLISH = writer.CommitWriter.publish


class _Pending:
    """A store that delays files and creates records at once."""

    def __init__(self, store: Store) -> None:
        self._store, self._held = store, dict[str, bytes]()
        self.url = store.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def hold_back(self, prefix: str) -> None:
        for entry in self._store.list(prefix):
            with self._store.open(entry.key) as file:
                self._held[entry.key] = file.read()
            self._store.delete(entry.key)

    def list(self, prefix: str) -> list[Entry]:
        held = [Entry(key, len(content), None) for key, content in self._held.items() if key.startswith(prefix)]
        return [*self._store.list(prefix), *held]

    def write_all(self) -> None:
        for key, content in self._held.items():
            with self._store.write(key) as sink:
                sink.write(content)


def one_before(store: Store, *, published: str | None = None) -> reader.Discovery:
    found = _DISCOVER(store, published=published)
    before = found.head and found.head.parent_key
    return replace(found, head=reader.read_record(store, before)) if before else found


_DISCOVER = reader.discover


def keep_both(self: Session, lanes: Sequence[LaneBatch]) -> None:
    self.num_repeats += 1
    self.holes = (*self.holes, *find_holes(self.world, self.plan, self.state, lanes))


def send_again(self: Delivery, lines: Sequence[Values | Settled]) -> int:
    values = [replace(line, t=line.t + next(_SENT)) for line in lines if isinstance(line, Values)]
    self._opened().append(values)
    return len(values)


_SENT = itertools.count()


def begin_without_lineage(self: MetricsWriter, intervals: Sequence[Interval]) -> None:
    self._append({"begins_at": intervals[-1].hi if intervals else 0})


def crash_if_different(
    group: Group, plan: Plan, outline: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor]
) -> None:
    try:
        agreement.check_alike(group, plan, outline, weights)
    except ConfigError as error:
        raise RuntimeError(f"planted at check_alike: {error}") from error


class Unsettled(LineageReader):
    """Also read values that no commit covers."""

    def read(self, settled: float = math.inf) -> list[Values | Settled]:
        return super().read()


def newest_by_time(store: Store, published: str | None = None) -> list[str]:
    found = [entry for entry in store.list(COMMITS) if place_of(entry.key) and entry.size != len(VOID)]
    return [entry.key for entry in sorted(found, key=lambda entry: entry.modified_at or 0.0, reverse=True)]


def _property_of(owned: Callable[[int, int, int], range]) -> property:
    """Make a session's lanes a function of its replica, the number of replicas and the number of lanes."""
    return property(lambda self: owned(self.world.mesh.replica, self.world.mesh.num_replicas, self.plan.num_lanes))


def stale_lanes() -> property:
    sizes: list[int] = []

    def owned(rank: int, world_size: int, num_lanes: int) -> range:
        sizes.append(world_size)
        is_wrong = rank == 1 and world_size > min(sizes)
        return lanes.owned_lanes(0 if is_wrong else rank, world_size, num_lanes)

    return _property_of(owned)


def first_stride() -> property:
    sizes: list[int] = []

    def owned(rank: int, world_size: int, num_lanes: int) -> range:
        sizes.append(world_size)
        return lanes.owned_lanes(min(rank, sizes[0] - 1), sizes[0], num_lanes)

    return _property_of(owned)


def wait_for_ever(self: background_saves.Saves, check: Any = None) -> Any:
    return _WAIT(self)


_WAIT = background_saves.Saves.wait


def list_late(self: StorageClient, prefix: str) -> list[Entry]:
    found = _LIST(self, prefix)
    seen_until = EPOCH_S + self._storage.kernel.now - LISTED_AFTER_S
    return [entry for entry in found if prefix != COMMITS or (entry.modified_at or 0.0) < seen_until]


def open_late(self: StorageClient, key: str) -> BinaryIO:
    if key.startswith(COMMITS) and key not in {entry.key for entry in list_late(self, COMMITS)}:
        raise KeyMissing(f"{key}: does not exist")
    return _OPEN(self, key)


_LIST, _OPEN = StorageClient.list, StorageClient.open
LISTED_AFTER_S = 15.0


class _Unchecked(CheckedFile):
    """A file whose block checksums are not compared."""

    def _compare(self, checksum: int, end: int) -> None:
        pass


def unchecked(store: Store, key: str, record: FileRecord) -> CheckedFile:
    return _Unchecked(store.open(key), record, key)


def known_or_error(key: str, found: object) -> object:
    if isinstance(found, UnreadableRecordError):
        raise found
    return found
