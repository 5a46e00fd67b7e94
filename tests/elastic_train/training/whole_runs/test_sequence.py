"""Tensor ranks that share out tokens in whole runs: one hash over any number of cells, near to that of whole rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.elastic_train.training.jobs import average_of, config, history, losses, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import LANGUAGE, MODEL, TENSOR, TERMS, newest_weights
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sequence")]  # one run to compare with

SEQUENCE = [*TENSOR, "--parallel.sequence", "true"]
STAGED: dict[str, object] = {
    **LANGUAGE,
    "task": {
        "path": "elastic_train.tasks.causal_lm:CausalLM",
        "params": {"model": {**MODEL, "depth": 4, "tied": False}, "max_tokens": 16},
    },
}


@pytest.fixture(scope="module")
def one_cell(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of one cell of two ranks that share out tokens."""
    folder = tmp_path_factory.mktemp("cell")
    succeed(start([config(folder, few_rows, LANGUAGE), *SEQUENCE], num_ranks=2))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        (4, ["--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        (4, ["--parallel.shards", "optimizer", "--parallel.copies", "1", "--parallel.bucket_mb", "0.001"]),
        pytest.param(6, ["--parallel.bucket_mb", "0.001"], marks=pytest.mark.long),
    ],
)
def test_any_number_of_cells_gives_the_same_bits(
    tmp_path: Path, few_rows: Path, one_cell: Path, num_ranks: int, how: list[str]
) -> None:
    succeed(start([config(tmp_path, few_rows, LANGUAGE), *SEQUENCE, *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path)[what] == result(one_cell)[what]
    assert average_of(tmp_path) == average_of(one_cell)
    assert not [line for line in history(tmp_path, "event") if line["kind"] == "wrong_gradient"], "cells compute alike"


def test_it_may_be_set_and_taken_back_between_starts(tmp_path: Path, few_rows: Path, one_cell: Path) -> None:
    """From one cell to two and back; without it gradients of norms are added in another order, and nothing else is."""
    run = config(tmp_path, few_rows, LANGUAGE)
    for until, num_ranks in [(2, 2), (4, 4)]:
        succeed(start([run, *SEQUENCE, "--max_steps", str(until)], num_ranks=num_ranks))
    succeed(start([run, *SEQUENCE], num_ranks=2))
    assert result(tmp_path)["weights_sha256"] == result(one_cell)["weights_sha256"]
    other = tmp_path / "other"
    run = config(other, few_rows, LANGUAGE)
    for until, how in [(2, TENSOR), (4, SEQUENCE)]:
        succeed(start([run, *how, "--max_steps", str(until)], num_ranks=2))
    succeed(start([run, *TENSOR], num_ranks=2))
    assert result(other)["num_samples"] == result(one_cell)["num_samples"]
    assert_same_but_for_rounding(losses(other), losses(one_cell), TERMS)
    mine, theirs = (newest_weights(folder) for folder in (other, one_cell))
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-5)


def test_stages_of_ranks_that_share_out_tokens_have_the_bits_of_one_stage(tmp_path: Path, few_rows: Path) -> None:
    """Activations between stages are those of each rank's tokens; with two chunks on each stage, too."""
    found = {}
    for name, num_ranks, how in (
        ("one", 2, []),
        ("two", 4, ["--parallel.pipeline", "2"]),
        ("chunks", 4, ["--parallel.pipeline", "2", "--parallel.schedule", "interleaved"]),
    ):
        folder = tmp_path / name
        succeed(start([config(folder, few_rows, STAGED), *SEQUENCE, *how, "--max_steps", "2"], num_ranks=num_ranks))
        found[name] = result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder)
    assert found["two"] == found["chunks"] == found["one"]
