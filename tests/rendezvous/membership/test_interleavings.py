"""Model checking of membership: every interleaving of a few nodes that join, seal, die, freeze and return.

The model runs the product's pure functions. A node looks, decides and writes in three separate steps, so that every
write may rest on an old look; a lease may expire while its holder, a zombie, continues. Only a node that is to seal
sees the terms of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import pytest

from rendezvous.errors import FencedError
from rendezvous.membership.fence import raise_head
from rendezvous.membership.records import Keys, Member, View, read_view
from rendezvous.membership.rules import changes, decisions, standing
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.rules.changes import Change
from rendezvous.membership.rules.decisions import Decision, Enter, Seal
from rendezvous.membership.store import Entry, Snapshot
from rendezvous.membership.worlds import World

pytestmark = pytest.mark.slow

KEYS = Keys("job")
POLICY = Policy(min_nodes=1, max_nodes=3, last_call_s=0.0)
UNTOLD = "told"
"""Planted in place of an ignored guard: a member that leaves a world does not say that it is over."""


@dataclass(frozen=True)
class Actor:
    """A process: its current member id, the world it serves, the newest that it has left, and its pending write."""

    id: str = ""
    lives: int = 0
    serving: int = 0
    left: int = 0
    pending: Change | None = None
    is_dead: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.id, self.lives, self.serving, self.left, repr(self.pending), self.is_dead))


Entries = tuple[tuple[str, Entry], ...]


@lru_cache(None)
def snapshot_of(revision: int, entries: Entries) -> Snapshot:
    """Return the snapshot of the store's entries: many states differ in their processes alone."""
    return Snapshot(revision, dict(entries))


@lru_cache(None)
def view_of(revision: int, entries: Entries, me: str = "") -> View:
    """Return what a node sees of the store's entries; all of it if none is named."""
    snapshot = snapshot_of(revision, entries)
    public = read_view(snapshot.before(KEYS.terms), KEYS)
    return read_view(snapshot, KEYS) if not me or decisions.leads(public, me, POLICY) else public


@dataclass(frozen=True)
class State:
    """The store's keys, all processes, and the history so far."""

    revision: int
    entries: Entries
    actors: tuple[Actor, ...]
    sealed: tuple[int, ...] = ()
    claimed: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    """Terms whose worlds were said to be over."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.entries, self.actors, self.sealed, self.claimed, self.ended))

    @property
    def snapshot(self) -> Snapshot:
        return snapshot_of(self.revision, self.entries)

    @property
    def view(self) -> View:
        return view_of(self.revision, self.entries)

    def with_actor(self, place: int, actor: Actor) -> State:
        return replace(self, actors=(*self.actors[:place], actor, *self.actors[place + 1 :]))

    def written(self, change: Change, *, ignoring: str = "") -> State | None:
        """Return the state after a transaction, or None if a guard does not hold; a planted bug ignores one guard."""
        now = self.snapshot
        if any(now.revision_of(key) != revision for key, revision in change.guards.items() if key != ignoring):
            return None
        entries, revision = dict(self.entries), self.revision + 1
        for key, text in change.writes.items():
            created = entries[key].create_revision if key in entries else revision
            entries.pop(key, None)
            if text is not None:
                entries[key] = Entry(text, revision, created)
        return replace(self, revision=revision, entries=tuple(sorted(entries.items(), key=lambda item: item[0])))


def steps(state: State, *, ignoring: str = "") -> Iterator[State]:
    """Return all states that one step of one process, or one expired lease, can lead to."""
    for place, actor in enumerate(state.actors):
        key = KEYS.member(actor.id)
        if not actor.is_dead:
            yield from _act(state, place, actor, ignoring)
            if actor.id:
                yield state.with_actor(place, replace(actor, is_dead=True))
        elif actor.lives < 2:
            yield state.with_actor(place, Actor(lives=actor.lives))
        if actor.id and key in state.snapshot.entries:
            ended = state.written(Change({key: None, KEYS.terms_of(actor.id): None}, {}))
            assert ended is not None
            yield ended


def _act(state: State, place: int, actor: Actor, ignoring: str) -> Iterator[State]:
    if not actor.id:
        yield from _register(state, place, actor)
    elif actor.pending is not None:
        yield _write(state, place, actor, ignoring)
    elif actor.serving:
        yield from _serve(state, place, actor)
    else:
        yield from _look(state, place, actor)


def _register(state: State, place: int, actor: Actor) -> Iterator[State]:
    if actor.lives == 2:
        return
    member = Member(f"{place}.{actor.lives + 1}", "host", "address", 1, after=state.view.term)
    after = state.written(changes.register(KEYS, member))
    assert after is not None
    yield after.with_actor(place, Actor(member.id, actor.lives + 1))


@lru_cache(None)
def decision_of(revision: int, entries: Entries, me: str, left: int) -> Decision | Change:
    """Return a node's decision on these entries; for a world that it would seal, the transaction."""
    decision = decisions.decide(view_of(revision, entries, me), me, POLICY, quiet_s=1.0, left=left)
    if not isinstance(decision, Seal):
        return decision
    world = World(decision.term, decision.seats, decision.cause, "address", 1, 0.0)
    return changes.seal(snapshot_of(revision, entries), KEYS, world)


def _look(state: State, place: int, actor: Actor) -> Iterator[State]:
    decision = decision_of(state.revision, state.entries, actor.id, actor.left)
    if isinstance(decision, Enter):
        yield state.with_actor(place, replace(actor, serving=decision.world.term))
    elif isinstance(decision, Change):
        yield state.with_actor(place, replace(actor, pending=decision))
    elif isinstance(decision, decisions.Expelled):
        yield state.with_actor(place, Actor(lives=actor.lives))


def _serve(state: State, place: int, actor: Actor) -> Iterator[State]:
    view = view_of(state.revision, state.entries, actor.id)
    mine = view.member(actor.id)
    try:
        _, claim = raise_head(state.snapshot, KEYS, actor.serving, actor.id, actor.serving)
        if view.head is None or view.head.term < actor.serving:
            yield state.with_actor(place, replace(actor, pending=claim))
    except FencedError:
        assert view.term > actor.serving, "only a newer world fences"
    world = view.world
    assert world is not None
    stands = world.term == actor.serving and standing.num_waiting(view, actor.id, world, POLICY) == 0
    if mine is None:
        yield state.with_actor(place, Actor(lives=actor.lives))
    elif not stands:
        mine = replace(mine, after=max(mine.after, actor.left))
        leaving = changes.rewrite(state.snapshot, view, KEYS, mine, changes.leaving_world(mine, view))
        yield state.with_actor(place, replace(actor, serving=0, pending=leaving))


def _write(state: State, place: int, actor: Actor, ignoring: str) -> State:
    assert actor.pending is not None
    after = state.written(actor.pending, ignoring=ignoring)
    free = replace(actor, pending=None)
    if KEYS.over in actor.pending.writes and (after is None or ignoring == UNTOLD):
        return state.with_actor(place, replace(actor, pending=actor.pending.without(KEYS.over)))
    if after is None:
        return state.with_actor(place, free)
    if KEYS.world in actor.pending.writes:
        after = replace(after, sealed=(*after.sealed, after.view.term))
    if KEYS.head in actor.pending.writes:
        head = after.view.head
        assert head is not None
        after = replace(after, claimed=(*after.claimed, head.term))
        assert actor.serving == state.view.term, "a fenced world raised the head"
    if KEYS.over in actor.pending.writes:
        after = replace(after, ended=(*after.ended, after.view.over))
    if KEYS.terms_of(actor.id) in actor.pending.writes:
        mine = after.view.member(actor.id)
        free = replace(free, left=0 if mine is None else mine.after)
        assert free.left < state.view.term or not _sits(state.view, actor.id) or after.view.over >= state.view.term, (
            "a member has left a world, and nobody was told"
        )
    return after.with_actor(place, free)


def _sits(view: View, member_id: str) -> bool:
    return view.world is not None and view.world.rank_of(member_id) is not None


def check(state: State) -> None:
    """Check that there is one world per term, that terms only grow, and that nobody serves an unsealed term.

    All are told once that a world is over.
    """
    for terms in (state.sealed, state.claimed, state.ended):
        assert all(old < new for old, new in pairwise(terms)), f"terms do not grow: {terms}"
    assert {actor.serving for actor in state.actors} <= {0, *state.sealed}


def beginning(num_nodes: int) -> State:
    return State(1, (), tuple(Actor() for _ in range(num_nodes)))


def explore(start: State, depth: int, *, ignoring: str = "") -> list[State]:
    """Check every state within `depth` steps once, breadth first."""
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        state, steps_done = queue.popleft()
        if steps_done == depth:
            continue
        for following in steps(state, ignoring=ignoring):
            if following not in seen:
                check(following)
                seen.add(following)
                queue.append((following, steps_done + 1))
    return list(seen)


def settle(state: State) -> State:
    """Remove dead members and let the living act in turn, without further faults."""
    for place, actor in enumerate(state.actors):
        state = state.with_actor(place, replace(actor, lives=10))
    held = {name(actor.id) for actor in state.actors if not actor.is_dead for name in (KEYS.member, KEYS.terms_of)}
    leased = (KEYS.members, KEYS.terms)
    for key in [key for key in state.snapshot.entries if key.startswith(leased) and key not in held]:
        state = state.written(Change({key: None}, {})) or state
    for _ in range(12):
        before = state
        for place, actor in enumerate(state.actors):
            if not actor.is_dead:
                state = next(reversed([state, *_act(state, place, state.actors[place], "")]))
        if state == before:
            break
    return state


@pytest.mark.parametrize(("num_nodes", "depth"), [(2, 14), pytest.param(3, 9, marks=pytest.mark.hunt)])
def test_every_interleaving_is_safe(num_nodes: int, depth: int) -> None:
    """No interleaving of joins, crashes, lost leases, restarts and claims seals a term twice or lets one decrease."""
    states = explore(beginning(num_nodes), depth)
    assert len(states) > 1000
    assert max(len(state.sealed) for state in states) >= 2
    assert any(state.claimed for state in states)


@pytest.mark.parametrize(
    ("guard", "violation"),
    [(KEYS.world, "terms do not grow|fenced world"), (KEYS.head, "terms do not grow|fenced world"), (UNTOLD, "told")],
)
def test_the_search_finds_a_missing_guard(guard: str, violation: str) -> None:
    """The check can fail: it finds what happens without a guard, and if nobody says that a world is over."""
    with pytest.raises(AssertionError, match=violation):
        explore(beginning(2), 14, ignoring=guard)


def test_of_members_that_leave_at_once_one_tells_all() -> None:
    """A third node joins a world of two. The check can fail: without the guard on the end of a world, both tell."""
    calm = settle(beginning(2))
    joined = replace(calm, actors=(*calm.actors, Actor()))
    assert all(actor.serving for actor in calm.actors)
    states = explore(joined, 6)
    assert {state.ended for state in states} == {(), (calm.view.term,)}
    with pytest.raises(AssertionError, match="terms do not grow"):
        explore(joined, 6, ignoring=KEYS.over)


def test_progress_is_possible_from_every_state() -> None:
    """From every reachable state, once faults stop, the living end in one world together."""
    for state in explore(beginning(2), 8):
        calm = settle(state)
        living = [actor for actor in calm.actors if not actor.is_dead]
        assert len({actor.serving for actor in living}) <= 1 and all(actor.serving for actor in living), calm
