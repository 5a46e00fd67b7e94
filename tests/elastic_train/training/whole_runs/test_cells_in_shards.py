"""Cells whose ranks hold shares of the optimizer's state, and of gradients: the bits of those that do not, and commits
at any degree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from elastic_train.checkpoint import open_store, read_state
from elastic_train.checkpoint.commits.lookup import find
from elastic_train.checkpoint.format.layout import leaves_by_path
from tests.conftest import write_rows
from tests.elastic_train.data.loading.test_batch_builder import damage
from tests.elastic_train.training.jobs import average_of, config, history, losses, result, succeed
from tests.elastic_train.training.whole_runs import test_cells, test_pipeline
from tests.elastic_train.training.whole_runs.test_cells import TENSOR, TERMS, newest_weights, one_cell
from tests.elastic_train.training.whole_runs.test_pipeline import one_process, stages
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding

__all__ = ["one_cell", "one_process"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cells in shards")]  # two runs to compare with

SHARDS = ["--parallel.shards", "optimizer"]
ONCE = [*SHARDS, "--parallel.copies", "1"]
GRADIENTS = ["--parallel.shards", "gradients"]
GRADIENTS_ONCE = [*GRADIENTS, "--parallel.copies", "1"]
PARAMETERS = ["--parallel.shards", "parameters"]
PARAMETERS_ONCE = [*PARAMETERS, "--parallel.copies", "1"]
LONG = pytest.mark.long  # other variants, or stretches of the runs in stretches, are of the same keys


def assert_same(folder: Path, other: Path) -> None:
    for what in ("weights_sha256", "metrics", "num_samples"):
        assert result(folder)[what] == result(other)[what]
    assert average_of(folder) == average_of(other)
    assert not [line for line in history(folder, "event") if line["kind"] == "wrong_gradient"], "cells compute alike"


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        pytest.param(2, ONCE, marks=LONG),
        (4, [*ONCE, "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        pytest.param(4, [*SHARDS, "--parallel.bucket_mb", "null"], marks=LONG),
        pytest.param(6, [*ONCE, "--parallel.bucket_mb", "0.001"], marks=LONG),
        (6, [*SHARDS, "--parallel.bucket_mb", "0.001"]),
        pytest.param(4, [*GRADIENTS_ONCE, "--parallel.recompute", "units"], marks=LONG),
        (6, [*GRADIENTS, "--parallel.bucket_mb", "null"]),
        (4, [*PARAMETERS_ONCE, "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        pytest.param(6, PARAMETERS, marks=LONG),
    ],
)
def test_tensor_ranks_have_the_bits_of_those_that_hold_all_of_their_part(
    tmp_path: Path, few_rows: Path, one_cell: Path, num_ranks: int, how: list[str]
) -> None:
    """Over one cell, two and three, which hold each share once or twice."""
    done = succeed(start([config(tmp_path, few_rows, test_cells.LANGUAGE), *TENSOR, *how], num_ranks=num_ranks))
    if num_ranks > 2:
        times, what = "once" if "1" in how else "2 times", "state" if "parameters" in how else "optimizer's state"
        assert f"{num_ranks // 2} cells of 2 ranks, over which the {what} of each place is held {times}" in done.output
    assert_same(tmp_path, one_cell)


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        pytest.param(2, [*stages(2), *SHARDS], marks=LONG),
        (4, [*stages(2, kind="gpipe"), *ONCE, "--parallel.bucket_mb", "0.001", "--run.audit_lanes", "1"]),
        (6, [*stages(3), *ONCE, "--parallel.recompute", "units"]),
        pytest.param(6, [*stages(2), *SHARDS], marks=LONG),
        (4, [*stages(2, kind="interleaved"), *ONCE, "--parallel.bucket_mb", "0.001"]),
        pytest.param(6, [*stages(2, kind="interleaved"), *SHARDS, "--parallel.bucket_mb", "null"], marks=LONG),
        (6, [*stages(2, kind="interleaved"), *GRADIENTS_ONCE]),
        pytest.param(4, [*stages(2, kind="interleaved"), *GRADIENTS, "--run.audit_lanes", "1"], marks=LONG),
        (6, [*stages(2), *PARAMETERS_ONCE, "--parallel.recompute", "units"]),
        (4, [*stages(2, kind="interleaved"), *PARAMETERS, "--parallel.offload", "all", "--run.audit_lanes", "1"]),
        pytest.param(4, [*stages(2, kind="gpipe"), *GRADIENTS, "--run.audit_lanes", "1"], marks=pytest.mark.hunt),
        pytest.param(6, [*stages(2), *GRADIENTS_ONCE], marks=LONG),
    ],
)
def test_stages_have_the_bits_of_one_process(
    tmp_path: Path, few_rows: Path, one_process: Path, num_ranks: int, how: list[str]
) -> None:
    succeed(start([config(tmp_path, few_rows, test_pipeline.LANGUAGE), *how], num_ranks=num_ranks))
    assert_same(tmp_path, one_process)


def test_stages_of_tensor_ranks_have_the_bits_of_whole_state(tmp_path: Path, few_rows: Path) -> None:
    """Two ranks that hold half of each matrix, one cell of four, and two cells whose ranks hold halves of that."""
    found = {}
    for num_stages, num_ranks, how in ((1, 2, []), (2, 4, SHARDS), (2, 8, GRADIENTS_ONCE)):
        folder = tmp_path / str(num_ranks)
        run = config(folder, few_rows, test_pipeline.LANGUAGE)
        succeed(start([run, *TENSOR, "--max_steps", "2", *stages(num_stages), *how], num_ranks=num_ranks))
        found[num_ranks] = result(folder)["weights_sha256"], result(folder)["metrics"], average_of(folder)
    assert found[2] == found[4] == found[8]
    assert_stock_reader_finds_all(tmp_path / "8")


def test_a_cell_that_cannot_read_a_sample_keeps_no_other_waiting(tmp_path: Path) -> None:
    """It exchanges gradients with the others all the same; then all of them know, and repeat the step without it."""
    data = write_rows(tmp_path / "data", 151, seed=1)
    damage(data, "part-1.parquet", 2)
    rules = {"data": {"train": str(data), "quarantine": ["unreadable"], "too_long": "truncate"}}
    found = {}
    for num_ranks, how in ((2, []), (4, GRADIENTS_ONCE)):
        folder = tmp_path / str(num_ranks)
        run = config(folder, tmp_path, {**test_cells.LANGUAGE, "validation": {}}, **rules)
        done = succeed(start([run, *TENSOR, "--max_steps", "5", *how], num_ranks=num_ranks))
        assert "QUARANTINED: row group 2 of part-1.parquet" in done.output
        found[num_ranks] = [result(folder)[what] for what in ("weights_sha256", "num_samples", "num_left_out", "holes")]
    assert found[2] == found[4]


def test_commits_continue_with_any_cells_whether_in_shards_or_not(
    tmp_path: Path, few_rows: Path, one_cell: Path
) -> None:
    run = config(tmp_path, few_rows, test_cells.LANGUAGE)
    for until, num_ranks, how in [
        (1, 4, ONCE),
        (2, 2, []),
        (3, 6, GRADIENTS),
        (4, 4, PARAMETERS_ONCE),
        (5, 6, GRADIENTS_ONCE),
    ]:
        succeed(start([run, *TENSOR, "--max_steps", str(until), *how], num_ranks=num_ranks))
        newest_weights(tmp_path)
        assert_stock_reader_finds_all(tmp_path)
    succeed(start([run, *TENSOR, *ONCE], num_ranks=2))
    assert_same(tmp_path, one_cell)


def test_commits_continue_at_other_degrees(tmp_path: Path, few_rows: Path, one_process: Path, one_cell: Path) -> None:
    """Stages show in no bit; across degrees of tensor ranks the samples are the same, and losses but for rounding."""
    run = config(tmp_path, few_rows, test_pipeline.LANGUAGE)
    worlds = [
        (1, 4, [*stages(2), *GRADIENTS_ONCE]),
        (2, 3, GRADIENTS),
        (3, 6, [*stages(3), *SHARDS]),
        (4, None, []),
    ]
    for until, num_ranks, how in worlds:
        succeed(start([run, "--max_steps", str(until), *how], num_ranks=num_ranks))
        assert_stock_reader_finds_all(tmp_path)
    succeed(start([run, *stages(2, kind="interleaved"), *ONCE], num_ranks=4))
    assert_stock_reader_finds_all(tmp_path)
    assert_same(tmp_path, one_process)
    other = tmp_path / "degrees"
    run = config(other, few_rows, test_cells.LANGUAGE)
    for until, num_ranks, how in [(2, 4, [*TENSOR, *ONCE]), (4, 3, SHARDS)]:
        succeed(start([run, "--max_steps", str(until), *how], num_ranks=num_ranks))
    succeed(start([run, *TENSOR, *SHARDS], num_ranks=4))
    assert result(other)["num_samples"] == result(one_cell)["num_samples"]
    assert_same_but_for_rounding(losses(other), losses(one_cell), TERMS)


def assert_stock_reader_finds_all(folder: Path) -> None:
    """Compare what torch's own reader finds of a run's newest commit, moments, too, with what this package's does."""
    store = open_store(str(folder / "run"))
    record = find(store, None)
    state = read_state(store, record)
    tensors = {path: leaf for path, leaf in leaves_by_path(state).items() if isinstance(leaf, Tensor)}
    kinds = {str(path[3]) for path in tensors if path[:2] == ("optimizer", "state")}
    assert {"exp_avg", "exp_avg_sq", "ema"} <= kinds
    stock = {kind: state[kind] for kind in ("model", "optimizer")}
    emptied = _like(stock)
    dcp.load(emptied, storage_reader=dcp.FileSystemReader(folder / "run" / record.attempt))
    found = leaves_by_path(emptied)
    assert all(torch.equal(found[path], leaf) for path, leaf in tensors.items())  # type: ignore[arg-type]


def _like(tree: Mapping[str, object]) -> dict[str, object]:
    """Return a nested state with other tensors of the same shapes, without what is plain."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            found[key] = torch.empty_like(value)
        elif isinstance(value, Mapping):
            found[key] = _like(value)
    return found


def test_a_rank_has_the_part_of_its_places_moments_that_it_says(tmp_path: Path, few_rows: Path, one_cell: Path) -> None:
    """Over three cells, which hold each share once, all ranks together have as much as one cell's two have."""
    succeed(start([config(tmp_path, few_rows, test_cells.LANGUAGE), *TENSOR, *GRADIENTS_ONCE], num_ranks=6))
    for part in ("optimizer", "gradients"):
        whole, shared = (bytes_of(folder, part) for folder in (one_cell, tmp_path))
        assert len(whole) == 2 and len(shared) == 6
        assert sum(shared.values()) == pytest.approx(sum(whole.values()), rel=0.1)
        assert max(shared.values()) < 0.75 * min(whole.values())


def bytes_of(folder: Path, part: str) -> dict[int, int]:
    """Return how much memory a part of the state takes after a run's last steps, by rank."""
    lines = sorted(history(folder, "memory"), key=lambda line: int(str(line["step"])))
    return {int(str(line["rank"])): line["parts"][part] for line in lines}  # type: ignore[index]
