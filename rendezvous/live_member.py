"""Live worlds: workers that train in the same process through one world after another.

The agent's rendezvous is node-local. Each worker is a member itself, registers once it has warmed up, and forms worlds
with the others through etcd; a fault costs the survivors a new world, not a new process. The worker checks
`is_broken()` while it waits for others and `wants_to_grow()` between its steps; if either is True, it calls
`next_world()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store as TorchStore

from rendezvous.agent.worker_end import announce, declare_finished
from rendezvous.context import LiveContext, RendezvousContext
from rendezvous.errors import StoreError
from rendezvous.etcd.compaction import Compaction
from rendezvous.etcd.options import etcd_options
from rendezvous.etcd.store import EtcdStore
from rendezvous.meeting_point import Meeting
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.reachability import Reachability
from rendezvous.membership.records import Closed, Job
from rendezvous.membership.rules.admission import Policy, count_nodes
from rendezvous.membership.rules.cells import CellShape
from rendezvous.membership.rules.standing import mates_of
from rendezvous.membership.worlds import World

GROW_QUIET_S = 0.5
"""Seconds without arrivals or departures before a world grows, so that a node's workers are admitted together."""


@dataclass(frozen=True, slots=True)
class LiveWorld:
    """A world in which this worker has a rank, the store where its members meet, and the context of its fence."""

    rank: int
    size: int
    store: TorchStore
    context: RendezvousContext


class LiveMember:
    """A worker's membership over the life of its process."""

    def __init__(
        self,
        context: LiveContext,
        max_members: int,
        job: Job = Job(),  # noqa: B008 - it is frozen
        *,
        cell: CellShape = CellShape(),  # noqa: B008 - it is frozen
        at_request: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_members` is the most that a world can use: further ones stand by, warmed up, until one is lost.

        `cell` is the shape of cells; a world has only complete ones. `at_request` is called, on a thread, if this
        worker's node is asked to leave by a key in etcd. `job` describes the training, for members that come after its
        end. Raises StoreUnavailableError if etcd does not answer.
        """
        announce()
        self._context = context
        options = etcd_options(context.endpoints, context.options)
        local_rank, local_size = os.environ["LOCAL_RANK"], int(os.environ["LOCAL_WORLD_SIZE"])
        place = Place(
            host=context.host,
            address=context.address,
            num_workers=1,
            name=member_prefix(context.node, int(local_rank)),
            node=context.node,
            node_members=local_size,
            agent=context.agent,
        )
        policy = Policy(context.min_nodes, context.max_nodes, context.last_call_s, max_members, cell)
        store = EtcdStore(options)
        try:
            self._participant = Participant(
                store, context.run_id, policy, place, ttl_s=context.ttl_s, at_request=at_request
            )
        except StoreError:
            store.close()
            raise
        self._participant.job = job
        self._reachability = Reachability(self._participant)
        self._reachability.look_ahead()
        self._compaction = Compaction(options, lambda: self._participant.is_leading) if context.compacts else None
        self._meeting = Meeting(self._participant, context.address, context.timeout_s, self.is_broken)

    def next_world(self, is_stopped: Callable[[], bool], *, as_last: bool = False) -> LiveWorld | None:
        """Leave this worker's world, if any, and wait for the next; return None if the job is done.

        With `as_last` it becomes the last of the members, so that another one leads. Raises TooFewNodesError if fewer
        nodes than the minimum come in time, StoppedWaiting when `is_stopped()`.
        """
        while True:
            self._participant.join(self._context.timeout_s, is_stopped, as_last=as_last)
            world = self._participant.next_world(self._meeting.host, self._context.timeout_s, is_stopped)
            if world is None:
                declare_finished()
                return None
            store = self._meeting.connect(world)
            rank = world.rank_of(self._participant.id)
            self._reachability.notice()
            if store is not None and rank is not None:
                return LiveWorld(rank, len(world.seats), store, self._context_of(world))

    def note_state(self, *, is_there: bool) -> None:
        """Note that this worker has the state of its rank in the current world, or has dropped what it had."""
        self._participant.note_state(is_there=is_there)

    def is_broken(self, waited_s: float = 0.0) -> bool:
        """Return True if the current world cannot take another step: a member is gone, or a newer world exists.
        After a wait longer than a lease, the others' nodes are probed: they may be unreachable.
        """
        if waited_s > self._participant.ttl_s:
            self._reachability.ask()
        return self._participant.is_broken()

    def look_for_unreachable(self) -> None:
        """Have the nodes of the current world probed soon, because it could not begin; returns at once."""
        self._reachability.ask(is_urgent=True)

    def wants_to_grow(self) -> bool:
        """Return True if warmed-up members wait to be admitted."""
        return self._participant.wants_to_grow(GROW_QUIET_S)

    @property
    def closed(self) -> Closed | None:
        """The finished job under this run id; None before its end, and some time after it."""
        return self._participant.view.closed

    @property
    def published(self) -> str | None:
        """The commit that etcd last named as the job's head; None if it named none."""
        head = self._participant.view.head
        return head.commit if head is not None else None

    @property
    def store(self) -> str | None:
        """The word of the store with the job's commits; None if there is none yet, or the job is done."""
        view = self._participant.view
        return view.store if view.closed is None else None

    def close_job(self) -> None:
        """Mark the job as done: members that join later leave."""
        assert self._participant.world is not None, "a job is closed by a world"
        self._participant.close(self._participant.world.term)
        declare_finished()

    def ask_to_leave(self, rank: int) -> str | None:
        """Ask the node of a rank to leave, and return it; None if fewer nodes than the minimum would stay."""
        return self._participant.ask_to_leave(rank)

    def leave(self) -> None:
        """Leave at once, so that the others need not wait for a lease to end."""
        self._reachability.close()
        if self._compaction is not None:
            self._compaction.close()
        self._participant.leave()

    def _context_of(self, world: World) -> RendezvousContext:
        return RendezvousContext(
            endpoints=self._context.endpoints,
            run_id=self._context.run_id,
            term=world.term,
            member_id=self._participant.id,
            joined_at=self._participant.joined_at,
            sealed_at=world.sealed_at,
            cause=world.cause,
            num_nodes=count_nodes(mates_of(self._participant.view, world)),
            options=self._context.options,
        )


def member_prefix(node: str, local_rank: int) -> str:
    """Return the prefix of the member ids of a node's worker, by which its agent finds a dead worker's member."""
    return f"{node}.{local_rank}"
