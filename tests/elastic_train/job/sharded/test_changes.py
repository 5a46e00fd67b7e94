"""Sharded jobs keep the bits of one unsharded rank through every change of their world: all modes, copies and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.ranks import Meeting, run
from benchmarks.sharding import jobs
from benchmarks.sharding.jobs import MODES, Mode
from elastic_train.job.resharding.peer_states import PeerState
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from tests.elastic_train.job.sharded.changes import ALONE, SIZES, Case, cases, live_through

with_ranks = pytest.mark.xdist_group("measuring ranks")  # one process imports what they are forked from


@pytest.mark.hunt
@with_ranks
@pytest.mark.parametrize("shards", ["none", *MODES])
def test_every_change_ends_with_the_weights_of_one_rank(shards: Mode) -> None:
    """One of each mode's changes: a kill at one of three points, a join, a leave, a resume in another mode."""
    chosen = [(number, case) for number, case in enumerate(cases()) if case.shards == shards]
    found = run(live_through, 1 + max(SIZES), [number for number, _ in chosen])
    ends = {str(case): {of_rank[str(number)] for of_rank in found if str(number) in of_rank} for number, case in chosen}
    assert ends == {str(case): {found[0][ALONE]} for _, case in chosen}


@pytest.mark.slow
@with_ranks
def test_a_case_of_the_matrix_says_what_its_ranks_end_with() -> None:
    """The bits of one rank that holds everything; and a step that was given up is seen, though its bits come again."""
    number = list(cases()).index(Case("parameters", 2, 3, "met"))
    kept, given_up = run(live_through, 3, [number]), run(live_without_pending, 3, [number])
    assert [end for of_rank in kept for end in of_rank.values()] == 3 * [kept[0][ALONE]]
    ends = [of_rank[str(number)] for of_rank in given_up if str(number) in of_rank]
    assert ends == 2 * ["step 4 was lost, and 3 restored"]


def live_without_pending(meeting: Meeting, numbers: Sequence[int]) -> dict[str, str]:
    """Go through cases with survivors that forget the step that somebody may have applied."""

    def forget(group: Group, state: AppliedState, brought: Sequence[PeerState]) -> list[PeerState]:
        state.drop_pending()
        return list(brought)

    jobs.roll_forward = forget
    return live_through(meeting, numbers)
