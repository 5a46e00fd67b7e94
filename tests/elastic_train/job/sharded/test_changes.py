"""Sharded jobs keep the bits of one unsharded rank through every change of their world: all modes, copies and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.sharding import jobs
from benchmarks.sharding.jobs import MODES, Mode
from elastic_train.job.resharding.peer_states import PeerState
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from tests.elastic_train.job.sharded.changes import Case, alone, cases, live_through


@pytest.mark.hunt
@pytest.mark.parametrize("shards", ["none", *MODES])
def test_every_change_ends_with_the_weights_of_one_rank(tmp_path: Path, shards: Mode) -> None:
    """Each mode's changes: a kill at one of three points, a join, a leave, a resume in another mode."""
    chosen = [case for case in cases() if case.shards == shards]
    ends = {str(case): live_through(case, tmp_path / str(number)) for number, case in enumerate(chosen)}
    assert ends == {str(case): {alone()} for case in chosen}


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
