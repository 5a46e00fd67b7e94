"""The store's typed records about a job, and their keys.

/elastic/<run id>/members/<id>   Member   leased: it is deleted with the node's lease
                  ~terms/<id>    Terms    what has changed of it since, for those who decide; leased
                  over           Over     the newest term that a member has left
                  world          World    the sealed world of the highest term
                  failure        Failure  the first member whose workers failed in a term
                  head           Head     the newest claimed term and the commit published under it
                  leave/<node>   -        a node that is asked to leave by whoever operates the job; leased
                  store          word     which store has the job's commits; deleted when the job is done
                  closed         Closed   the job is done: members that join later leave

All members follow all keys but the terms, which as many members write in each recovery: only a few follow those as well
(`Keys.terms`), or events would grow with the square of the members.

Another version, or anyone with etcdctl, may write them: an unreadable record counts as absent, except for a world, a
head or an end in a newer format, which this version must not overrule (`View.newer`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar
from urllib.parse import quote

from rendezvous.errors import NewerVersionError
from rendezvous.membership.lenient_json import NewerRecordError, UnreadableRecordError, read_record
from rendezvous.membership.store import Snapshot
from rendezvous.membership.worlds import World

_log = logging.getLogger("rendezvous")

JOBS = "/elastic/"
"""Prefix of the keys of all jobs."""


REQUEST_S = 60.0
"""Seconds for which a request to leave lasts; running nodes see it at once."""


@dataclass(frozen=True)
class Keys:
    """The keys of one job."""

    run_id: str

    @cached_property
    def prefix(self) -> str:
        return f"{JOBS}{quote(self.run_id, safe='')}/"

    @cached_property
    def members(self) -> str:
        return self.prefix + "members/"

    def member(self, member_id: str) -> str:
        return self.members + member_id

    @cached_property
    def leaves(self) -> str:
        return self.prefix + "leave/"

    def leave(self, node_id: str) -> str:
        return self.leaves + node_id

    @cached_property
    def world(self) -> str:
        return self.prefix + "world"

    @cached_property
    def terms(self) -> str:
        """The end of the keys that all members follow: it sorts behind all others of the job."""
        return self.prefix + "~terms/"

    def terms_of(self, member_id: str) -> str:
        return self.terms + member_id

    @property
    def over(self) -> str:
        return self.prefix + "over"

    @property
    def failure(self) -> str:
        return self.prefix + "failure"

    @property
    def head(self) -> str:
        return self.prefix + "head"

    @property
    def store(self) -> str:
        return self.prefix + "store"

    @property
    def closed(self) -> str:
        return self.prefix + "closed"


@dataclass(frozen=True, slots=True)
class Member:
    """A live node, or one of its workers in `live` mode.

    `after`, `seen` and `done` are terms and only grow, so that an old record is never mistaken for a newer one. In a
    view that is not whole, `after`, `seen`, `rank` and `rank_in` may be old.
    """

    id: str
    host: str
    address: str
    num_workers: int
    after: int
    """It is ready for a world of a term above this one."""
    seen: int = 0
    """It was alive after a member failed in this term."""
    done: int = 0
    """Its workers finished in this term."""
    node: str = ""
    """Node of a worker; empty for a member that is a node itself."""
    node_members: int = 1
    """Total number of members of its node."""
    agent: str = ""
    """host:port of its node's agent, which listens as long as it lives; empty if there is none."""
    missed: tuple[str, ...] = ()
    """Nodes that it cannot reach, although they are in etcd."""
    nodes: str = ""
    """Number of nodes of a world, MIN:MAX, which all members must agree on; empty if unspecified."""
    role: str = ""
    """Role of its workers (torchrun's --role); ranks are also numbered within a role."""
    rank: int = -1
    """Its rank in the world of `rank_in`, for cells of several members; negative if none."""
    rank_in: int = 0
    """Term of the last world in which it got its state."""

    @property
    def node_id(self) -> str:
        return self.node or self.id

    @property
    def is_worker(self) -> bool:
        """True for a worker of a node (`live` mode), False for a node with all of its workers (`restart` mode)."""
        return bool(self.node)


@dataclass(frozen=True, slots=True)
class Terms:
    """Fields of a member that change in each recovery; newer than those of its record."""

    after: int
    seen: int = 0
    rank: int = -1
    rank_in: int = 0

    @classmethod
    def of(cls, member: Member) -> Terms:
        return cls(member.after, member.seen, member.rank, member.rank_in)

    def put_into(self, member: Member) -> Member:
        return replace(member, after=self.after, seen=self.seen, rank=self.rank, rank_in=self.rank_in)


@dataclass(frozen=True, slots=True)
class Over:
    """A member has left the world of this term, which hence takes no further step."""

    term: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The member whose workers failed first in a term; unless a node was lost, the restart is charged to it."""

    term: int
    member: str


@dataclass(frozen=True, slots=True)
class Head:
    """The newest claimed term, and the commit published under it or an older one."""

    term: int
    commit: str | None
    claim: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """Description of a member's job, for members that come later under the same run id."""

    folder: str = ""
    """Location of its commits or results."""
    digest: str = ""
    """Digest of its configuration; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The job is done."""

    term: int
    at: float
    """Unix time in seconds."""
    job: Job = Job()
    """The finished job."""


@dataclass(frozen=True, eq=False)
class View:
    """The whole job at one revision; members in order of registration.

    Derived values are cached per object: every worker asks for them many times per second, about all members.
    """

    revision: int
    members: tuple[Member, ...] = ()
    world: World | None = None
    failure: Failure | None = None
    head: Head | None = None
    store: str | None = None
    closed: Closed | None = None
    leaving: frozenset[str] = frozenset()
    """Nodes that are asked to leave."""
    over: int = 0
    """Newest term that a member has left, so that its world is over; 0 if none."""
    newer: str = ""
    """Records of a newer version that this one cannot read, as text for a message; empty if there are none."""

    @property
    def term(self) -> int:
        """Highest term that was ever sealed; 0 before the first world."""
        return 0 if self.world is None else self.world.term

    def member(self, member_id: str) -> Member | None:
        return self._by_id.get(member_id)

    @cached_property
    def mates(self) -> tuple[Member, ...]:
        """Members of the current world that are still alive."""
        world = self.world
        return () if world is None else tuple(m for m in self.members if world.rank_of(m.id) is not None)

    @cached_property
    def num_lost(self) -> int:
        """Number of members of the current world that are gone without having finished."""
        world = self.world
        if world is None:
            return 0
        return len(world.seats) - len(self.mates) - sum(member not in self._by_id for member in world.left)

    @cached_property
    def is_whole(self) -> bool:
        """True if all members of the current world are alive and in it, or have left after finishing."""
        world = self.world
        return world is not None and self.num_lost == 0 and not self.is_left(world.term)

    def is_left(self, term: int) -> bool:
        """Return True if a member is known to have left the world of a term."""
        return self.over >= term or any(mate.after >= term for mate in self.mates)

    @cached_property
    def first_of_nodes(self) -> dict[str, str]:
        """By node, the least id of its members: the one that speaks for all of them."""
        firsts = dict[str, str]()
        for member in self.members:
            firsts[member.node_id] = min(firsts.get(member.node_id, member.id), member.id)
        return firsts

    @cached_property
    def nodes(self) -> frozenset[str]:
        """Nodes of the members of the current world that are still alive."""
        return frozenset(mate.node_id for mate in self.mates)

    @cached_property
    def is_split(self) -> bool:
        """True if any member cannot reach another's node."""
        return any(member.missed for member in self.members)

    @cached_property
    def finishing(self) -> tuple[Member, ...]:
        """Members of the current world whose workers have finished."""
        if (world := self.world) is None:
            return ()
        done = [member for member in self.members if member.done >= world.term]
        return tuple(member for member in done if world.rank_of(member.id) is not None)

    @cached_property
    def staying(self) -> tuple[Member, ...]:
        """Members whose workers have not finished."""
        if not self.finishing:
            return self.members
        return tuple(member for member in self.members if not self.is_finishing(member))

    @cached_property
    def ready(self) -> tuple[Member, ...]:
        """Members that a next world would consist of."""
        return tuple(member for member in self.staying if self.is_ready(member))

    def is_ready(self, member: Member) -> bool:
        """Return True if a member waits for a world: it is in none, or has left its last one."""
        return self.world is None or self.world.rank_of(member.id) is None or member.after >= self.term

    def is_finishing(self, member: Member) -> bool:
        return self.world is not None and member.done >= self.term and self.world.rank_of(member.id) is not None

    @cached_property
    def is_ending(self) -> bool:
        """True if all live members of the current world have finished: one of them is about to close the job.

        No member is admitted in between. If all of them die before closing it, the job starts again.
        """
        return bool(self.mates) and all(self.is_finishing(mate) for mate in self.mates)

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {member.id: member for member in self.members}


def encode(record: Member | Terms | Over | World | Failure | Head | Closed) -> str:
    found = record.pack() if isinstance(record, World) else asdict(record)
    return json.dumps(found, default=asdict, sort_keys=True, separators=(",", ":"))


def read_view(snapshot: Snapshot, keys: Keys) -> View:
    """Parse everything below a job's prefix; no content can make it fail."""
    below, leased, texts = keys.members, list[tuple[int, str, str]](), dict[str, str]()
    skipped = len(below)
    for key, entry in snapshot.entries.items():
        if key.startswith(below):
            leased.append((entry.create_revision, key, entry.value))
        else:
            texts[key] = entry.value
    leased.sort()
    world, failure = _read(World, texts.get(keys.world)), _read(Failure, texts.get(keys.failure))
    over = _known(keys.over, _read(Over, texts.get(keys.over)))
    head, closed = _read(Head, texts.get(keys.head)), _read(Closed, texts.get(keys.closed))
    return View(
        revision=snapshot.revision,
        members=tuple(
            [
                member
                for _, key, text in leased
                if (member := _read_member(key, text, below, texts.get(keys.terms + key[skipped:]))) is not None
            ]
        ),
        world=_known(keys.world, world),
        failure=_known(keys.failure, failure),
        head=_known(keys.head, head),
        store=texts.get(keys.store),
        closed=_known(keys.closed, closed),
        over=0 if over is None else over.term,
        leaving=frozenset(key.removeprefix(keys.leaves) for key in texts if key.startswith(keys.leaves)),
        newer="".join(
            _newer(key, found)
            for key, found in zip((keys.world, keys.head, keys.closed), (world, head, closed), strict=True)
        ),
    )


def read_head(key: str, text: str | None) -> Head | None:
    """Read the head; None if it is absent or unreadable. Raises NewerVersionError."""
    found = _read(Head, text)
    refuse_newer(_newer(key, found))
    return _known(key, found)


def refuse_newer(newer: str) -> None:
    """Raise NewerVersionError if `newer` is not empty."""
    if newer:
        raise NewerVersionError(
            f"{newer}: a newer version of this package trains under this run id. Install the same version on all nodes."
        )


R = TypeVar("R")


@lru_cache(16)
def _read(kind: type[R], text: str | None) -> R | UnreadableRecordError | None:
    """Read a record; errors are returned as well, so that they are cached."""
    try:
        return None if text is None else read_record(kind, text)
    except UnreadableRecordError as error:
        return error


@lru_cache(1 << 14)
def _read_member(key: str, text: str, below: str, terms: str | None) -> Member | None:
    """Read a member, with its terms if there are any; None if it is unreadable, or its key below `below` is another's.

    Cached, because a change rewrites one member's text: of a thousand members, 999 need not be parsed again.
    """
    member = _known(key, _read.__wrapped__(Member, text))
    if member is None or key != below + member.id:
        return None
    newer: Terms | None = _known(f"the terms of {key}", _read.__wrapped__(Terms, terms))
    return member if newer is None else newer.put_into(member)


def _known(key: str, found: R | UnreadableRecordError | None) -> R | None:
    if isinstance(found, UnreadableRecordError):
        _warn(key, str(found))
        return None
    return found


def _newer(key: str, found: object) -> str:
    return f"{key} has {found}" if isinstance(found, NewerRecordError) else ""


@lru_cache(64)
def _warn(key: str, why: str) -> None:
    """Warn once about an ignored record."""
    _log.warning("%s cannot be read as a record and is ignored: %s. Does another program write there?", key, why)
