"""A member's own record, which it publishes under a lease that ends with the member.

Every write of a member but its last goes through `swap`, which updates the view before it returns, so that decisions
are based on a view that contains the member's own last write. The watch brings it: if each member listed all members
after each write, etcd would send records in the square of their number. What the watch does not cover, `mine` adds. One
thread at a time rewrites the record.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rendezvous.errors import StoreError, StoreRefusedError
from rendezvous.membership.latest_view import LatestView, Now
from rendezvous.membership.records import Keys, Member, Terms, View, encode
from rendezvous.membership.rules import changes
from rendezvous.membership.rules.changes import Change
from rendezvous.membership.store import (
    Lease,
    Put,
    Snapshot,
    Store,
    Watch,
)
from rendezvous.membership.worlds import World

MOST_TRIES, PAUSE_S = 20, 0.1
"""Number of tries of an update if the record keeps changing, and the longest wait for the watch to bring a change."""
BROUGHT_S = 0.5
"""Longest wait for the watch to bring a member's own write; then its stream may be broken, and the keys are listed."""

KEEP_S = 10.0
"""Seconds after which a member that waits for others checks that etcd still has its terms."""


@dataclass(frozen=True, slots=True)
class Place:
    """A member's location and contribution; see `Member` for the fields of a node's worker."""

    host: str
    address: str
    num_workers: int
    name: str = ""
    node: str = ""
    node_members: int = 1
    agent: str = ""
    nodes: str = ""
    role: str = ""


class OwnRecord:
    """The record of the member at a place; none before it registers, and each registration has a new id."""

    def __init__(self, store: Store, watch: Watch, keys: Keys, place: Place, latest: LatestView, ttl_s: float) -> None:
        self.id = ""
        self.place = place
        """Contents of the record from the next registration on."""
        self.missed: frozenset[str] = frozenset()
        """Nodes that it cannot reach, for the next registration."""
        self.ttl_s = ttl_s
        """Duration of the lease in seconds; etcd may grant more than requested."""
        self.lease: Lease | None = None
        self._store, self._watch, self._keys, self._latest = store, watch, keys, latest
        self._rank, self._rank_in = -1, 0
        self._written = 0, "", Terms(0)
        """The terms that were written last, and the life of etcd and the id for which they were."""
        self._kept_at = 0.0
        """When etcd was last known to have them."""
        self._writing = threading.Lock()

    @property
    def is_gone(self) -> bool:
        """True if there is no record, or its lease is known to have ended."""
        return self.lease is None or self.lease.is_lost

    def mine(self, now: Now) -> Member | None:
        """Return this member's record with the terms that it wrote last; None if it is not there."""
        member, (life, member_id, terms) = now.view.member(self.id), self._written
        is_current = (life, member_id) == (now.snapshot.life, self.id)
        return terms.put_into(member) if member is not None and is_current else member

    def register(self) -> None:
        """Register under a new id; raises StoreUnavailableError if etcd does not answer."""
        try:
            self._register()
        except StoreRefusedError:
            self._register()  # the lease ended before its first use, because this process was frozen in between

    def update(self, change: Callable[[Member, View], Member], *, is_renamed: bool = False) -> bool:
        """Rewrite the record; return False if its lease has ended.

        With `is_renamed` it gets a new id, which orders it behind all other members.
        """
        for _ in range(MOST_TRIES):
            with self._writing:
                now = self._latest.now()
                mine = self.mine(now)
                if mine is None:
                    return False
                wanted = replace(change(mine, now.view), rank=self._rank, rank_in=self._rank_in)
                if is_renamed:
                    wanted = replace(wanted, id=self._new_id())
                try:
                    if wanted == mine or self._rewrite(now, mine, wanted):
                        self._written = now.snapshot.life, wanted.id, Terms.of(wanted)
                        self.id, self._kept_at = wanted.id, time.monotonic()
                        return True
                except StoreRefusedError:
                    return False
            self._latest.wait(now.snapshot, PAUSE_S)
        return False

    def keep_terms(self) -> None:
        """Write again the terms that were written last, if etcd has lost them alone; call it often while waiting.

        Few follow them: nobody else would know that this member is ready, and it would not know that they do not.
        """
        if time.monotonic() - self._kept_at < KEEP_S:
            return
        with self._writing:
            self._kept_at = time.monotonic()
            now, key = self._latest.now(), self._keys.terms_of(self.id)
            mine, text = self.mine(now), encode(self._written[2])
            if mine is None or mine == now.view.member(self.id):
                return
            found = self._store.get(key).entries.get(key)
            if found is None or found.value != text:
                record = self._keys.member(self.id)
                self.swap(Change({key: text}, {record: now.snapshot.revision_of(record)}), self.lease)

    def _rewrite(self, now: Now, mine: Member, wanted: Member) -> bool:
        change, over = changes.rewrite(now.snapshot, now.view, self._keys, mine, wanted), self._keys.over
        return self.swap(change, self.lease) or (over in change.writes and self.swap(change.without(over), self.lease))

    @property
    def rank_in(self) -> int:
        """Term of the last world in which this member got the state that it has; 0 if it has none."""
        return self._rank_in

    def note_rank(self, world: World | None) -> None:
        """Record, for all later writes, the rank that this member has in a world, whatever etcd remembers of it; none
        if its state is gone."""
        if world is None:
            self._rank, self._rank_in = -1, 0
            return
        rank = world.rank_of(self.id)
        assert rank is not None, "asked by a member of it"
        self._rank, self._rank_in = rank, world.term

    def swap(self, change: Change, lease: Lease | None) -> bool:
        """Try a transaction, its keys under a lease or none, and have its result in the view before returning."""
        before = self._latest.snapshot
        revision = self.write(change, lease)
        if revision is None:
            return False
        covers_terms = self._watch.snapshot.is_whole
        covered = {key for key in change.writes if covers_terms or not key.startswith(self._keys.terms)}
        if covered:
            puts = [key for key in covered if change.writes[key] is not None]
            self._latest.show(self._brought(puts, before, revision) or self._store.get(self._keys.prefix))
        return True

    def write(self, change: Change, lease: Lease | None) -> int | None:
        """Try a transaction whose result nobody here needs; return its revision, None if a guard did not hold."""
        writes = {
            key: None if text is None else Put(text, lease if key != self._keys.over else None)
            for key, text in change.writes.items()
        }
        return self._store.swap(writes, change.guards)

    def _brought(self, puts: Iterable[str], before: Snapshot, revision: int) -> Snapshot | None:
        """Return the watch's snapshot with a change of this revision, which wrote `puts`.

        None if it does not come soon, or etcd lost its data, whose revisions may be lower than those before.
        """
        seen = Snapshot(revision - 1, {}, before.life)
        found = self._watch.wait(seen, BROUGHT_S) if revision > before.revision else None
        if found is None or found.life != before.life:
            return None
        return found if all(found.revision_of(key) >= revision for key in puts) else None

    def revoke(self) -> None:
        """End the lease, and with it the record; raises StoreError if etcd does not answer."""
        if self.lease is not None:
            try:
                self.lease.revoke()
            except StoreError:
                self.lease.abandon()
                raise

    def _new_id(self) -> str:
        return f"{self.place.name or self.place.host}-{uuid.uuid4().hex[:12]}"

    def _register(self) -> None:
        if self.lease is not None:
            self.lease.revoke()  # a write whose answer was lost may have left a record under it: others would seat it
        self.lease = self._store.lease(self.ttl_s)
        self.ttl_s = self.lease.ttl_s
        place = self.place
        self.id = self._new_id()
        member = Member(
            id=self.id,
            host=place.host,
            address=place.address,
            num_workers=place.num_workers,
            after=self._latest.newest_term,
            node=place.node,
            node_members=place.node_members,
            agent=place.agent,
            missed=tuple(sorted(self.missed)),
            nodes=place.nodes,
            role=place.role,
            rank=self._rank,
            rank_in=self._rank_in,
        )
        self.swap(changes.register(self._keys, member), self.lease)
