"""Rows whose tokens several ranks compute, in whole runs: one hash over any number of cells, commits at any degree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import start
from tests.elastic_train.training.jobs import average_of, config, losses, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import LANGUAGE, MODEL, TERMS, newest_weights
from tests.rounding import assert_same_but_for_rounding

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("context")]  # one run to compare with
CONTEXT = ["--parallel.context", "2"]


def write(folder: Path, rows: Path, **changes: object) -> str:
    params = {"model": {**MODEL, **changes}, "max_tokens": 16}
    return config(
        folder, rows, {**LANGUAGE, "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}}
    )


@pytest.fixture(scope="module")
def one_cell(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A run of one cell of two ranks."""
    folder = tmp_path_factory.mktemp("cell")
    succeed(start([write(folder, rows), *CONTEXT], num_ranks=2))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [(4, ["--parallel.recompute", "units"]), (6, ["--parallel.bucket_mb", "0.001"])],
)
def test_any_number_of_cells_gives_the_same_bits(
    tmp_path: Path, rows: Path, one_cell: Path, num_ranks: int, how: list[str]
) -> None:
    """With dropout, clipping, an average, short last steps, and validations."""
    succeed(start([write(tmp_path, rows), *CONTEXT, *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path)[what] == result(one_cell)[what]
    assert average_of(tmp_path) == average_of(one_cell)


def test_commits_continue_with_any_cells_with_the_same_bits(tmp_path: Path, rows: Path, one_cell: Path) -> None:
    run = write(tmp_path, rows)
    for until, num_ranks in [(5, 2), (9, 4)]:
        succeed(start([run, *CONTEXT, "--max_steps", str(until)], num_ranks=num_ranks))
    succeed(start([run, *CONTEXT], num_ranks=2))
    assert result(tmp_path)["weights_sha256"] == result(one_cell)["weights_sha256"]
    assert average_of(tmp_path) == average_of(one_cell)


def test_no_degree_changes_more_than_roundings(tmp_path: Path, rows: Path) -> None:
    """Of one rank, of three for each row, and of one, two and three in turn, without random numbers."""
    ended = {}
    for degree in (1, 3):
        folder = tmp_path / str(degree)
        succeed(start([write(folder, rows, dropout=0.0), "--parallel.context", str(degree)], num_ranks=degree))
        ended[degree] = folder
    run = write(tmp_path, rows, dropout=0.0)
    for until, degree, num_ranks in [(5, 1, 1), (8, 2, 4)]:
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


@pytest.mark.parametrize(
    ("changes", "how", "num_ranks", "message"),
    [
        ({}, [], 3, "a world of 3 ranks is not of whole cells of 2 (parallel.context: 2): start a multiple of 2"),
        ({"experts": 4}, [], 2, "routers weigh whole rows, and task.params.model.experts is 4: set either"),
        ({}, ["--parallel.tensor", "2"], 4, "context: 2 does not go together with tensor: 2 yet: set one back"),
        ({}, ["--parallel.shards", "optimizer"], 2, "parallel.context: 2 does not go together with parallel.shards"),
        ({}, ["--run.audit_lanes", "2"], 2, "run.audit_lanes: 2 does not go together with parallel.context: 2 yet"),
    ],
)
def test_what_cannot_be_in_parts_is_refused(
    tmp_path: Path, rows: Path, changes: dict[str, object], how: list[str], num_ranks: int, message: str
) -> None:
    """Before training, with what to do."""
    done = start([write(tmp_path, rows, **changes), *CONTEXT, *how], num_ranks=num_ranks)
    assert done.code == 2 and message in done.output.replace("\n", " "), done.output
