"""Cells whose ranks compute some tokens of each row, and lose ranks: no applied step is lost, and no bit differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_cells import assert_nothing_is_lost
from tests.elastic_train.training.live.test_live import etcd, nothing_left

__all__ = ["etcd", "nothing_left"]  # fixtures


pytestmark = [pytest.mark.slow, pytest.mark.hunt]  # in memory: test_lost_ranks


@pytest.mark.parametrize(
    "places", [["backward"], pytest.param(["forward", "exchange", "apply"], marks=pytest.mark.long)]
)
def test_ranks_with_parts_of_rows_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    """In the midst of a block a rank's cell waits for its keys and values, and the other cell for its gradients."""
    assert_nothing_is_lost(tmp_path, rows, etcd, {"context": 2}, places, alone={"context": 2})


@pytest.mark.long  # stages in a single cell are given it, too
def test_a_rank_of_the_only_cell_is_given_the_state_by_those_beside_it(
    tmp_path: Path, rows: Path, etcd: EtcdServer
) -> None:
    """Each rank with some of the tokens holds the whole state."""
    places = ("backward", "applied")
    assert_nothing_is_lost(tmp_path, rows, etcd, {"context": 2}, places, alone={"context": 2}, num_cells=1)


@pytest.mark.parametrize(
    "places",
    [
        ("backward 7", "apply 3", "commit"),
        pytest.param(("forward 6", "exchange 2", "applied"), marks=pytest.mark.long),
    ],
)
def test_stages_of_ranks_with_parts_of_rows_lose_no_step_with_one(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    """In a single cell, too: a stage's other rank holds the same part, and gives it to the newcomer.

    The bits are those of one stage.
    """
    parallel = {"context": 2, "pipeline": 2}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, places, alone={"context": 2}, num_cells=1)
