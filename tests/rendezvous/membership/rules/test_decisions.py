"""Decisions from a single view of a job: which members wait, seal or are left out, and why."""

from __future__ import annotations

from dataclasses import astuple, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.membership.memory_store import MemoryStore
from rendezvous.membership.records import (
    Closed,
    Failure,
    Head,
    Keys,
    Member,
    Over,
    Terms,
    View,
    encode,
    read_view,
)
from rendezvous.membership.rules import admission, changes, decisions, standing
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.rules.decisions import Enter, Finished, Seal, Wait
from rendezvous.membership.store import Entry, Put, Snapshot
from rendezvous.membership.worlds import Seat, World

KEYS = Keys("job")
POLICY = Policy(min_nodes=1, max_nodes=3, last_call_s=0.0)


def member(name: str, **fields: int) -> Member:
    return Member(name, "host", "address", 2, **{"after": 0, **fields})


def world(term: int, *names: str) -> World:
    return World(term, tuple(Seat(name, 2) for name in names), "start", "address", 1, 0.0)


def view(*members: Member, of: World | None = None, **fields: object) -> View:
    return View(9, members, of, **fields)  # type: ignore[arg-type]


TWO = Policy(min_nodes=1, max_nodes=2, last_call_s=2.0)


def test_a_full_house_starts_at_once() -> None:
    """With max_nodes ready the first registered seals without a last call; the others wait for it."""
    both = view(member("b"), member("a"))
    assert decisions.decide(both, "b", TWO, 0.0) == Seal(1, (Seat("b", 2), Seat("a", 2)), "start")
    assert decisions.decide(both, "a", TWO, 0.0) == Wait("leader")


@pytest.mark.parametrize(
    ("min_nodes", "leaving", "members", "spared"),
    [
        (1, (), "abc", "b"),
        (2, (), "abc", "b"),
        (3, (), "abc", None),  # the minimum
        (2, ("c",), "abc", None),  # another one is already leaving
        (2, ("b",), "abc", "b"),
        (1, (), "ac", None),  # the member is gone
    ],
)
def test_a_node_is_spared_only_if_the_fewest_stay(
    min_nodes: int, leaving: tuple[str, ...], members: str, spared: str | None
) -> None:
    """Of three nodes that train, the second is to be left out."""
    seen = view(
        *(replace(member(name), node=name) for name in members), of=world(3, *"abc"), leaving=frozenset(leaving)
    )
    assert standing.node_to_spare(seen, world(3, *"abc"), 1, Policy(min_nodes, 3)) == spared


def test_a_new_job_waits_a_moment_for_more() -> None:
    """A starting job waits for the quiet time, a continuing one does not."""
    alone = view(member("a"))
    assert decisions.decide(alone, "a", TWO, 0.5) == Wait("last call", 1.5)
    assert isinstance(decisions.decide(alone, "a", TWO, 2.0), Seal)
    survivor = view(member("a", after=3), of=world(3, "a", "b"))
    assert decisions.decide(survivor, "a", TWO, 0.0) == Seal(4, (Seat("a", 2),), "lost")


def test_live_members_are_waited_for() -> None:
    """While a member of the last world still trains, or its lease runs, nothing is sealed."""
    half = view(member("a", after=3), member("b", after=0), of=world(3, "a", "b"))
    assert decisions.decide(half, "a", TWO, 99.0) == Wait("members")


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ([member("a", after=3), member("b", after=3)], "restart"),
        ([member("a", after=3), member("c")], "lost"),
        ([member("c")], "start"),
    ],
)
def test_causes(members: list[Member], cause: str) -> None:
    """A world records why it was formed."""
    decision = decisions.decide(view(*members, of=world(3, "a", "b")), members[0].id, TWO, 9.0)
    assert isinstance(decision, Seal) and (decision.cause, decision.term) == (cause, 4)


def test_members_beyond_the_maximum_wait() -> None:
    """A full world is not disturbed by another node, which waits until there is room."""
    full = view(member("a"), member("b"), member("c"), of=world(3, "a", "b"))
    assert decisions.decide(full, "c", TWO, 9.0) == Wait("room")
    assert standing.num_waiting(full, "a", world(3, "a", "b"), TWO) == 0
    freed = view(member("a"), member("c"), of=world(3, "a", "b"))
    assert standing.num_waiting(freed, "a", world(3, "a", "b"), TWO) == 2


def test_a_world_that_one_member_has_left_and_that_has_lost_another_does_not_stand() -> None:
    """These are two changes, which add up."""
    three = world(3, "a", "b", "c")
    broken = view(member("a"), member("b", after=3), of=three)
    assert standing.num_waiting(broken, "a", three, POLICY) == 2


def test_terms_grow_above_the_head() -> None:
    """A new world's term is above every claimed one."""
    decision = decisions.decide(view(member("a"), head=Head(41, None)), "a", TWO, 9.0)
    assert isinstance(decision, Seal) and decision.term == 42


def test_terms_grow_above_what_members_remember() -> None:
    """Etcd may have lost its data, but members remember: a term or name that they know is never reused."""
    decision = decisions.decide(view(member("a"), member("b", after=12), of=world(1, "a")), "b", TWO, 9.0)
    assert decision == Wait("members")  # the early member's world, until its next step
    decision = decisions.decide(view(member("a", after=1), member("b", after=12), of=world(1, "a")), "a", TWO, 9.0)
    assert isinstance(decision, Seal) and decision.term == 13


def test_terms_grow_above_the_newest_that_was_left() -> None:
    """Otherwise, worlds whose term is not above it would be over as soon as they are sealed, one after another."""
    decision = decisions.decide(view(member("a"), over=9), "a", TWO, 9.0)
    assert isinstance(decision, Seal) and decision.term == 10


def test_below_the_minimum_nothing_is_sealed() -> None:
    assert decisions.decide(view(member("a")), "a", Policy(2, 3), 99.0) == Wait("nodes")


def test_a_finished_job_admits_nobody() -> None:
    """Once a job is closed everybody leaves; once a member has finished nobody is admitted."""
    assert decisions.decide(view(member("a"), closed=Closed(3, 0.0)), "a", TWO, 9.0) == Finished()
    three = Policy(1, 3)
    ending = view(member("a", done=3), member("b"), member("c"), of=world(3, "a", "b"))
    assert standing.num_waiting(ending, "b", world(3, "a", "b"), three) == 0
    done = view(member("a", done=3), member("b", done=3), member("c"), of=world(3, "a", "b"))
    assert decisions.decide(done, "c", three, 99.0) == Wait("members")
    died_before_closing = view(member("c"), of=world(3, "a", "b"))
    assert isinstance(decisions.decide(died_before_closing, "c", three, 99.0), Seal)


def test_the_last_to_finish_closes() -> None:
    """A finished member waits for the others, closes the job with the last, and leaves it to one that restarts."""
    both = world(3, "a", "b")
    assert standing.ending(view(member("a", done=3), member("b"), of=both), "a", both) == "wait"
    assert standing.ending(view(member("a", done=3), member("b", done=3), of=both), "a", both) == "close"
    assert standing.ending(view(member("a", done=3), of=both), "a", both) == "close"
    assert standing.ending(view(member("a", done=3), member("b", after=3), of=both), "a", both) == "leave"


def test_who_has_finished_and_left_is_not_lost() -> None:
    """A world continues when a member leaves after its workers have finished: nobody restarts, joins, or goes free."""
    both = replace(world(3, "a", "b"), left=("a",))
    alone = view(member("b"), member("c"), of=both, failure=Failure(3, "b"))
    assert standing.num_waiting(alone, "b", both, Policy(1, 3)) == 0
    assert not standing.is_broken(alone, "b", both)
    assert standing.blame(alone, "b", both) == "pay"
    assert standing.ending(alone, "b", both) == "close"
    dead = view(member("c"), of=both)
    assert isinstance(decisions.decide(dead, "c", Policy(1, 3), 99.0), Seal), "those who still worked died: again"


def leaving(me: str, *members: Member, of: World) -> changes.Change | None:
    records = {KEYS.member(each.id): each for each in members} | {KEYS.world: of}
    snapshot = Snapshot(7, {key: Entry(encode(record), 5, 5) for key, record in records.items()})
    return changes.leave_finished(snapshot, read_view(snapshot, KEYS), KEYS, me)


def test_leaving_is_said_by_who_has_finished_before_others() -> None:
    """A member that is lost, leaves before its workers have finished, or is the last one, is not reported."""
    both = world(3, "a", "b")
    said = leaving("a", member("a", done=3), member("b"), of=both)
    assert said == changes.Change({KEYS.world: encode(replace(both, left=("a",)))}, {KEYS.world: 5})
    assert leaving("a", member("a"), member("b"), of=both) is None
    assert leaving("a", member("a", done=3), member("b", done=3), of=both) is None
    assert leaving("a", member("b"), of=both) is None
    assert leaving("a", member("a", done=3), member("b", after=3), of=both) is None


def rewritten(mine: Member, wanted: Member, *, over: int = 0) -> changes.Change:
    """Return what a member of a world of term 3 writes."""
    records = {KEYS.member(mine.id): mine, KEYS.world: world(3, "a", "b"), KEYS.over: Over(over)}
    snapshot = Snapshot(7, {key: Entry(encode(record), 5, 5) for key, record in records.items()})
    return changes.rewrite(snapshot, read_view(snapshot, KEYS), KEYS, mine, wanted)


def test_the_first_that_leaves_a_world_tells_all_and_its_terms_tell_the_rest() -> None:
    """What changes in each recovery is not in the record that all members follow."""
    mine, ready = member("a"), encode(Terms(3))
    assert rewritten(mine, replace(mine, after=3)) == changes.Change(
        {KEYS.terms_of("a"): ready, KEYS.over: encode(Over(3))}, {KEYS.member("a"): 5, KEYS.over: 5}
    )
    assert rewritten(mine, replace(mine, after=3), over=3) == changes.Change(
        {KEYS.terms_of("a"): ready}, {KEYS.member("a"): 5}
    )
    assert rewritten(mine, replace(mine, seen=3)).writes.keys() == {KEYS.terms_of("a")}, "it is still in its world"


def test_a_record_that_all_follow_holds_the_terms_as_well() -> None:
    """So no older terms replace those of a rewritten or renamed record."""
    mine = member("a", after=3)
    for wanted in (replace(mine, done=3), replace(mine, id="c", after=4)):
        writes = rewritten(mine, wanted, over=3).writes
        assert writes[KEYS.terms_of("a")] is None and writes[KEYS.member(wanted.id)] == encode(wanted)
        assert (writes.get(KEYS.member("a")) is None) == (wanted.id != "a")


def test_dead_members_are_removed_with_their_terms() -> None:
    keys = [KEYS.member("a"), KEYS.member("b"), KEYS.terms_of("a")]
    snapshot, dead = Snapshot(7, {key: Entry("", 5, 5) for key in keys}), [member("a"), member("b")]
    change = changes.remove_dead_members(snapshot, KEYS, dead)
    guards = {**dict.fromkeys(keys, 5), KEYS.terms_of("b"): 0}
    assert change == changes.Change(dict.fromkeys(keys), guards), "one that becomes ready is alive"
    change = changes.remove_dead_members(snapshot.before(KEYS.terms), KEYS, dead)
    assert change == changes.Change(dict.fromkeys(keys[:2]), dict.fromkeys(keys[:2], 5))


def test_who_is_to_seal_follows_from_what_all_see() -> None:
    """Nobody's readiness is needed, except whether a world can be sealed yet."""
    seen = view(member("a", done=3), member("b"), member("c"), of=world(3, "a", "b", "c"), over=3)
    assert [decisions.leads(seen, name, POLICY) for name in "abc"] == [False, True, False]
    assert decisions.decide(seen, "b", POLICY, 0.0, left=3) == Wait("members")
    assert decisions.decide(seen, "b", replace(POLICY, min_nodes=3), 0.0, left=3) == Wait("nodes"), "even if all were"
    assert decisions.decide(seen, "b", POLICY, 0.0, left=2) == Enter(world(3, "a", "b", "c"))


def test_seats_have_the_roles_of_their_members() -> None:
    """Ranks within a role follow from the sealed world alone."""
    trainer, server = replace(member("a"), role="trainer"), replace(member("b"), role="server")
    decision = decisions.decide(view(trainer, server), "a", TWO, 0.0)
    assert isinstance(decision, Seal) and [seat.role for seat in decision.seats] == ["trainer", "server"]


def test_blame() -> None:
    """Nobody pays for a lost node; for a failed worker the first to fail pays, once all have shown that they live."""
    both = world(3, "a", "b")
    failed = Failure(3, "a")
    assert standing.blame(view(member("a"), of=both, failure=failed), "a", both) == "free"
    silent = view(member("a"), member("b", seen=2), of=both, failure=failed)
    assert standing.blame(silent, "a", both) == "wait"
    assert standing.blame(silent, "b", both) == "free"
    alive = view(member("a"), member("b", seen=3), of=both, failure=failed)
    assert standing.blame(alive, "a", both) == "pay"
    leaving = view(member("a"), member("b"), of=both, failure=failed, leaving=frozenset("b"))
    assert standing.blame(leaving, "a", both) == "free"


def test_records_come_back_as_they_were() -> None:
    """A view shows what was written to the store, with members in the order of registration."""
    first, last = member("z"), member("a")
    texts = {KEYS.member("z"): (first, 2), KEYS.member("a"): (last, 3), KEYS.world: (world(1, "z", "a"), 4)}
    entries = {key: Entry(encode(record), revision, revision) for key, (record, revision) in texts.items()}
    shown = read_view(Snapshot(4, entries), KEYS)
    assert astuple(shown) == astuple(View(4, (first, last), world(1, "z", "a")))


def worker(name: str, node: str, **fields: int) -> Member:
    return Member(name, "host", "address", 1, **{"after": 0, **fields}, node=node, node_members=2)  # type: ignore[arg-type]


def test_nodes_are_counted_not_their_workers() -> None:
    """A world of at most two nodes takes all workers of the first two, and the third node waits for room."""
    six = view(*(worker(f"{node}{turn}", node) for turn in range(2) for node in "abc"))
    decision = decisions.decide(six, "a0", TWO, 99.0)
    assert isinstance(decision, Seal)
    assert [seat.member for seat in decision.seats] == ["a0", "b0", "a1", "b1"]
    assert decisions.decide(view(worker("a0", "a"), worker("a1", "a")), "a0", Policy(2, 2), 99.0) == Wait("nodes")


def test_a_fresh_job_waits_for_all_workers_of_a_node() -> None:
    """An incomplete node is waited for at the start of a job, but not once the job runs."""
    assert decisions.decide(view(worker("a0", "a")), "a0", TWO, 99.0) == Wait("nodes")
    running = view(worker("a0", "a", after=1), of=world(1, "a0", "a1"))
    assert isinstance(decisions.decide(running, "a0", TWO, 0.0), Seal)


def test_a_world_is_broken_by_loss_and_not_by_joiners() -> None:
    """A lost member, a member that left, a newer world, or the own lease's end break a world; a joiner does not."""
    two = world(1, "a", "b")
    assert not standing.is_broken(view(member("a"), member("b"), member("c"), of=two), "a", two)
    assert standing.is_broken(view(member("a"), of=two), "a", two)
    assert standing.is_broken(view(member("a"), member("b", after=1), of=two), "a", two)
    assert standing.is_broken(view(member("a"), member("b"), of=world(2, "a", "b")), "a", two)
    assert standing.is_broken(view(member("b"), of=two), "a", two)
    assert view(member("a")).num_lost == 0, "there is no world yet"


def test_a_replaced_worker_of_a_full_world_has_room() -> None:
    """A worker of a node in the world is admitted although the world has its maximum number of nodes."""
    full = view(worker("a0", "a"), worker("b0", "b"), worker("a2", "a"), of=world(1, "a0", "b0"))
    assert standing.num_waiting(full, "a0", world(1, "a0", "b0"), TWO) == 1
    assert decisions.decide(full, "a2", TWO, 0.0) == Wait("members")


def test_members_beyond_the_most_stand_by() -> None:
    """A world takes only as many members as it can use; another one is on standby, and is admitted when one is lost."""
    policy = Policy(1, 4, 0.0, max_members=2)
    three = view(member("a"), member("b"), member("c"))
    decision = decisions.decide(three, "a", policy, 99.0)
    assert isinstance(decision, Seal)
    assert [seat.member for seat in decision.seats] == ["a", "b"]
    two = world(1, "a", "b")
    running = view(member("a"), member("b"), member("c"), of=two)
    assert standing.num_waiting(running, "a", two, policy) == 0
    assert decisions.decide(running, "c", policy, 99.0) == Wait("room")
    stopped = view(member("a", after=1), member("b"), of=two)
    assert decisions.decide(stopped, "a", policy, 99.0) == Wait("members"), "it has a place"
    again = decisions.decide(view(member("a", after=1), member("c"), of=two), "a", policy, 0.0)
    assert isinstance(again, Seal)
    assert [seat.member for seat in again.seats] == ["a", "c"]


@given(st.integers(2, 9), st.data())
def test_members_out_of_reach_of_each_other_make_no_world(num_nodes: int, data: st.DataObject) -> None:
    """No two chosen members miss each other, whichever noticed; a member that misses nobody is always chosen."""
    names = [str(number) for number in range(num_nodes)]
    others = st.lists(st.sampled_from([*names, "gone"]), max_size=3)
    members = tuple(replace(member(name), missed=tuple(data.draw(others))) for name in names)
    chosen = admission.mutually_reachable(members)
    ids = {one.id for one in chosen}
    assert not any(other in ids - {one.id} for one in chosen for other in one.missed)
    hit = {other for one in members for other in one.missed if other != one.id}
    assert {one.id for one in members if one.id not in hit and not set(one.missed) & set(names) - {one.id}} <= ids


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_larger_part_of_a_split_network_continues(size: int, other_size: int, random: Random) -> None:
    """Of two disconnected parts the larger one is chosen; of equal ones that of the first registered member."""
    names = [*(f"a{n}" for n in range(size)), *(f"b{n}" for n in range(other_size))]
    random.shuffle(names)
    members = [replace(member(name), missed=tuple(o for o in names if o[0] != name[0])) for name in names]
    kept = {one.id[0] for one in admission.mutually_reachable(tuple(members))}
    assert len(kept) == 1
    if size != other_size:
        assert kept == {"a" if size > other_size else "b"}


def test_an_unreachable_member_stands_by_until_the_network_heals() -> None:
    """The others' world continues unchanged; a member that misses the leader does not lead another world."""
    two = world(1, "a", "b")
    cut = replace(member("c"), missed=("a", "b"))
    running = view(member("a"), member("b"), cut, of=two)
    assert standing.num_waiting(running, "a", two, Policy(1, 3)) == 0
    assert decisions.decide(running, "c", Policy(1, 3), 99.0) == Wait("room")
    assert standing.num_waiting(view(member("a"), member("b"), member("c"), of=two), "a", two, Policy(1, 3)) == 1
    another = view(member("a"), member("b"), cut, member("d"), of=two)
    assert decisions.decide(another, "d", Policy(1, 3), 99.0) == Wait("members"), "all can reach it"
    first = view(replace(member("a", after=1), missed=("b", "c")), member("b", after=1), member("c"), of=two)
    decision = decisions.decide(first, "b", Policy(1, 3), 99.0)
    assert isinstance(decision, Seal)
    assert [seat.member for seat in decision.seats] == ["b", "c"]
    assert decisions.decide(first, "a", Policy(1, 3), 99.0) == Wait("room")
    assert decisions.decide(first, "b", Policy(3, 3), 99.0) == Wait("nodes")


def test_of_two_halves_the_one_that_has_trained_continues() -> None:
    """A member that was left out does not take over from the last world's survivor, even if it registered first."""
    out, lost = replace(member("a"), missed=("b",)), world(7, "b", "c")
    survivor = member("b", after=7)
    seen = view(out, survivor, of=lost)
    assert isinstance(decisions.decide(seen, "a", POLICY, 0.0), Wait)
    sealed = decisions.decide(seen, "b", POLICY, 0.0)
    assert isinstance(sealed, Seal) and [seat.member for seat in sealed.seats] == ["b"]


def test_a_world_of_a_thousand_is_sealed_in_a_transaction_that_etcd_takes() -> None:
    """All seats are guarded at once; a member that was written or has joined since the look is noticed."""
    store, keys = MemoryStore(), Keys("many")
    for number in range(1000):
        member = Member(f"m{number}", "host", "address", 1, after=0)
        store.swap({keys.member(member.id): Put(encode(member))}, {})
    snapshot = store.get(keys.prefix)
    decision = decisions.decide(read_view(snapshot, keys), "m0", Policy(1, 1000), quiet_s=10.0)
    assert isinstance(decision, Seal) and len(decision.seats) == 1000
    change = changes.seal(snapshot, keys, World(decision.term, decision.seats, decision.cause, "address", 1, 0.0))
    store.swap({keys.member("late"): Put(encode(Member("late", "host", "address", 1, after=0)))}, {})
    assert store.swap({key: Put(text or "") for key, text in change.writes.items()}, change.guards) is None
    change = changes.seal(store.get(keys.prefix), keys, World(1, decision.seats, decision.cause, "address", 1, 0.0))
    assert store.swap({key: Put(text or "") for key, text in change.writes.items()}, change.guards) is not None
