"""Bugs planted in the product's code while it is simulated: each must be caught by the invariant named beside it.

A simulator that has never failed has proved nothing. `chaos.planted` plants what bugs leave in files; here the bug
itself is in the running code, and the faults have to bring it to light within a bounded number of seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chaos.sim.cases import FOLDER, load
from chaos.sim.faults import SimFault
from chaos.sim.kernel import EPOCH_S
from chaos.sim.objects import StorageClient
from chaos.sim.shape import Shape
from chaos.sim.simulate import Case, Outcome, simulate
from elastic_train import lanes
from elastic_train.checkpoint import saves, writer
from elastic_train.checkpoint.checksums import CheckedFile, FileRecord
from elastic_train.checkpoint.stores import Entry, Store
from elastic_train.data.loader import LaneBatch
from elastic_train.lineage import COMMITS, place_of
from elastic_train.order import Cursor, Order
from elastic_train.session import Session
from rendezvous.membership import Change
from rendezvous.records import Head, Keys, encode
from rendezvous.store import Snapshot

SEEDS = 60
_SHAPE = Shape(nodes=3, ranks=1, lanes=6, rows=(40, 7, 30, 24), epochs=4, commit_every=3)


@dataclass(frozen=True, slots=True)
class SimBug:
    """A bug: what is wrong, the code that it replaces, the invariants that see it, and the faults that lead there."""

    name: str
    bug: str
    code: Callable[[], Mapping[str, object]]
    invariants: Sequence[str]
    faults: Callable[[random.Random], tuple[SimFault, ...]] | str
    """What draws faults, or the name of the kept case in which the bug was found."""
    shape: Shape = field(default=_SHAPE)

    def cases(self) -> Iterator[Case]:
        if isinstance(self.faults, str):
            yield load(FOLDER / f"{self.faults}.yaml")
            return
        for seed in range(SEEDS):
            yield Case(seed, self.shape, self.faults(random.Random(f"{seed}/{self.name}")))

    def hunt(self) -> tuple[Outcome | None, int]:
        """Return the first run in which a named invariant is false, None if no seed has one; and how many were run."""
        for number, case in enumerate(self.cases(), 1):
            outcome = simulate(case, self.code())
            if any(finding.truth == "false" and finding.invariant in self.invariants for finding in outcome.findings):
                return outcome, number
        return None, SEEDS


# The faults that lead there.


def _kills(draws: random.Random) -> tuple[SimFault, ...]:
    """Workers die one after another, and come back."""
    return tuple(SimFault("kill_worker", at_s=draws.uniform(6, 14), node=draws.randrange(3)) for _ in range(3))


def _zombie(draws: random.Random) -> tuple[SimFault, ...]:
    """The leader, if luck has it, freezes in a save, in the midst of a step, and ends both when others go on without
    it; then everybody dies."""
    for_s = draws.uniform(4.0, 6.0)
    frozen = SimFault("stop", point="write", nth=1, for_s=for_s)
    return (SimFault("kill_job", at_s=25.0 + for_s + draws.uniform(0.0, 4.0), for_s=2.0), frozen)


def _late_record(draws: random.Random) -> tuple[SimFault, ...]:
    """The leader freezes before a commit, makes it when others have gone on, and soon everybody dies."""
    for_s = draws.uniform(5.0, 7.0)
    frozen = SimFault("stop", point="record", nth=2, for_s=for_s)
    return (SimFault("kill_job", at_s=7.2 + for_s + draws.uniform(0.0, 1.0), for_s=2.0), frozen)


def _torn(draws: random.Random) -> tuple[SimFault, ...]:
    """Everybody dies in the middle of a commit."""
    nodes = tuple(SimFault("kill_job", at_s=draws.uniform(6.0, 16.0), for_s=2.0) for _ in range(2))
    return (*nodes, SimFault("kill", point="publish", nth=draws.randint(1, 6)))


def _rot(draws: random.Random) -> tuple[SimFault, ...]:
    """A bit of the newest commit flips, and everybody dies."""
    at_s = draws.uniform(8.0, 16.0)
    return SimFault("flip_bit", at_s=at_s, other=draws.randrange(2)), SimFault("kill_job", at_s=at_s, for_s=1.0)


def _half_applied(draws: random.Random) -> tuple[SimFault, ...]:
    """A rank dies between two ranks' receipts of a step, so that survivors are apart."""
    point = draws.choice(("exchange", "apply", "applied"))
    return tuple(SimFault("kill", point=point, nth=draws.randint(20, 90)) for _ in range(3))


# The bugs.


def _carry_unfenced(snapshot: Snapshot, keys: Keys, term: int, commit: str) -> Change:
    return Change({keys.head: encode(Head(term, commit, ""))}, {})


def _steps_from(shift: int) -> Callable[[Session], Iterator[Sequence[LaneBatch]]]:
    """Begin a world at another cursor than the applied one: ahead by what was fetched, or one step behind."""

    def steps(self: Session) -> Iterator[Sequence[LaneBatch]]:
        plan, state, order = self.plan, self.state, self.plan.order
        moved = min(max(0, state.step + shift), plan.total_steps - 1) if state.step else 0
        cursor: Cursor = order.cursor_at(moved, plan.micro_batch)
        return iter(plan.feed.training(order, self.lanes, cursor, plan.total_steps - state.step))

    return steps


def _record_first(self: writer.CommitWriter, draft: Any, write: Callable[[], Any], gate: Any = None) -> Any:
    """Create the record, and only then let the store have the files that it promises."""
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
    """A store that keeps files back and creates records at once."""

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


def _newest_by_time(store: Store) -> list[str]:
    """Order commits by when they were made."""
    found = [entry for entry in store.list(COMMITS) if place_of(entry.key)]
    return [entry.key for entry in sorted(found, key=lambda entry: entry.modified_at or 0.0, reverse=True)]


def _stale_lanes() -> Callable[[int, int, int], range]:
    """Once a world has grown again, rank 1 takes the lanes of rank 0."""
    sizes: list[int] = []

    def owned(rank: int, world_size: int, num_lanes: int) -> range:
        sizes.append(world_size)
        is_wrong = rank == 1 and world_size > min(sizes)
        return lanes.owned_lanes(0 if is_wrong else rank, world_size, num_lanes)

    return owned


def _first_stride() -> Callable[[int, int, int], range]:
    """Every rank keeps the stride of the first world, whatever the size of its own."""
    sizes: list[int] = []

    def owned(rank: int, world_size: int, num_lanes: int) -> range:
        sizes.append(world_size)
        return lanes.owned_lanes(min(rank, sizes[0] - 1), sizes[0], num_lanes)

    return owned


def _without_tail(order: Order, micro_batch: int) -> int:
    """Count the steps in which every lane has a full micro-batch."""
    return order.num_samples // order.num_lanes // micro_batch


def _wait_for_ever(self: saves.Saves, check: Any = None) -> Any:
    return _WAIT(self)


_WAIT = saves.Saves.wait


def _list_late(self: StorageClient, prefix: str) -> list[Entry]:
    found = _LIST(self, prefix)
    seen_until = EPOCH_S + self._storage.kernel.now - LISTED_AFTER_S
    return [entry for entry in found if prefix != COMMITS or (entry.modified_at or 0.0) < seen_until]


_LIST = StorageClient.list
LISTED_AFTER_S = 15.0


class _Unchecked(CheckedFile):
    """A file whose blocks are compared with nothing."""

    def _compare(self, checksum: int, end: int) -> None:
        pass


def _unchecked(store: Store, key: str, record: FileRecord) -> CheckedFile:
    return _Unchecked(store.open(key), record, key)


PLANTED = (
    SimBug(
        "no-fence",
        "a world that was left behind publishes",
        lambda: {
            "rendezvous.fence:carry": _carry_unfenced,
            "elastic_train.fencing:StoreFence.publish": lambda self, term, commit: None,
        },
        ("fencing",),
        _zombie,
        replace(_SHAPE, commit_every=8, lane_s=1.0, least_part_bytes=1 << 20),
    ),
    SimBug(
        "fetched-cursor",
        "a world goes on from what was fetched instead of applied",
        lambda: {"elastic_train.session:Session.steps": _steps_from(1)},
        ("coverage", "witness"),
        _kills,
    ),
    SimBug(
        "double-apply",
        "a world applies the last step's samples again",
        lambda: {"elastic_train.session:Session.steps": _steps_from(-1)},
        ("coverage", "witness"),
        _kills,
    ),
    SimBug(
        "head-before-shards",
        "the record is there before the files that it promises",
        lambda: {"elastic_train.checkpoint.writer:CommitWriter.publish": _record_first},
        ("atomicity",),
        _torn,
    ),
    SimBug(
        "no-digest",
        "nobody compares a commit's bytes with its checksums",
        lambda: {
            "elastic_train.checkpoint.reader:damage_of": lambda store, key: None,
            "chaos.sim.model:open_checked": _unchecked,
        },
        ("hash", "witness"),
        _rot,
    ),
    SimBug(
        "newest-instead-of-head",
        "the commit made last is taken for the head",
        lambda: {"elastic_train.checkpoint.reader:commit_keys": _newest_by_time},
        ("durability",),
        _late_record,
        replace(_SHAPE, commit_every=5),
    ),
    SimBug(
        "stale-lanes",
        "a rank keeps another's lanes after the world has grown again",
        lambda: {"elastic_train.assembly:owned_lanes": _stale_lanes()},
        ("partition",),
        _kills,
    ),
    SimBug(
        "skipped-barrier",
        "a world begins without bringing its ranks to one step",
        lambda: {"elastic_train.world:hand_over": lambda group, state, places: None},
        ("agreement",),
        _half_applied,
    ),
    SimBug(
        "stale-stride",
        "ranks keep the lanes of the first world, whatever the size of theirs",
        lambda: {"elastic_train.assembly:owned_lanes": _first_stride()},
        ("partition", "coverage"),
        _kills,
    ),
    SimBug(
        "dropped-tail",
        "the last short step of an epoch is left out",
        lambda: {"elastic_train.order:Order.num_steps": _without_tail},
        ("coverage", "witness"),
        _kills,
    ),
    # What was found on the way, in the case that found it.
    SimBug(
        "any-branch-counts",
        "who is further is followed, also behind a published commit's back",
        lambda: {"elastic_train.world:_is_of": lambda published, state: True},
        ("durability",),
        "published-and-left",
    ),
    SimBug(
        "waits-for-the-dead",
        "who waits for a save looks neither whether its world is broken nor whether it gets on",
        lambda: {
            "elastic_train.checkpoint.saves:Saves.wait": _wait_for_ever,
            "elastic_train.checkpoint.saves:Saves._is_stuck": lambda self, flight: False,
        },
        ("finished",),
        "waiting-for-the-dead",
    ),
    # The canary: nothing is wrong with the product, and the judge must say that something is wrong.
    SimBug(
        "canary",
        "storage lists no commit of the last seconds, against its promise",
        lambda: {"chaos.sim.objects:StorageClient.list": _list_late},
        ("durability",),
        _torn,
    ),
)
