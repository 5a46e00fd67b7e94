"""Records written by another version or by hand: nobody fails over them, and old and new versions train together."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from rendezvous import EtcdFence, EtcdServer, MemoryStore
from rendezvous.errors import NewerVersionError
from rendezvous.membership.lenient_json import FORMAT, NewerRecordError, UnreadableRecordError, read_record
from rendezvous.membership.records import (
    Closed,
    Head,
    Job,
    Keys,
    Member,
    Over,
    Terms,
    encode,
    read_head,
    read_view,
)
from rendezvous.membership.store import Entry, Put, Snapshot
from rendezvous.membership.worlds import Seat, World
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.membership.participants import enter, make_node, meet_again
from tests.rendezvous.rendezvous_sides import client_of, patient

KEYS = Keys("job")
MEMBER = Member("a-1", "h", "127.0.0.1", 1, after=0, missed=("b",))
WORLD = World(3, (Seat("a-1", 1),), "start", "127.0.0.1", 7, 1.0)
GARBAGE = (
    "",
    "not JSON",
    "5",
    "[]",
    "null",
    "{}",
    '{"id": 5}',
    '{"term": "x"}',
    '{"term": true, "at": 1}',
    "\\xff",
    "[" * 9999,
)


def view_of(**texts: str) -> dict[str, object]:
    entries = {KEYS.prefix + key.replace("__", "/"): Entry(text, 1, 1) for key, text in texts.items()}
    return asdict(read_view(Snapshot(1, entries), KEYS))


@pytest.mark.parametrize(
    "record",
    [MEMBER, Terms(3), Over(3), WORLD, Head(3, None), Closed(3, 1.0, Job("/runs/a", "d")), Closed(3, 1.0)],
)
def test_records_are_read_as_they_were_written(record: Member | Terms | Over | World | Head | Closed) -> None:
    """This includes records with fields that only a newer version knows."""
    assert read_record(type(record), encode(record)) == record
    newer = {**json.loads(encode(record)), "colour": {"deep": [1]}, "format": FORMAT}
    assert read_record(type(record), json.dumps(newer)) == record


def test_a_world_of_another_version_is_read_or_refused() -> None:
    """Format 1 named each seat in full; format 2 is refused by versions that read only that."""
    first = {**asdict(WORLD), "seats": [{"member": "a-1", "num_workers": 1}]}
    assert read_record(World, json.dumps(first)) == WORLD
    assert json.loads(encode(WORLD))["format"] == 2


@pytest.mark.parametrize("members", [["a"], ["1:a"], ["-1:a"], ["x:a"], ["0:a", "2:b"], [5], "0:a"])
def test_seats_with_ids_that_cannot_be_read_are_no_world(members: object) -> None:
    text = json.dumps({**json.loads(encode(WORLD)), "runs": [{"members": members, "num_workers": 1, "role": ""}]})
    with pytest.raises(UnreadableRecordError):
        read_record(World, text)


def test_a_world_takes_about_twenty_bytes_for_a_seat() -> None:
    """All members read the world of all; those of a node need not have neighbouring seats."""
    ids = [f"machine-{node:03}-{node:08x}.{rank}-{node:06x}{rank:06x}" for rank in range(8) for node in range(16)]
    world = replace(WORLD, seats=tuple(Seat(each, 1, "trainer") for each in ids))
    assert read_record(World, encode(world)) == world
    assert len(encode(world)) - len(encode(WORLD)) < 24 * len(ids)


def test_records_of_the_first_version_are_read() -> None:
    """They have fewer fields, and no `format`."""
    member = '{"id": "a-1", "host": "h", "address": "127.0.0.1", "num_workers": 1, "after": 0}'
    assert read_record(Member, member) == Member("a-1", "h", "127.0.0.1", 1, after=0)
    assert read_record(Closed, '{"term": 3, "at": 1}') == Closed(3, 1.0)
    assert "format" not in encode(MEMBER), "versions that read no unknown field read what this one writes"


@pytest.mark.parametrize("text", GARBAGE)
def test_what_is_no_record_says_so(text: str) -> None:
    """Whatever the text is, no parser error escapes."""
    for kind in (Member, Terms, Over, World, Head, Closed):
        with pytest.raises(UnreadableRecordError):
            read_record(kind, text)


@pytest.mark.parametrize("layout", [FORMAT + 1, "two"])
def test_a_newer_format_is_not_guessed_at(layout: object) -> None:
    """A newer format may use the same names with other meanings."""
    with pytest.raises(NewerRecordError, match="format"):
        read_record(Head, json.dumps({"term": 3, "commit": None, "format": layout}))


@pytest.mark.parametrize("text", GARBAGE)
def test_a_view_passes_over_what_it_cannot_read(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Everything else is in the view, and a warning names the key."""
    caplog.set_level(logging.WARNING)
    garbage = dict.fromkeys(
        ("world", "head", "failure", "closed", "over", "members__x", "members__a-2", "~terms__a-1", "other"), text
    )
    mine = {"members__a-1": encode(MEMBER)}
    assert view_of(**garbage, **mine) == view_of(**mine)
    assert read_head(KEYS.head, text) is None
    assert view_of(**{"members__a-2": encode(MEMBER)}) == view_of(), "a member is what its key says"


def test_a_warning_names_the_key(caplog: pytest.LogCaptureFixture) -> None:
    """Once, however often the key is read."""
    caplog.set_level(logging.WARNING)
    keys = Keys("a job of this test alone")
    for _ in range(3):
        read_view(Snapshot(1, {keys.failure: Entry("by etcdctl put", 1, 1)}), keys)
    assert caplog.text.count(f"{keys.failure} cannot be read as a record") == 1


@pytest.mark.parametrize("key", ["world", "head", "failure", "closed", "over", "members/alien", "~terms/alien"])
def test_garbage_below_the_prefix_ends_nobody(key: str) -> None:
    """Members of a world follow on, meet again if the world's record is lost, and finish the job."""
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        nodes = [make_node(store), make_node(store)]
        worlds = list(pool.map(enter, nodes))
        assert worlds[0] is not None
        store.swap({KEYS.prefix + key: Put("garbage")}, {})
        assert EtcdFence(store, "job").claim(1) >= 1
        again = meet_again(nodes, pool)
        assert again[0] == again[1] and again[0] is not None and again[0].term > worlds[0].term
        list(pool.map(lambda node: node.finish(PATIENCE_S), nodes))
        eventually(lambda: all(node.view.closed is not None for node in nodes), "the end")
        for node in nodes:
            node.leave()


@pytest.mark.parametrize("key", ["world", "head", "closed"])
def test_a_member_leaves_to_a_newer_version_what_it_cannot_read(key: str) -> None:
    """It does not seal, claim or publish over the record, and says what to do."""
    store = MemoryStore()
    node = make_node(store, last_call_s=0.0)
    assert enter(node) is not None
    fence = EtcdFence(store, "job")
    term = fence.claim(1)
    newer = json.dumps({"term": 9, "format": FORMAT + 1})
    store.swap({KEYS.prefix + key: Put(newer)}, {})
    with pytest.raises(NewerVersionError, match=rf"{KEYS.prefix}{key} has format.*Install the same version"):
        enter(node)
    with pytest.raises(NewerVersionError):
        fence.claim(term)
    if key == "head":
        with pytest.raises(NewerVersionError):
            fence.publish(term, "commits/a")
    assert store.get(KEYS.prefix + key).entries[KEYS.prefix + key].value == newer
    node.leave()


@pytest.mark.slow
def test_bytes_that_are_no_text_do_not_end_a_watch(run_id: str) -> None:
    """On a real etcd, keys and values are bytes."""
    prefix = Keys(run_id).prefix
    with EtcdServer() as server:
        store = patient(server.endpoint)
        watch = store.watch(prefix)
        client = client_of(store)
        client.put(prefix.encode() + b"members/\xff", b"\xfe\xff")
        written = store.swap({f"{prefix}a": Put("1")}, {})
        assert written is not None and watch.wait(Snapshot(written - 1, {}), PATIENCE_S) is not None
        late = store.watch(prefix)
        assert read_view(late.snapshot, Keys(run_id)).members == ()
        for each in (watch, late, store):
            each.close()
