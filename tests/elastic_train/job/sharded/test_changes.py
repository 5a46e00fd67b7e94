"""Sharded jobs keep the bits of one unsharded rank through every change of their world: all modes, copies and sizes.

The ranks, in memory, train a tiny model with the trainer's own state, sums and commits. A rank is "killed" by leaving
its group at some point of a step and discarding its state.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar
from unittest import mock

import pytest

from benchmarks.sharding import jobs
from benchmarks.sharding.commits import SavingJob
from benchmarks.sharding.jobs import MODES, Job, Mode, Work
from elastic_train.checkpoint.commits.reader import discover, load
from elastic_train.checkpoint.saving import background_saves
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.errors import ElasticTrainError, PeerLostError
from elastic_train.job.peer_states import PeerState
from elastic_train.job.state import AppliedState, TrainProgress, known_alone, norm_of
from elastic_train.parallel.group import Group
from elastic_train.tasks.models.text_encoder import EncoderShape
from elastic_train.world.equal_weights import digest_of_all
from tests.memory_job import LOOK_EVERY_S
from tests.memory_machine import in_memory, when_all_have_ended
from tests.memory_world import group_of

T = TypeVar("T")
TINY = Work(EncoderShape(4096, 11, 16, 32, 3, 2, 0.1, 1, 1, 8), num_lanes=5, micro_batch=1, num_tokens=8)
"""The embedding has two grains, and five lanes divide evenly over one or five ranks only."""
SIZES, COPIES = (1, 2, 3, 4), (1, 2)
COMMITTED, CHANGED, STEPS = 1, 2, 4
"""Steps of the commit, of the change of world, and of the end."""
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

    def members(self) -> tuple[Sequence[int], int | None]:
        """Return the second world's members, and the rank that is killed or leaves, which is another for each case."""
        if self.change == "join":
            return range(self.size + 1), None
        if self.change == "resume":
            return range(self.size % len(SIZES) + 1), None
        gone = (self.copies + len(self.change)) % self.size
        left = [who for who in range(self.size) if who != gone]
        return left or [self.size], gone  # if nobody is left, a new rank continues


def cases() -> Iterator[Case]:
    """Yield cases in which any three of mode, copies, size and change come together.

    A world of one rank is not shrunk, but its rank is replaced.
    """
    modes: tuple[Mode, ...] = ("none", *MODES)
    for (row, shards), (column, size) in itertools.product(enumerate(modes), enumerate(SIZES)):
        changes: list[tuple[str, Mode | None]] = [(change, None) for change in (*POINTS, "join", "shrink")]
        changes += [("resume", then) for then in modes if then != shards]
        for number, (change, then) in enumerate(changes):
            yield Case(shards, COPIES[(row + column + number) % len(COPIES)], size, change, then)


def live_through(case: Case, folder: Path) -> set[str]:
    """Return the final digests or errors of the ranks of a case's second world."""
    size = max(case.size, max(case.members()[0]) + 1)
    with mock.patch.object(background_saves, "LOOK_EVERY_S", LOOK_EVERY_S):
        ends = in_memory(lambda rank, size: Life(rank, size, case, folder).lived(), size)
    return {end for end in ends if end is not None}


def alone() -> str:
    """Return the digest of one unsharded rank without changes."""
    return finished(Job(Group(0, 1, None, 60.0), TINY, "none"))


def finished(job: Job) -> str:
    """Return the digest of the weights after the last step."""
    while job.state.step < STEPS:
        job.step()
    return digest_of_all(job.state.shards, job.group)


class Life:
    """A rank in a case: in the world before the change, in the one after it, or in both."""

    def __init__(self, who: int, num_ranks: int, case: Case, folder: Path) -> None:
        self._who, self._case, self._commits = who, case, str(folder)
        self._everybody = group_of("everybody", who, num_ranks)
        self._later, self._gone = case.members()

    def lived(self) -> str | None:
        """Return the final digest or the error; None if this rank is not in the second world."""
        job: Job | None = None
        wrong = ""
        if self._who < self._case.size:
            before = self._world(range(self._case.size), 1)
            job, wrong = _tried(before, lambda: self._begin(before))
        self._everybody.barrier()  # the commit is complete once all ranks are here
        if wrong or self._who not in self._later:
            return wrong or None
        after = self._world(self._later, 2)
        digest, wrong = _tried(after, lambda: self._go_on(after, job))
        return wrong or digest

    def _begin(self, group: Group) -> Job:
        """Take the steps before the change, save a commit, and leave the world according to the change."""
        case = self._case
        job = self._new(group, case.shards, case.copies)
        while job.state.step < COMMITTED:
            job.step()
        if self._is_loaded():
            SavingJob(job, self._commits).save()
        else:
            job.step()
        assert job.state.step == CHANGED, "it is saved during a step"
        if case.change in POINTS:
            with contextlib.suppress(KilledError):
                self._lose_one(job, case.change)
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
        norm = known_alone(shards.table, measured)  # known to ranks that lack the others' norms
        with contextlib.suppress(PeerLostError):
            gathered = job.group.all_gather(measured)
            norm = norm_of(gathered, shards.table) if is_gone else norm
        if norm is None:
            job.state.hold(job.facts, measured)  # the surviving ranks decide
        else:
            job.apply(norm)

    def _go_on(self, group: Group, job: Job | None) -> str:
        """Join the second world at its furthest step, and train to the end."""
        case = self._case
        if case.then is not None:
            job = self._new(group, case.then, len(COPIES) + 1 - case.copies, term=2)
            self._load(job)
        elif job is None:
            job = self._new(group, case.shards, case.copies, term=2)
            if case.change != "join":
                self._load(job)  # the only rank is gone
        elif lost := job.enter(group, term=2):
            job.begin_anew(lost)
            self._load(job)
        reached, digest = job.state.step, finished(job)
        return digest if reached >= self._least() else f"step {self._least()} was lost, and {reached} restored"

    def _least(self) -> int:
        """Return the step that must not be rolled back: the last applied one, or the commit if shares are lost."""
        return COMMITTED if self._is_loaded() else CHANGED + (self._case.change == "met")

    def _is_loaded(self) -> bool:
        """Say whether the second world needs a commit: it resumes, or shares are lost."""
        case = self._case
        holders = case.size if case.shards == "none" else min(case.copies, case.size)
        return case.then is not None or (case.change != "join" and holders == 1)

    def _load(self, job: Job) -> None:
        store = open_store(self._commits)
        head = discover(store, damage=lambda store, key: None).head
        assert head is not None, "there is a commit"
        reached = TrainProgress(head.step, head.cursor, head.coverage, head.intervals)
        job.state.restore(lambda tensors: load(store, head, tensors), reached, keeps_rates=True)

    def _world(self, members: Sequence[int], term: int) -> Group:
        return group_of(f"world {term}", list(members).index(self._who), len(members))

    def _new(self, group: Group, shards: Mode, copies: int, term: int = 1) -> Job:
        job = Job(group, TINY, shards, copies, term=term)
        when_all_have_ended(job.state.shards._close_sums)
        return job


def _tried(group: Group, act: Callable[[], T]) -> tuple[T | None, str]:
    """Call `act`, return its result or its error as text, and leave the world."""
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


@pytest.mark.hunt
@pytest.mark.parametrize("shards", ["none", *MODES])
def test_every_change_ends_with_the_weights_of_one_rank(tmp_path: Path, shards: Mode) -> None:
    """Each mode's changes: a kill at one of three points, a join, a leave, a resume in another mode."""
    chosen = [case for case in cases() if case.shards == shards]
    ends = {str(case): live_through(case, tmp_path / str(number)) for number, case in enumerate(chosen)}
    right = {alone()}
    assert [case for case, end in ends.items() if end != right] == []


@pytest.mark.heavy
def test_a_case_of_the_matrix_says_what_its_ranks_end_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of one rank that holds everything; and a step that was given up is seen, though its bits come again."""
    case = Case("parameters", 2, 3, "met")
    assert live_through(case, tmp_path / "kept") == {alone()}

    def forget(group: Group, state: AppliedState, brought: Sequence[PeerState]) -> list[PeerState]:
        """Drop the step that somebody may have applied."""
        state.drop_pending()
        return list(brought)

    monkeypatch.setattr(jobs, "roll_forward", forget)
    assert live_through(case, tmp_path / "given up") == {"step 3 was lost, and 2 restored"}
