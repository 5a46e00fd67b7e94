"""The contract of every store, checked on the in-memory store and on a real etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rendezvous.errors import StoreRefusedError
from rendezvous.membership.store import ABSENT, MOST_GUARDS, Put, Snapshot
from tests.conftest import PATIENCE_S

if TYPE_CHECKING:
    from tests.rendezvous.rendezvous_sides import Side

# A real etcd counts a TTL in whole seconds, and needs at least two.
in_lease_time = pytest.mark.parametrize(
    "side", ["memory", pytest.param("etcd", marks=pytest.mark.slow), "simulated"], indirect=True
)


def texts(side: Side) -> dict[str, str]:
    entries = side.store.get(side.prefix).entries
    return {key.removeprefix(side.prefix): entry.value for key, entry in entries.items()}


def test_get_sees_only_its_prefix(side: Side) -> None:
    """A snapshot holds exactly the keys below the prefix."""
    side.store.swap({side.prefix + "a": Put("1"), side.prefix[:-1] + "x": Put("2")}, {})
    assert texts(side) == {"a": "1"}


def test_swap_creates_once(side: Side) -> None:
    """Of two creations of one key the second is refused and changes nothing."""
    key = side.prefix + "a"
    assert side.store.swap({key: Put("1")}, {key: ABSENT}) is not None
    assert side.store.swap({key: Put("2")}, {key: ABSENT}) is None
    assert texts(side) == {"a": "1"}


def test_swap_is_all_or_nothing(side: Side) -> None:
    """One guard that does not hold prevents every write of the transaction."""
    a, b = side.prefix + "a", side.prefix + "b"
    side.store.swap({a: Put("1")}, {})
    assert side.store.swap({a: Put("2"), b: Put("2")}, {b: ABSENT, a: ABSENT}) is None
    assert texts(side) == {"a": "1"}


def test_a_guard_of_a_folder_sees_every_write_below(side: Side) -> None:
    """A key that ends with a slash stands for all keys below it: any write since the look is detected."""
    key, folder, look = side.prefix + "out", side.prefix + "in/", side.store.get
    side.store.swap({folder + "a": Put("1"), folder + "b": Put("1")}, {})
    seen = look(folder).revision
    side.store.swap({side.prefix + "beside": Put("1")}, {})
    assert side.store.swap({key: Put("1")}, {folder: seen, key: ABSENT}) is not None
    side.store.swap({folder + "a": None}, {})
    assert side.store.swap({key: Put("2")}, {folder: seen}) is not None
    side.store.swap({folder + "b": Put("2")}, {})
    assert side.store.swap({key: Put("3")}, {folder: seen}) is None
    assert side.store.swap({key: Put("3")}, {folder: look(folder).revision}) is not None
    side.store.swap({folder + "c": Put("1")}, {})
    assert side.store.swap({key: Put("4")}, {folder: seen}) is None


def test_the_guards_of_a_transaction_are_limited(side: Side) -> None:
    """Etcd's default limit holds in every store; one guard more is refused, not lost in retries."""
    guards = {f"{side.prefix}none-{number}": ABSENT for number in range(MOST_GUARDS)}
    assert side.store.swap({side.prefix + "a": Put("1")}, guards) is not None
    with pytest.raises(StoreRefusedError, match="too many operations"):
        side.store.swap({side.prefix + "a": Put("2")}, {**guards, side.prefix + "none": ABSENT})
    assert texts(side) == {"a": "1"}


def test_the_writes_of_a_transaction_are_limited(side: Side) -> None:
    writes = {f"{side.prefix}{number}": Put("1") for number in range(MOST_GUARDS)}
    assert side.store.swap(writes, {}) is not None
    with pytest.raises(StoreRefusedError, match="too many operations"):
        side.store.swap({**writes, side.prefix + "a": Put("2")}, {})
    assert len(texts(side)) == MOST_GUARDS


def test_revisions_grow_and_creation_stays(side: Side) -> None:
    """Every write has a higher revision, and a key keeps the revision of its creation until it is deleted."""
    key = side.prefix + "a"
    first = side.store.swap({key: Put("1")}, {})
    second = side.store.swap({key: Put("2")}, {key: first or 0})
    entry = side.store.get(key).entries[key]
    assert first is not None and second is not None and second > first
    assert (entry.create_revision, entry.mod_revision) == (first, second)
    assert side.store.swap({key: None}, {key: second}) is not None
    assert texts(side) == {}


def test_a_transaction_has_the_revision_of_its_changes(side: Side) -> None:
    """So a member knows when its watch has brought them, even if it first deletes a key that is gone already."""
    gone, left, get = side.prefix + "gone", side.prefix + "left", side.store.get
    revision = side.store.swap({left: Put("1")}, {})
    assert revision is not None
    assert side.store.swap({gone: None, left: None}, {gone: ABSENT, left: revision}) == get(side.prefix).revision


def test_revoking_a_lease_deletes_its_keys(side: Side) -> None:
    """A revoked lease deletes its own keys at once, and no others."""
    lease = side.store.lease(30)
    side.store.swap({side.prefix + "leased": Put("1", lease), side.prefix + "free": Put("1")}, {})
    lease.revoke()
    assert texts(side) == {"free": "1"} and lease.is_lost
    lease.revoke()


def test_a_deleted_key_leaves_its_lease(side: Side) -> None:
    """A leased key may be deleted by anybody before its lease ends; the lease then deletes only the rest."""
    lease = side.store.lease(30)
    side.store.swap({side.prefix + "buried": Put("1", lease), side.prefix + "kept": Put("1", lease)}, {})
    side.store.swap({side.prefix + "buried": None}, {})
    lease.revoke()
    assert texts(side) == {}


@in_lease_time
def test_an_abandoned_lease_ends(side: Side) -> None:
    """A lease that is not renewed expires after its TTL, and a watch shows it."""
    lease = side.store.lease(5)
    watch = side.store.watch(side.prefix)
    written = side.store.swap({side.prefix + "a": Put("1", lease)}, {})
    assert written is not None
    lease.abandon()
    side.pass_time(lease.ttl_s)
    after = watch.wait(Snapshot(written, {}), timeout_s=PATIENCE_S)
    watch.close()
    assert after is not None and after.entries == {}


@in_lease_time
def test_a_renewed_lease_outlives_its_ttl(side: Side) -> None:
    """A renewed lease exists after an abandoned one, granted at the same time, has expired."""
    kept, dropped = side.store.lease(10), side.store.lease(10)
    writes = {side.prefix + "kept": Put("1", kept), side.prefix + "dropped": Put("1", dropped)}
    watch = side.store.watch(side.prefix)
    written = side.store.swap(writes, {})
    assert written is not None
    dropped.abandon()
    side.pass_time(11)
    assert watch.wait(Snapshot(written, {}), timeout_s=PATIENCE_S) is not None
    watch.close()
    assert texts(side) == {"kept": "1"} and not kept.is_lost
    kept.abandon()


def test_a_watch_wakes_for_another_threads_write(side: Side) -> None:
    """A waiting watch returns the snapshot that contains the write, not an older one."""
    watch = side.store.watch(side.prefix)
    before = watch.snapshot
    side.later(lambda: side.store.swap({side.prefix + "a": Put("1")}, {}))
    snapshot = watch.wait(before, timeout_s=PATIENCE_S)
    watch.close()
    assert snapshot is not None and snapshot.entries[side.prefix + "a"].value == "1"


def test_a_watch_gives_up_in_time(side: Side) -> None:
    """Without a change a wait ends with None."""
    watch = side.store.watch(side.prefix)
    assert watch.wait(watch.snapshot, timeout_s=0.05) is None
    watch.close()


def test_a_watch_covers_a_part_of_its_prefix(side: Side) -> None:
    """Keys from its end on are not in it until it covers all, even if nothing is written since; and then again not."""
    end, public, hidden = side.prefix + "~", side.prefix + "a", side.prefix + "~b"
    watch = side.store.watch(side.prefix, end)
    side.store.swap({hidden: Put("1")}, {})
    written = side.store.swap({public: Put("1")}, {})
    assert written is not None
    seen = watch.wait(Snapshot(written - 1, {}), PATIENCE_S)
    assert seen is not None and seen.entries.keys() == {public} and not seen.is_whole
    watch.cover("")
    seen = watch.wait(seen, PATIENCE_S)
    assert seen is not None and seen.entries.keys() == {public, hidden} and seen.is_whole
    side.store.swap({hidden: Put("2")}, {})
    seen = watch.wait(seen, PATIENCE_S)
    assert seen is not None and seen.entries[hidden].value == "2"
    watch.cover(end)
    while seen is not None and seen.is_whole:
        side.store.swap({public: Put("2")}, {})
        seen = watch.wait(seen, PATIENCE_S)
    assert seen is not None and seen.entries.keys() == {public}
    watch.close()
