"""Cells of tensor parallelism in whole runs: one hash over any number of cells, and commits at any degree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastic_train.checkpoint import open_store, read_state
from elastic_train.checkpoint.commits.lookup import find
from elastic_train.inference.opening import open_trained
from elastic_train.tasks.decoder.shape import DecoderShape
from tests.elastic_train.training.jobs import average_of, config, history, losses, result, succeed
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding, num_terms

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cells")]  # one run to compare with

MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 4, "kv_heads": 2, "dropout": 0.1}
LANGUAGE: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": MODEL, "max_tokens": 16}},
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "constant", "clip_norm": 0.2, "ema_decay": 0.9},
    "epochs": 1,
    "validation": {"every_steps": 4, "weights": "ema"},
    "checkpoint": {"every_steps": 3, "keep_last": 3},
}
TERMS = num_terms(DecoderShape(**{**MODEL, "dropout": 0.0}), num_tokens=16, num_rows=24)  # type: ignore[arg-type]
TENSOR = ["--parallel.tensor", "2"]


@pytest.fixture(scope="module")
def one_cell(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of one cell of two ranks."""
    folder = tmp_path_factory.mktemp("cell")
    succeed(start([config(folder, few_rows, LANGUAGE), *TENSOR], num_ranks=2))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        (4, ["--parallel.recompute", "units", "--run.audit_lanes", "1", "--parallel.bucket_mb", "0.001"]),
        pytest.param(6, ["--parallel.bucket_mb", "0.001"], marks=pytest.mark.long),
    ],
)
def test_any_number_of_cells_gives_the_same_bits(
    tmp_path: Path, few_rows: Path, one_cell: Path, num_ranks: int, how: list[str]
) -> None:
    succeed(start([config(tmp_path, few_rows, LANGUAGE), *TENSOR, *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path)[what] == result(one_cell)[what]
    assert average_of(tmp_path) == average_of(one_cell)
    assert not [line for line in history(tmp_path, "event") if line["kind"] == "wrong_gradient"], "cells compute alike"


def test_commits_continue_with_any_cells_and_at_any_degree(tmp_path: Path, few_rows: Path, one_cell: Path) -> None:
    """From one cell to two and back the bits are those of one; a commit of cells is one of whole tensors.

    At another degree sums are rounded otherwise: the samples are the same, and the weights but for their last bits.
    """
    run = config(tmp_path, few_rows, LANGUAGE)
    for until, num_ranks in [(2, 2), (4, 4)]:
        succeed(start([run, *TENSOR, "--max_steps", str(until)], num_ranks=num_ranks))
    done = succeed(start([run, *TENSOR], num_ranks=2))
    assert "2 ranks make one cell, the only holder of the state" in done.output
    assert result(tmp_path)["weights_sha256"] == result(one_cell)["weights_sha256"]
    assert average_of(tmp_path) == average_of(one_cell)
    other = tmp_path / "degrees"
    run = config(other, few_rows, LANGUAGE)
    for until, degree, num_ranks in [(2, 1, 1), (4, 2, 4), (5, 1, 3)]:
        succeed(start([run, "--parallel.tensor", str(degree), "--max_steps", str(until)], num_ranks=num_ranks))
    succeed(start([run, "--parallel.tensor", "2"], num_ranks=2))
    assert result(other)["num_samples"] == result(one_cell)["num_samples"]
    assert result(other)["weights_sha256"] != result(one_cell)["weights_sha256"]
    assert_same_but_for_rounding(losses(other), losses(one_cell), TERMS)
    mine, theirs = (newest_weights(folder) for folder in (other, one_cell))
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-5)


def newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's newest commit, which torch's own reader and one process alone find, too."""
    store = open_store(str(folder / "run"))
    record = find(store, None)
    state = read_state(store, record)
    weights: dict[str, torch.Tensor] = state["model"]  # type: ignore[assignment]
    stock = {"model": {name: torch.empty_like(tensor) for name, tensor in weights.items()}}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(folder / "run" / record.attempt))
    opened = open_trained(str(folder / "run")).model.state_dict()
    for found in (stock["model"], opened):
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    return weights


@pytest.mark.parametrize(
    ("how", "num_ranks", "message"),
    [
        (["--parallel.tensor", "3"], None, "parallel.tensor: 3 does not work with task.params.model.heads: 4, since"),
        (
            [*TENSOR],
            3,
            "a world of 3 ranks is not of whole cells of 2 (parallel.tensor: 2): start a multiple of 2 workers",
        ),
    ],
)
def test_what_makes_no_cells_is_refused(
    tmp_path: Path, few_rows: Path, how: list[str], num_ranks: int | None, message: str
) -> None:
    """With exit code 2 before anything ran, and what to do; tests of `config.combinations` have all else."""
    done = start([config(tmp_path, few_rows, LANGUAGE), *how], num_ranks=num_ranks)
    assert done.code == 2 and message in done.output.replace("\n", " "), done.output
    assert not list((tmp_path / "run").glob("commits/*"))
