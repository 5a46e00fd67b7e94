"""Cells whose ranks have some of the experts each, and lose some: no applied step is given up, and no bit differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from tests.elastic_train.training.live.test_cells import MODEL, assert_nothing_is_lost
from tests.elastic_train.training.live.test_live import etcd, nothing_left

__all__ = ["etcd", "nothing_left"]  # fixtures
SIZES = {**MODEL, "experts": 4, "hidden": 16}


pytestmark = pytest.mark.slow


@pytest.mark.hunt  # in memory: test_lost_ranks
@pytest.mark.parametrize(
    "places", [["backward"], pytest.param(["forward", "exchange", "apply"], marks=pytest.mark.long)]
)
def test_ranks_with_experts_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    """In the midst of a turn a rank's cell waits for its tokens, and the other cell for its gradients.

    The bits are those of one process, which has all experts.
    """
    assert_nothing_is_lost(tmp_path, rows, etcd, {"expert": 2}, places, alone={"expert": 1}, sizes=SIZES)


@pytest.mark.parametrize(
    "places", [["backward 13"], pytest.param(["forward 11", "exchange 3"], marks=pytest.mark.long)]
)
def test_ranks_of_stages_with_experts_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    """The other pipeline of a rank's cell waits for its experts, its own for activations and gradients."""
    parallel: dict[str, object] = {"expert": 2, "pipeline": 2, "recompute": "units"}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, places, alone={"expert": 1}, sizes=SIZES)


@pytest.mark.hunt
@pytest.mark.parametrize(
    ("how", "places"),
    [
        ({"shards": "parameters"}, ["backward", "exchange"]),
        pytest.param({"shards": "gradients"}, ["exchange"], marks=pytest.mark.long),
        ({"offload": "optimizer"}, ["backward 7", "apply 3"]),
        pytest.param({"shards": "optimizer"}, ["backward", "apply", "applied"], marks=pytest.mark.long),
    ],
)
def test_ranks_with_experts_and_shares_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, how: dict[str, object], places: Sequence[str]
) -> None:
    """What the other cell's rank of a place holds of its moments is all that is left of them, or it has all of them."""
    alone = {"expert": 1, **dict.fromkeys(how, "none")}
    assert_nothing_is_lost(tmp_path, rows, etcd, {"expert": 2, **how}, places, alone=alone, sizes=SIZES)
