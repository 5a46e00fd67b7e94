"""Rows whose tokens several ranks compute, in whole runs: one hash over any number of cells, commits at any degree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.tasks.decoder.shape import DecoderShape
from tests.elastic_train.training.jobs import average_of, config, losses, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import LANGUAGE, MODEL, TERMS, newest_weights
from tests.elastic_train.training.whole_runs.test_cells_in_shards import (
    GRADIENTS,
    ONCE,
    PARAMETERS,
    PARAMETERS_ONCE,
    SHARDS,
    assert_stock_reader_finds_all,
    bytes_of,
)
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding, num_terms

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("context")]  # one run to compare with
CONTEXT = ["--parallel.context", "2"]
STAGES, TENSOR = ["--parallel.pipeline", "2"], ["--parallel.tensor", "2"]
SEQUENCE = ["--parallel.sequence", "true"]
HUNT = pytest.mark.hunt  # the same, with a share of the state, is below
STAGED = {"depth": 4, "tied": False}
"""A model that can be run in two stages with two chunks each."""
UNTIED_TERMS = num_terms(DecoderShape(**{**MODEL, "tied": False, "dropout": 0.0}), num_tokens=16, num_rows=24)  # type: ignore[arg-type]


def write(folder: Path, rows: Path, **changes: object) -> str:
    params = {"model": {**MODEL, **changes}, "max_tokens": 16}
    return config(
        folder, rows, {**LANGUAGE, "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}}
    )


@pytest.fixture(scope="module")
def one_cell(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of one cell of two ranks."""
    folder = tmp_path_factory.mktemp("cell")
    succeed(start([write(folder, few_rows), *CONTEXT], num_ranks=2))
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
    """With dropout, clipping, an average, short last steps, and validations."""
    succeed(start([write(tmp_path, few_rows), *CONTEXT, *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path)[what] == result(one_cell)[what]
    assert average_of(tmp_path) == average_of(one_cell)


def test_commits_continue_with_any_cells_with_the_same_bits(tmp_path: Path, few_rows: Path, one_cell: Path) -> None:
    run = write(tmp_path, few_rows)
    for until, num_ranks in [(2, 2), (4, 4)]:
        succeed(start([run, *CONTEXT, "--max_steps", str(until)], num_ranks=num_ranks))
    succeed(start([run, *CONTEXT], num_ranks=2))
    assert result(tmp_path)["weights_sha256"] == result(one_cell)["weights_sha256"]
    assert average_of(tmp_path) == average_of(one_cell)


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of two ranks that hold the whole model and compute rows together."""
    folder = tmp_path_factory.mktemp("stage")
    succeed(start([write(folder, few_rows, **STAGED), *CONTEXT], num_ranks=2))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        pytest.param(4, [*STAGES, "--parallel.recompute", "units", "--run.audit_lanes", "1"], marks=HUNT),
        (4, [*STAGES, "--parallel.schedule", "interleaved", "--parallel.bucket_mb", "0.001"]),
        (8, [*STAGES, "--parallel.schedule", "gpipe"]),
        (4, [*STAGES, *ONCE, "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        (4, [*PARAMETERS_ONCE, "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        (8, [*STAGES, *GRADIENTS, "--parallel.schedule", "interleaved", "--run.audit_lanes", "1"]),
    ],
)
def test_stages_of_ranks_with_parts_of_rows_have_the_bits_of_one_stage(
    tmp_path: Path, few_rows: Path, one_stage: Path, num_ranks: int, how: list[str]
) -> None:
    succeed(start([write(tmp_path, few_rows, **STAGED), *CONTEXT, *how], num_ranks=num_ranks))
    assert_same_bits(tmp_path, one_stage)


def test_commits_of_stages_continue_with_and_without_them(tmp_path: Path, few_rows: Path, one_stage: Path) -> None:
    """A commit has whole tensors; each is written by one rank of the stage that holds it."""
    run = write(tmp_path, few_rows, **STAGED)
    for until, how, num_ranks in [(2, STAGES, 4), (4, [], 2)]:
        succeed(start([run, *CONTEXT, *how, "--max_steps", str(until)], num_ranks=num_ranks))
        newest_weights(tmp_path)
    done = succeed(start([run, *CONTEXT, *STAGES], num_ranks=4))
    assert "4 ranks make one cell, and 2 hold each part of the state" in done.output
    assert_same_bits(tmp_path, one_stage)


def test_shares_of_a_part_are_with_all_ranks_that_hold_it(tmp_path: Path, few_rows: Path, one_stage: Path) -> None:
    """Commits go from whole state to shares, over cells and stages, and back, with the same bits."""
    run = write(tmp_path, few_rows, **STAGED)
    chunks = [*STAGES, "--parallel.schedule", "interleaved"]
    for until, num_ranks, how in [
        (1, 2, GRADIENTS),
        (2, 4, [*chunks, *PARAMETERS]),
        (3, 2, []),
        (4, 6, PARAMETERS_ONCE),
    ]:
        done = succeed(start([run, *CONTEXT, *how, "--max_steps", str(until)], num_ranks=num_ranks))
        assert_stock_reader_finds_all(tmp_path)
    assert "3 cells of 2 ranks, over which the state is held once" in done.output
    whole, shared = sum(bytes_of(one_stage, "optimizer").values()) / 2, bytes_of(tmp_path, "optimizer")
    assert len(shared) == 6 and max(shared.values()) < 0.3 * whole and sum(shared.values()) < 1.1 * whole
    succeed(start([run, *CONTEXT, *SHARDS, "--parallel.bucket_mb", "0.001"], num_ranks=4))
    assert_same_bits(tmp_path, one_stage)


def test_heads_and_rows_are_shared_out_at_once(tmp_path: Path, few_rows: Path) -> None:
    """One hash on one cell, on two, and in stages; near to that of ranks with all heads, by rounding.

    So are ranks that share out the tokens of parts."""
    cells = {
        "one": (4, TENSOR),
        "two": (8, [*TENSOR, "--parallel.recompute", "units", *ONCE]),
        "staged": (8, [*TENSOR, *STAGES]),
        "fast": (8, [*TENSOR, "--reduction", "fast"]),
        "sequence": (4, [*TENSOR, *SEQUENCE]),
        "two of sequence": (8, [*TENSOR, *SEQUENCE, *GRADIENTS, "--run.audit_lanes", "1"]),
        "all heads": (2, []),
    }
    for name, (num_ranks, how) in cells.items():
        run = write(tmp_path / name, few_rows, tied=False)
        succeed(start([run, *CONTEXT, *how, "--max_steps", "3"], num_ranks=num_ranks))
    for name in ("two", "staged"):
        assert_same_bits(tmp_path / name, tmp_path / "one")
    assert_stock_reader_finds_all(tmp_path / "two")
    one, all_heads = tmp_path / "one", tmp_path / "all heads"
    mine, whole = newest_weights(one), newest_weights(all_heads)
    assert result(one)["weights_sha256"] != result(all_heads)["weights_sha256"]
    assert_same_bits(tmp_path / "two of sequence", tmp_path / "sequence")
    for other in (all_heads, tmp_path / "fast", tmp_path / "sequence"):
        assert_same_but_for_rounding(losses(one), losses(other), UNTIED_TERMS)
    for name, tensor in whole.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-5)


def assert_same_bits(folder: Path, other: Path) -> None:
    for what in ("weights_sha256", "metrics", "num_samples"):
        assert result(folder)[what] == result(other)[what]
    assert average_of(folder) == average_of(other)
    assert losses(folder) == losses(other)


def test_no_degree_changes_more_than_roundings(tmp_path: Path, few_rows: Path) -> None:
    """Of one rank, of three for each row, and of one, two and three in turn, without random numbers."""
    ended = {}
    for degree in (1, 3):
        folder = tmp_path / str(degree)
        succeed(start([write(folder, few_rows, dropout=0.0), "--parallel.context", str(degree)], num_ranks=degree))
        ended[degree] = folder
    run = write(tmp_path, few_rows, dropout=0.0)
    for until, degree, num_ranks in [(2, 1, 1), (4, 2, 4)]:
        how = ["--parallel.context", str(degree), "--max_steps", str(until)]
        succeed(start([run, *how], num_ranks=num_ranks))
    succeed(start([run, "--parallel.context", "3"], num_ranks=3))
    whole = newest_weights(ended[1])
    for folder in (ended[3], tmp_path):
        assert result(folder)["num_samples"] == result(ended[1])["num_samples"]
        assert result(folder)["weights_sha256"] != result(ended[1])["weights_sha256"]
        assert_same_but_for_rounding(losses(folder), losses(ended[1]), TERMS)
        mine = newest_weights(folder)
        for name, tensor in whole.items():
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-5)
