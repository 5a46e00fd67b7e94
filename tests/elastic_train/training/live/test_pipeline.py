"""Pipelines that lose a stage: nobody gives up an applied step while another cell has it, and no bit differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from tests.conftest import standby_with
from tests.elastic_train.tasks.language_rows import LLAMA
from tests.elastic_train.training.live.test_cells import MODEL, assert_nothing_is_lost
from tests.elastic_train.training.live.test_live import etcd, nothing_left

__all__ = ["etcd", "nothing_left"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.hunt]  # in memory: test_lost_ranks


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("1f1b", ["backward 7", "exchange 2", "applied"]),
        pytest.param("1f1b", ["forward", "apply 3"], marks=pytest.mark.long),
        ("gpipe", ["forward 8"]),
        ("interleaved", ["forward 5", "backward 7"]),
        pytest.param("interleaved", ["exchange", "applied"], marks=pytest.mark.long),
    ],
)
def test_stages_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, kind: str, places: Sequence[str]
) -> None:
    """In whichever pass of its schedule; the bits are those of one process, which holds the whole model."""
    parallel, sizes = {"pipeline": 2, "schedule": kind}, {**MODEL, "depth": 4 if kind == "interleaved" else 2}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, places, alone={"pipeline": 1}, sizes=sizes)


@pytest.mark.xdist_group("transformers")  # one process imports it
@pytest.mark.parametrize("places", [["backward 7"], pytest.param(["forward", "applied"], marks=pytest.mark.long)])
def test_stages_of_transformers_that_die_cost_no_applied_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, places: Sequence[str]
) -> None:
    """A newcomer has none of the weights until its peer in the other cell gives it those of its stage."""
    pytest.importorskip("transformers")
    standby_with("tests.preload_transformers")
    sizes = {**LLAMA, "vocab_size": 64, "tie_word_embeddings": False, "attention_dropout": 0.1}
    assert_nothing_is_lost(tmp_path, rows, etcd, {"pipeline": 2}, places, alone={"pipeline": 1}, sizes=sizes)


def test_a_third_cell_has_the_stage_that_two_have_lost(tmp_path: Path, rows: Path, etcd: EtcdServer) -> None:
    """At the hand-over two ranks die, which may have held the same stage."""
    parallel = {"pipeline": 2, "schedule": "1f1b"}
    assert_nothing_is_lost(tmp_path, rows, etcd, parallel, ["hand-over"], alone={"pipeline": 1}, num_cells=3)
