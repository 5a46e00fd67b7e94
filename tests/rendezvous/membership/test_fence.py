"""The fence, on all stores: only the newest world may claim, and only the newest claim may publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rendezvous import (
    EtcdFence,
    EtcdServer,
    EtcdStore,
    FencedError,
    Head,
    RendezvousContext,
    context,
    etcd_options,
    open_fence,
)
from rendezvous.context import VARIABLE
from rendezvous.membership.records import Closed, Keys, encode, read_view
from rendezvous.membership.rules.changes import close
from rendezvous.membership.store import Put
from rendezvous.membership.worlds import Seat, World

if TYPE_CHECKING:
    from tests.rendezvous.rendezvous_sides import Side


def test_claims_grow(side: Side, run_id: str) -> None:
    """A claim gets the requested term, or the next one above the head."""
    fence = EtcdFence(side.store, run_id)
    assert fence.head() is None
    assert [fence.claim(1), fence.claim(7), fence.claim(3)] == [1, 7, 8]


def test_only_the_newest_claim_publishes(side: Side, run_id: str) -> None:
    """After a newer claim the older term is refused, and the head keeps the earlier publication."""
    old, new = EtcdFence(side.store, run_id), EtcdFence(side.store, run_id)
    first = old.claim(1)
    old.publish(first, "commit-1")
    second = new.claim(1)
    with pytest.raises(FencedError, match="term 1 may not publish late: the head is held by term 2"):
        old.publish(first, "late")
    head = new.head()
    assert head is not None and (head.term, head.commit) == (second, "commit-1")
    new.publish(second, "commit-2")
    new.publish(second, "commit-3")
    assert new.head() == Head(second, "commit-3", head.claim)


def test_publishing_without_a_claim_is_refused(side: Side, run_id: str) -> None:
    """Nobody publishes before the term is claimed."""
    with pytest.raises(FencedError, match="held by nobody"):
        EtcdFence(side.store, run_id).publish(1, "commit")


def test_a_zombie_cannot_claim(side: Side, run_id: str) -> None:
    """A world that froze before its claim cannot claim once a newer world is sealed: it would fence the newer one."""
    keys = Keys(run_id)

    def seal(term: int) -> None:
        record = World(term, (Seat("a", 1),), "start", "address", 1, 0.0)
        side.store.swap({keys.world: Put(encode(record))}, {})

    seal(3)
    zombie = EtcdFence(side.store, run_id, world_term=3)
    seal(4)
    with pytest.raises(FencedError, match="term 3 may not claim: the newest world in etcd has term 4"):
        zombie.claim(3)
    assert EtcdFence(side.store, run_id, world_term=4).claim(4) == 4
    seal(1)  # by a process that restarted the job on an etcd without its data
    with pytest.raises(FencedError, match="term 3 may not claim: the newest world in etcd has term 1"):
        zombie.claim(3)


@pytest.mark.slow
def test_a_worker_opens_the_fence_of_its_context(
    etcd: EtcdServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment that the launcher sets is enough to claim and to publish."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert context() is None
    given = RendezvousContext((etcd.endpoint,), run_id, 5, "member", 1.0, 2.0, "lost", 2)
    monkeypatch.setenv(VARIABLE, given.encode())
    found = context()
    assert found == given
    store, keys = EtcdStore(etcd_options(etcd.endpoint)), Keys(run_id)
    world = World(5, (Seat("member", 1),), "lost", "address", 1, 2.0)
    store.swap({keys.world: Put(encode(world))}, {})
    store.close()
    fence = open_fence(given)
    fence.publish(fence.claim(given.term), "commit")
    head = fence.head()
    fence.close()
    assert head is not None and (head.term, head.commit) == (5, "commit")


def test_a_job_is_bound_to_one_store(side: Side, run_id: str) -> None:
    """The first binding holds for everybody; the next job of this run id, once this one is done, may choose another."""
    fence = EtcdFence(side.store, run_id)
    assert fence.bind(None) is None
    assert fence.bind("first") == "first"
    assert EtcdFence(side.store, run_id).bind("second") == "first"
    keys = Keys(run_id)
    assert read_view(side.store.get(keys.prefix), keys).store == "first"
    snapshot = side.store.get(keys.prefix)
    change = close(snapshot, read_view(snapshot, keys), keys, Closed(1, 0.0))
    side.store.swap({key: None if text is None else Put(text) for key, text in change.writes.items()}, change.guards)
    assert fence.bind(None) is None
