"""One member's participation in a job: it registers, follows the job, and carries out `decisions`.

One thread follows the watch, and confirms that this member is alive when another's workers failed; the caller's thread
joins, waits for its world, and asks questions. Independent of torch: used by a TorchElastic agent and by workers.

Invariant: a decision is made on a view that contains the node's own last write.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from rendezvous.errors import (
    LimitsDifferError,
    StoppedWaiting,
    StoreError,
    StoreUnavailableError,
    TooFewNodesError,
)
from rendezvous.membership.dead_agents import LOOK_S, DeadAgentProbe, is_looking
from rendezvous.membership.known_agents import Ask, KnownAgents, by_node
from rendezvous.membership.latest_view import LatestView, Now
from rendezvous.membership.own_record import MOST_TRIES, PAUSE_S, OwnRecord, Place
from rendezvous.membership.records import (
    REQUEST_S,
    Closed,
    Failure,
    Job,
    Keys,
    Member,
    View,
    read_view,
)
from rendezvous.membership.rules import admission, changes, decisions, standing, words
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.rules.changes import Change
from rendezvous.membership.rules.decisions import Decision, Enter, Expelled, Finished, Refused, Seal, Wait
from rendezvous.membership.store import Put, Snapshot, Store
from rendezvous.membership.worlds import World
from rendezvous.outage_log import OutageLog, WaitingLog

CLOSED_S = 300.0
"""Seconds for which a finished job is marked as done."""

LEASE_MARGIN_S = 2.0
"""Seconds beyond its lease for which a dead member may still be seen."""
STEP_BACK_S = 0.5
"""Seconds for which a member that cannot host a world leaves it to others before it tries again."""

_log = logging.getLogger("rendezvous")


class Participant:
    """A member of a job: `join`, `next_world`, serve until `num_waiting()`, join again, and at last `leave`."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        policy: Policy,
        place: Place,
        *,
        ttl_s: float,
        ask: Ask | None = None,
        at_request: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_request` is called once, on the thread that follows the watch, if the member's node is asked to leave."""
        self.agents = KnownAgents(place.node, ask)
        self.at_change: Callable[[], None] = lambda: None
        """Called on the thread that follows the watch, whenever the view may have changed."""
        self._at_request, self._is_asked, self._is_leaving = at_request, False, False
        self.keys = Keys(run_id)
        self.policy = policy
        self.world: World | None = None
        self.joined_at = 0.0
        self.job = Job()
        """Description of this member's job, recorded when it closes the job."""
        self._store = store
        self._watch, self._follows_terms = store.watch(self.keys.prefix, self.keys.terms), False
        self._latest = LatestView(self.keys, self._watch.snapshot)
        self._own = OwnRecord(store, self._watch, self.keys, replace(place, nodes=policy.nodes), self._latest, ttl_s)
        self._left = threading.Event()
        self._dead_agents = DeadAgentProbe(self.agents)
        self._outage = OutageLog(_log)
        threading.Thread(target=self._follow, name=f"membership {run_id}", daemon=True).start()

    @property
    def id(self) -> str:
        return self._own.id

    @property
    def place(self) -> Place:
        """This member's location, which it publishes at its next registration."""
        return self._own.place

    @place.setter
    def place(self, place: Place) -> None:
        self._own.place = place

    @property
    def ttl_s(self) -> float:
        """Duration of the lease in seconds."""
        return self._own.ttl_s

    @property
    def view(self) -> View:
        return self._latest.view

    def join(self, timeout_s: float, is_stopped: Callable[[], bool] = lambda: False, *, as_last: bool = False) -> None:
        """Become ready for the next world: register, or leave the current world.

        With `as_last` it is ordered as the last to register, so that it does not lead. Waits if etcd does not answer,
        takes no writes, or denies access; raises StoreUnavailableError after `timeout_s`, StoppedWaiting when
        `is_stopped()`, and LimitsDifferError if other members were started with another --nnodes, or in another mode.
        """
        self.joined_at = time.time()
        if self._own.is_gone:
            self._check_limits(is_stopped)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._own.is_gone or not self._own.update(changes.leaving_world, is_renamed=as_last):
                    self._own.register()
            except StoreUnavailableError as error:
                if is_stopped():
                    raise StoppedWaiting("asked to leave while etcd was away") from error
                if time.monotonic() > deadline:
                    raise
                self._outage.waits(error, deadline - time.monotonic())
                time.sleep(PAUSE_S)
            else:
                self._outage.is_over()
                self.world = None
                return

    def next_world(
        self,
        host: Callable[[Seal], tuple[str, int]],
        timeout_s: float,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> World | None:
        """Wait for a world with this member in it, sealing it if this member leads; return None if the job is done.

        `host` starts the store of a world about to be sealed and returns its address; if it raises OSError, another
        member leads. Raises TooFewNodesError after `timeout_s`, StoppedWaiting when `is_stopped()`, NewerVersionError
        if a newer version has written records that this one cannot read, and LimitsDifferError if earlier members have
        another --nnodes or mode. A member without room in the world waits indefinitely.
        """
        deadline = time.monotonic() + timeout_s
        waiting, standing_by = WaitingLog(_log, timeout_s), WaitingLog(_log, every_s=math.inf)
        while True:
            decision, snapshot = self._decide()
            if isinstance(decision, Enter):
                self.world = decision.world
                self._follow_terms(self._needs_terms(0.0))
                return decision.world
            if isinstance(decision, Refused):
                raise LimitsDifferError(decision.why)
            if isinstance(decision, Finished):
                return None
            if isinstance(decision, Wait) and decision.why == "room":
                deadline = time.monotonic() + timeout_s
                if self._speaks_for_its_node():
                    standing_by.waits(lambda _: words.standing_by(self.view, self.policy, self.keys))
            left_s = deadline - time.monotonic()
            if not self._follows_terms and self._needs_terms(timeout_s - left_s):
                self._follow_terms(True)
            if is_stopped():
                raise StoppedWaiting("asked to leave while waiting for a world")
            if left_s <= 0:
                raise TooFewNodesError(
                    words.too_few(self.view, self.policy, self.keys, timeout_s, self._latest.finished)
                )
            if isinstance(decision, Wait) and decision.why == "nodes" and self._speaks_for_its_node():
                waiting.waits(self._waiting, at_once=bool(self._latest.finished))
            self._act(decision, snapshot, host, left_s)

    def _waiting(self, left_s: float) -> str:
        return words.waiting(self.view, self.policy, self.keys, left_s, self._latest.finished)

    def _check_limits(self, is_stopped: Callable[[], bool]) -> None:
        """Refuse to register if members have other limits or another mode, unless dead members' leases end soon."""
        deadline = time.monotonic() + self.ttl_s + LEASE_MARGIN_S
        nodes, is_live = self.policy.nodes, bool(self.place.node)
        while (why := admission.disagreement((now := self._latest.now()).view, nodes, is_live=is_live)) is not None:
            if is_stopped():
                raise StoppedWaiting("asked to leave before it had registered")
            if time.monotonic() > deadline:
                raise LimitsDifferError(why)
            self._latest.wait(now.snapshot, LOOK_S)

    def note_state(self, *, is_there: bool) -> None:
        """Note that this member has the state of its place in its world, so that others may need it, or has dropped
        what it had."""
        if self.policy.cell.size > 1:
            self._own.note_rank(self.world if is_there else None)

    def num_waiting(self) -> int:
        """Return the number of changes that require a new round; 0 while the world stands."""
        return 0 if self.world is None else standing.num_waiting(self.view, self.id, self.world, self.policy)

    def is_broken(self) -> bool:
        """Return True if this member's world cannot take another step."""
        return self.world is not None and standing.is_broken(self.view, self.id, self.world)

    @property
    def is_leading(self) -> bool:
        """True if this member has the first seat of its world."""
        return self.world is not None and self.world.rank_of(self.id) == 0

    def note_missed(self, nodes: frozenset[str]) -> None:
        """Record, for the next registration, the nodes that this member cannot reach."""
        self._own.missed = nodes

    def report_missed(self, nodes: frozenset[str]) -> None:
        """Publish the nodes that this member cannot reach, and leave its world if one of them is in it."""
        world = self.world
        mates = standing.mates_of(self.view, world) if world is not None else ()
        leaves = world is not None and any(mate.node_id in nodes for mate in mates)

        def reported(member: Member, view: View) -> Member:
            after = max(member.after, world.term) if leaves and world is not None else member.after
            return replace(member, missed=tuple(sorted(nodes)), after=after)

        self._own.missed = nodes
        self._own.update(reported)

    def remove_dead_members(self, dead: Iterable[Member], snapshot: Snapshot | None = None) -> bool:
        """Remove members known to be dead, those of a node at once; return True if any was removed.

        Members of a node are kept if one of them has changed since `snapshot`, or etcd does not answer.
        """
        snapshot = snapshot or self._latest.snapshot
        by = [changes.remove_dead_members(snapshot, self.keys, members) for members in by_node(dead).values()]
        return any([self._try(change) for change in by])  # noqa: C419 - all of them

    def wants_to_grow(self, quiet_s: float) -> bool:
        """Return True if members with agents that this one has met wait, and none has come or gone for `quiet_s`.

        So they are admitted together, and a world does not end for a newcomer whose address is wrong.
        """
        if self._latest.now().same_for_s < quiet_s or self.num_waiting() == 0 or self.world is None:
            return False
        return all(self.agents.has_met(member) for member in standing.joining(self.view, self.world, self.policy))

    def is_only_growing(self) -> bool:
        return self.world is not None and standing.is_only_growing(self.view, self.world)

    def is_to_blame(self) -> bool:
        """Report that this node's workers failed, and return True if the restart is charged to this node.

        Waits until every other member has confirmed that it is alive, or one is gone: at most a lease and two seconds.
        """
        world = self.world
        assert world is not None, "workers run in a world"
        deadline = time.monotonic() + self.ttl_s + 2.0
        while time.monotonic() < deadline:
            now = self._latest.now()
            verdict = standing.blame(now.view, self.id, world)
            reported = now.view.failure is not None and now.view.failure.term >= world.term
            if reported and now.view.failure is not None and now.view.failure.member == self.id:
                self._follow_terms(True)
            if verdict != "wait":
                return verdict == "pay"
            if not reported:
                self._try(changes.report_failure(now.snapshot, self.keys, Failure(world.term, self.id)))
            self._latest.wait(now.snapshot, 0.2)
        return True

    def finish(self, timeout_s: float) -> None:
        """Publish that this node's workers are done, wait for the others, and close the job with the last of them.

        Waits if etcd does not answer, since the workers have finished anyway. Nodes whose workers still run after
        `timeout_s` finish without this one.
        """
        world = self.world
        assert world is not None, "workers run in a world"
        deadline = time.monotonic() + timeout_s
        self._say_done(world.term, deadline)
        while True:
            now = self._latest.now()
            verdict = standing.ending(now.view, self.id, world)
            if verdict == "close":
                self.close(world.term)
            if verdict != "wait":
                return
            if (left_s := deadline - time.monotonic()) <= 0:
                _log.warning("workers of other nodes still run after %.0f s: they finish without this node", timeout_s)
                return
            self._latest.wait(now.snapshot, min(left_s, LOOK_S))

    def _say_done(self, term: int, deadline: float) -> None:
        """Publish that the workers are done; tried at least once, whatever the deadline."""
        while True:
            try:
                self._own.update(lambda member, view: replace(member, done=term))
            except StoreUnavailableError as error:
                if time.monotonic() > deadline:
                    return
                self._outage.waits(error, deadline - time.monotonic())
                time.sleep(PAUSE_S)
            else:
                return

    def close(self, term: int, for_s: float = CLOSED_S) -> None:
        """Mark the job as done for `for_s` seconds: members that join by then leave; later the run id may be reused."""
        now = self._latest.now()
        change = changes.close(now.snapshot, now.view, self.keys, Closed(term, time.time(), self.job))
        try:
            lease = self._store.lease(for_s, renew=False)
            self._own.swap(change, lease)
        except StoreError as error:
            _log.warning("could not mark the job as done: %s", error)

    def ask_to_leave(self, rank: int) -> str | None:
        """Ask the node of a rank of the current world to leave, and return it; None if too few nodes would stay.

        Returns at once; if etcd does not take the request, a warning is logged.
        """
        assert self.world is not None, "ranks are a world's"
        node = standing.node_to_spare(self.view, self.world, rank, self.policy)
        if node is not None:
            threading.Thread(target=self._request, args=(node,), name=f"request {node}", daemon=True).start()
        return node

    def _request(self, node: str) -> None:
        try:
            self._store.swap({self.keys.leave(node): Put("", self._store.lease(REQUEST_S, renew=False))}, {})
        except StoreError as error:
            _log.warning("node %s could not be asked to leave, and stays: %s", node, error)

    def begin_to_leave(self) -> None:
        """Note that this member will leave, which is then the cause if the workers of others fail."""
        self._is_leaving = True

    def leave(self) -> None:
        """Revoke the lease, so that the others need not wait for its end, and stop following; idempotent."""
        if self._left.is_set():
            return
        self._left.set()
        self._watch.close()
        try:
            self._leave_finished()
            self._own.revoke()
        except StoreError as error:
            _log.warning("could not revoke the lease, it will expire: %s", error)
        self._store.close()

    def _leave_finished(self) -> None:
        """Tell the remaining members that this one is not lost, if its workers have finished."""
        snapshot, view, _ = self._latest.now()
        for _ in range(MOST_TRIES):
            change = changes.leave_finished(snapshot, view, self.keys, self.id)
            if change is None or self._own.write(change, None):
                return
            snapshot = self._store.get(self.keys.prefix)
            view = read_view(snapshot, self.keys)

    def _decide(self) -> tuple[Decision, Snapshot]:
        """Return the next action, and the snapshot behind the decision, whose revisions guard the write."""
        now = self._latest.now()
        mine = self._own.mine(now)
        left = 0 if mine is None else mine.after
        return decisions.decide(now.view, self.id, self.policy, now.same_for_s, left), now.snapshot

    def _follow_terms(self, is_needed: bool) -> None:
        self._follows_terms = is_needed
        self._watch.cover("" if is_needed else self.keys.terms)

    def _needs_terms(self, waited_s: float) -> bool:
        """Return True if this member follows the others' terms, because it is to seal or looks for the dead.

        If etcd has lost the last world, or came back with an older one, all follow them, since it depends on them who
        is to seal; so it may if some have left that world without their state.
        """
        now = self._latest.now()
        view = now.view
        has_lost = view.term < self._latest.newest_term or (
            view.world is None and (view.head is not None or view.over > 0)
        )
        is_led = self._is_unsure(now) or decisions.leads(view, self.id, self.policy)
        return has_lost or is_led or is_looking(view, self.id, waited_s)

    def _is_unsure(self, now: Now) -> bool:
        """Return True if members may have left the last world without their state: only the terms tell who has some.

        Those who have know it at once; the others suspect it when nothing has happened for the time of a lease.
        """
        view = now.view
        if self.policy.cell.size == 1 or view.world is None or not view.is_left(view.term):
            return False
        is_without = view.world.rank_of(self.id) is not None and self._own.rank_in < view.term
        return is_without or now.same_for_s > self.ttl_s

    def _keep_terms(self) -> None:
        try:
            self._own.keep_terms()
        except StoreError as error:
            self._outage.waits(error)

    def _act(
        self, decision: Decision, snapshot: Snapshot, host: Callable[[Seal], tuple[str, int]], left_s: float
    ) -> None:
        if isinstance(decision, Seal):
            self._seal(decision, host, snapshot)
        elif isinstance(decision, Expelled):
            _log.warning("the lease of this member has ended: it joins as a new member")
            try:
                self._own.register()
                self._latest.wait(snapshot, min(left_s, LOOK_S))  # the watch notices if etcd has lost its data
            except StoreUnavailableError as error:
                self._outage.waits(error, left_s)
                time.sleep(min(left_s, LOOK_S))
        elif isinstance(decision, Wait):
            pause_s = LOOK_S
            if decision.why == "members":
                self._keep_terms()
            if decision.why == "members" and snapshot.is_whole:
                if self._bury(snapshot):
                    return
                pause_s = self._dead_agents.pause_s(self.view) if self.place.agent else LOOK_S
            self._latest.wait(snapshot, min(left_s, pause_s if decision.seconds is None else decision.seconds))

    def _seal(self, decision: Seal, host: Callable[[Seal], tuple[str, int]], snapshot: Snapshot) -> None:
        if not snapshot.is_whole:
            self._latest.wait(snapshot, LOOK_S)  # for what the watch covers from now on
            return
        try:
            address, port = host(decision)
        except OSError as error:
            _log.warning("this member cannot host a world's store, so it does not lead if there are others: %s", error)
            self._step_back(snapshot)
            return
        world = World(decision.term, decision.seats, decision.cause, address, port, time.time())
        if not self._try(changes.seal(snapshot, self.keys, world)):
            self._latest.wait(snapshot, 0.2)

    def _step_back(self, snapshot: Snapshot) -> None:
        """Become the last of the members, and give the others a moment to lead; a single member still leads."""
        try:
            self._own.update(changes.leaving_world, is_renamed=True)
        except StoreUnavailableError as error:
            self._outage.waits(error)
        self._latest.wait(snapshot, STEP_BACK_S)

    def _bury(self, snapshot: Snapshot) -> bool:
        """Remove the late members whose agent is gone; return True if there were any."""
        return self.remove_dead_members(self._dead_agents.gone(self.view), snapshot)

    def _try(self, change: Change) -> bool:
        """Like `OwnRecord.swap`, but return False if etcd does not answer, so that the caller retries later."""
        try:
            done = self._own.swap(change, None)
        except StoreError as error:
            self._outage.waits(error)
            return False
        self._outage.is_over()
        return done

    def _follow(self) -> None:
        seen = Snapshot(0, {})
        while not self._left.is_set():
            snapshot = self._watch.wait(seen, LOOK_S)
            if snapshot is not None:
                seen = snapshot
                self._latest.show(snapshot)
                self.at_change()
                if not self._is_asked and self.place.node in self.view.leaving:
                    self._is_asked = True
                    self._at_request()
            if not self._left.is_set():
                self._show_life()

    def _show_life(self) -> None:
        """Confirm to a member whose workers failed that this member is alive, or else that its leaving is the cause."""
        now, world = self._latest.now(), self.world
        view, mine = now.view, self._own.mine(now)
        if world is None or mine is None or view.failure is None or view.failure.term != world.term:
            return
        if view.failure.member == self.id or mine.seen >= world.term or mine.node_id in view.leaving:
            return
        if self._is_leaving:
            self._request(mine.node_id)
            return
        term = world.term
        try:
            self._own.update(lambda member, view: replace(member, seen=term))
        except StoreError as error:
            _log.debug("could not show a sign of life: %s", error)

    def _speaks_for_its_node(self) -> bool:
        """Return True if this is the first member of its node, which logs on behalf of all."""
        return self.id == self.view.first_of_nodes.get(self.place.node or self.id, self.id)
