"""Check that sharded jobs keep the bits of one unsharded rank: all modes, copies, sizes and changes of world.

The ranks are connected processes that train a tiny model with the trainer's own state, sums and commits. A rank is
"killed" by leaving its group at some point of a step and discarding its state. A file tells the others, as membership
does: gloo alone may wait for ever for a send to a rank that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from benchmarks.ranks import Meeting
from benchmarks.sharding.commits import SavingJob
from benchmarks.sharding.jobs import MODES, Job, Mode, Work
from elastic_train.checkpoint import discover, load, open_store
from elastic_train.errors import ElasticTrainError, PeerLostError
from elastic_train.job import gradient_norm
from elastic_train.job.state import TrainProgress
from elastic_train.parallel.group import Group
from elastic_train.tasks.models.text_encoder import EncoderShape
from elastic_train.world.equal_weights import digest_of_all

T = TypeVar("T")
TINY = Work(EncoderShape(4096, 11, 16, 32, 3, 2, 0.1, 1, 1, 8), num_lanes=5, micro_batch=1, num_tokens=8)
"""The embedding has two grains, and five lanes divide evenly over one or five ranks only."""
SIZES, COPIES = (1, 2, 3, 4), (1, 2)
COMMITTED, CHANGED, STEPS = 2, 3, 5
"""Steps of the commit, of the change of world, and of the end."""
ALONE, TIMEOUT_S = "alone", 60.0
POINTS = ("backward", "summed", "met")
"""Points at which a rank is killed: in the backward pass; after it has summed its gradients; after the exchange, which
no other rank has completed."""


@dataclass(frozen=True, slots=True)
class Case:
    """A job of `size` ranks, the change after some steps, and a resumed job's mode from then on."""

    shards: Mode
    copies: int
    size: int
    change: str
    then: Mode | None = None

    def __str__(self) -> str:
        return f"{self.shards}, {self.copies} copies, {self.size} ranks: {self.change} {self.then or ''}".rstrip()

    def members(self, number: int) -> tuple[Sequence[int], int | None]:
        """Return the second world's members, and the rank that is killed or leaves, chosen by the case's number."""
        everybody = range(self.size)
        if self.change == "join":
            return range(self.size + 1), None
        if self.change == "resume":
            return range(self.size % len(SIZES) + 1), None
        gone = number % self.size
        left = [who for who in everybody if who != gone]
        return left or [self.size], gone  # if nobody is left, a new rank continues


def cases() -> Iterator[Case]:
    """Yield all cases; a world of one rank is not shrunk, but its rank is replaced."""
    modes: tuple[Mode, ...] = ("none", *MODES)
    for shards, copies, size in itertools.product(modes, COPIES, SIZES):
        yield from (Case(shards, copies, size, change) for change in (*POINTS, "join", "shrink"))
        yield from (Case(shards, copies, size, "resume", then) for then in modes if then != shards)


def live_through(meeting: Meeting, numbers: Sequence[int]) -> dict[str, str]:
    """Return this rank's final digest or error, by number, for each case in which it is in the second world.

    Rank 0 also returns the digest of one unsharded rank without changes.
    """
    every, found = list(cases()), dict[str, str]()
    for number in numbers:
        end = Life(meeting, every[number], number).lived()
        if end is not None:
            found[str(number)] = end
    if meeting.group.rank == 0:
        found[ALONE] = finished(Job(Group(0, 1, None, TIMEOUT_S), TINY, "none"))
    return found


def finished(job: Job) -> str:
    """Return the digest of the weights after the last step."""
    while job.state.step < STEPS:
        job.step()
    return digest_of_all(job.state.shards, job.group)


class Life:
    """A rank in a case: in the world before the change, in the one after it, or in both."""

    def __init__(self, meeting: Meeting, case: Case, number: int) -> None:
        self._meeting, self._case, self._number = meeting, case, number
        self._who = meeting.group.rank
        self._later, self._gone = case.members(number)
        self._commits, self._lost = str(meeting.folder / f"commits-{number}"), meeting.folder / f"lost-{number}"

    def lived(self) -> str | None:
        """Return the final digest or the error; None if this rank is not in the second world."""
        job: Job | None = None
        wrong = ""
        if self._who < self._case.size:
            before = self._world(range(self._case.size), 1)
            job, wrong = _tried(before, lambda: self._begin(before))
        self._meeting.group.barrier()  # the commit is complete once all ranks are here
        if wrong or self._who not in self._later:
            return wrong or None
        after = self._world(self._later, 2)
        digest, wrong = _tried(after, lambda: self._go_on(after, job))
        return wrong or digest

    def _begin(self, group: Group) -> Job:
        """Take the steps before the change, save a commit, and leave the world according to the change."""
        case = self._case
        job = Job(group, TINY, case.shards, case.copies)
        while job.state.step < COMMITTED:
            job.step()
        SavingJob(job, self._commits).save()
        assert job.state.step == CHANGED, "it is saved during a step"
        if case.change in POINTS:
            try:
                self._lose_one(job, case.change)
            except KilledError:
                self._lost.touch()
        else:
            group.barrier()
        return job

    def _lose_one(self, job: Job, point: str) -> None:
        """Take a step in which a rank is lost, up to the point that this rank reaches."""
        shards, is_gone = job.state.shards, self._who == self._gone
        try:
            measured = job.compute(_die if is_gone and point == "backward" else _live)
        except PeerLostError:
            return
        if is_gone and point == "summed":
            _die()
        norm = gradient_norm.known_alone(shards.table, measured)  # known to ranks that lack the others' norms
        with contextlib.suppress(PeerLostError):
            gathered = job.group.all_gather(measured)
            norm = gradient_norm.norm_of(gathered, shards.table) if is_gone else norm
        if norm is None:
            job.state.hold(job.facts, measured)  # the surviving ranks decide
        else:
            job.apply(norm)

    def _go_on(self, group: Group, job: Job | None) -> str:
        """Join the second world at its furthest step, and train to the end."""
        case = self._case
        if case.then is not None:
            job = Job(group, TINY, case.then, len(COPIES) + 1 - case.copies, term=2)
            self._load(job)
        elif job is None:
            job = Job(group, TINY, case.shards, case.copies, term=2)
            if case.change != "join":
                self._load(job)  # the only rank is gone
        elif lost := job.enter(group, term=2):
            job.begin_anew(lost)
            self._load(job)
        reached, digest = job.state.step, finished(job)
        return digest if reached >= self._least() else f"step {self._least()} was lost, and {reached} restored"

    def _least(self) -> int:
        """Return the step that must not be rolled back: the last applied one, or the commit if shares are lost."""
        case = self._case
        holders = case.size if case.shards == "none" else min(case.copies, case.size)
        if case.then is not None or (case.change != "join" and holders == 1):
            return COMMITTED
        return CHANGED + (case.change == "met")

    def _load(self, job: Job) -> None:
        store = open_store(self._commits)
        head = discover(store, damage=lambda store, key: None).head
        assert head is not None, "there is a commit"
        reached = TrainProgress(head.step, head.cursor, head.coverage, head.intervals)
        job.state.restore(lambda tensors: load(store, head, tensors), reached, keeps_rates=True)

    def _world(self, members: Sequence[int], term: int) -> Group:
        is_broken = (lambda waited_s: self._lost.exists()) if term == 1 else None
        return self._meeting.of(members, f"case-{self._number}-{term}", is_broken=is_broken)


def _tried(group: Group, act: Callable[[], T]) -> tuple[T | None, str]:
    """Call `act`, return its result or its error as text, and leave the world, as more cases follow."""
    try:
        return act(), ""
    except (ElasticTrainError, AssertionError, LookupError, RuntimeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    finally:
        group.abandon()


class KilledError(Exception):
    """Raised in a rank that is killed, so that its peers lose it."""


def _die() -> NoReturn:
    raise KilledError


def _live() -> None:
    """Do nothing."""
