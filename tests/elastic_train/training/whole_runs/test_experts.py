"""Experts spread over ranks in whole runs: one hash at any degree, over any number of cells, and one of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.tasks.decoder.shape import DecoderShape
from tests.elastic_train.training.jobs import average_of, config, history, losses, result, succeed
from tests.elastic_train.training.whole_runs.test_cells import LANGUAGE, newest_weights
from tests.memory_job import start
from tests.rounding import assert_same_but_for_rounding, num_terms

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("experts")]  # one run to compare with
MODEL = {
    "vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "hidden": 24, "dropout": 0.1, "experts": 4, "shared_hidden": 8,
}  # fmt: skip
PARAMS = {"model": MODEL, "max_tokens": 16}
# 30 samples in lanes of 5: six lanes, so of two cells of two ranks each computes three, the last of them alone.
JOB = {**LANGUAGE, "batch": {"global_batch": 30, "micro_batch": 5}}


STAGES, TENSOR = ["--parallel.pipeline", "2"], ["--parallel.tensor", "2"]
SHARED = ["--parallel.shards", "optimizer"]
EXPERTS_IN_CHUNKS = ["--parallel.expert", "2", "--parallel.schedule", "interleaved", "--parallel.bucket_mb", "0.001"]
LONG = pytest.mark.long  # one run has what these have
HUNT = pytest.mark.hunt  # so has one of more cells, or whose state is in shares
STAGED = {"tied": False, "depth": 4}
"""A model that can be run in two stages with two chunks each."""
TERMS = num_terms(DecoderShape(**{**MODEL, "tied": False, "dropout": 0.0}), num_tokens=16, num_rows=30)  # type: ignore[arg-type]


def write(folder: Path, few_rows: Path, **changes: object) -> str:
    params = {**PARAMS, "model": {**MODEL, **changes}}
    return config(
        folder, few_rows, {**JOB, "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params}}
    )


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of one process, which has all experts."""
    folder = tmp_path_factory.mktemp("whole")
    succeed(start([write(folder, few_rows)], num_ranks=1))
    return folder


@pytest.mark.parametrize(
    ("degree", "num_ranks", "how"),
    [
        (2, 2, ["--parallel.bucket_mb", "0.001", "--parallel.recompute", "selective"]),
        pytest.param(2, 4, ["--parallel.recompute", "units", "--run.audit_lanes", "1"], marks=HUNT),
        (4, 4, ["--parallel.bucket_mb", "null"]),
        pytest.param(2, 4, SHARED, marks=LONG),
        (2, 4, ["--parallel.shards", "parameters", "--parallel.offload", "all", "--run.audit_lanes", "1"]),
        (2, 6, ["--parallel.shards", "gradients", "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        pytest.param(2, 4, ["--parallel.offload", "optimizer"], marks=HUNT),
        (2, 4, ["--parallel.shards", "optimizer", "--parallel.offload", "optimizer", "--parallel.copies", "1"]),
    ],
)
def test_no_degree_and_no_share_is_in_any_bit(
    tmp_path: Path, few_rows: Path, one_rank: Path, degree: int, num_ranks: int, how: list[str]
) -> None:
    """With dropout, clipping, an average, short last steps, validations, and turns in which a rank has no lane."""
    succeed(start([write(tmp_path, few_rows), "--parallel.expert", str(degree), *how], num_ranks=num_ranks))
    for what in ("weights_sha256", "metrics"):
        assert result(tmp_path)[what] == result(one_rank)[what]
    assert average_of(tmp_path) == average_of(one_rank)


def test_commits_continue_at_any_degree_with_the_same_bits(tmp_path: Path, few_rows: Path, one_rank: Path) -> None:
    run = write(tmp_path, few_rows)
    for until, degree, num_ranks in [(1, 2, 2), (2, 2, 4), (3, 1, 3), (4, 4, 4)]:
        succeed(start([run, "--parallel.expert", str(degree), "--max_steps", str(until)], num_ranks=num_ranks))
    done = succeed(start([run, "--parallel.expert", "2"], num_ranks=2))
    assert "2 ranks make one cell, the only holder of the state" in done.output
    assert result(tmp_path)["weights_sha256"] == result(one_rank)["weights_sha256"]
    mine, whole = newest_weights(tmp_path), newest_weights(one_rank)
    assert all(mine[name].equal(tensor) for name, tensor in whole.items())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, few_rows: Path) -> Path:
    """A run of one process whose model could be run in stages."""
    folder = tmp_path_factory.mktemp("untied")
    succeed(start([write(folder, few_rows, **STAGED)], num_ranks=1))
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [
        pytest.param(2, [*STAGES, "--parallel.recompute", "units", "--run.audit_lanes", "1"], marks=HUNT),
        pytest.param(2, [*STAGES, "--parallel.schedule", "interleaved"], marks=HUNT),
        (4, [*STAGES, "--parallel.expert", "2", "--parallel.schedule", "gpipe"]),
        (8, [*STAGES, *EXPERTS_IN_CHUNKS, "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        pytest.param(8, [*STAGES, *EXPERTS_IN_CHUNKS], marks=LONG),
        (8, [*STAGES, *EXPERTS_IN_CHUNKS, "--parallel.shards", "gradients", "--parallel.copies", "1"]),
        (8, [*STAGES, "--parallel.expert", "2", "--parallel.shards", "parameters", "--parallel.copies", "1"]),
        pytest.param(
            8,
            [*STAGES, "--parallel.expert", "2", "--parallel.recompute", "units", "--run.audit_lanes", "1"],
            marks=LONG,
        ),
    ],
)
def test_stages_with_experts_have_the_bits_of_one_process(
    tmp_path: Path, few_rows: Path, untied: Path, num_ranks: int, how: list[str]
) -> None:
    """Losses, too, of which routers of all stages are a part; of three lanes in each of two cells a rank has one."""
    succeed(start([write(tmp_path, few_rows, **STAGED), *how], num_ranks=num_ranks))
    assert_same_bits(tmp_path, untied)


def test_matrices_that_are_updated_as_a_whole_have_the_bits_of_one_process_beside_experts(
    tmp_path: Path, few_rows: Path
) -> None:
    """Experts' weights are no matrices to Muon, so AdamW updates what ranks have of them."""
    muon = ["--optimizer.name", "muon", "--max_steps", "3"]
    for name, how, num_ranks in (("whole", [], 1), ("spread", ["--parallel.expert", "2", *SHARED], 4)):
        succeed(start([write(tmp_path / name, few_rows), *muon, *how], num_ranks=num_ranks))
    assert_same_bits(tmp_path / "spread", tmp_path / "whole")


def test_fast_sums_of_chunks_with_experts_differ_by_rounding_alone(
    tmp_path: Path, few_rows: Path, untied: Path
) -> None:
    how = [*STAGES, *EXPERTS_IN_CHUNKS, "--reduction", "fast"]
    succeed(start([write(tmp_path, few_rows, **STAGED), *how], num_ranks=8))
    assert result(tmp_path)["num_samples"] == result(untied)["num_samples"]
    assert_same_but_for_rounding(losses(tmp_path), losses(untied), TERMS)


def test_commits_of_stages_with_experts_continue_at_any_degree(tmp_path: Path, few_rows: Path, untied: Path) -> None:
    run, both = write(tmp_path, few_rows, **STAGED), [*STAGES, "--parallel.expert", "2"]
    for until, how, num_ranks in [(2, both, 4), (3, ["--parallel.expert", "2"], 4), (4, STAGES, 2)]:
        succeed(start([run, *how, "--max_steps", str(until)], num_ranks=num_ranks))
        newest_weights(tmp_path)
    succeed(start([run, *both], num_ranks=4))
    assert_same_bits(tmp_path, untied)


def test_experts_of_tensor_ranks_have_one_hash_however_they_are_spread(tmp_path: Path, few_rows: Path) -> None:
    """On one cell and on two, with all of a tensor rank's experts or half of them, and in stages; near to one rank."""
    cells = {
        "one": (2, TENSOR),
        "two": (4, [*TENSOR, "--parallel.recompute", "units", "--run.audit_lanes", "1"]),
        "spread": (4, [*TENSOR, "--parallel.expert", "2"]),
        "shares": (4, [*TENSOR, "--parallel.shards", "optimizer"]),
        "staged": (8, [*TENSOR, "--parallel.expert", "2", *STAGES]),
        "whole": (1, []),
    }
    for name, (num_ranks, how) in cells.items():
        succeed(start([write(tmp_path / name, few_rows, tied=False), *how, "--max_steps", "3"], num_ranks=num_ranks))
    for name in ("two", "spread", "shares", "staged"):
        assert_same_bits(tmp_path / name, tmp_path / "one")
    mine, whole = newest_weights(tmp_path / "spread"), newest_weights(tmp_path / "whole")
    assert_same_but_for_rounding(losses(tmp_path / "one"), losses(tmp_path / "whole"), TERMS)
    for name, tensor in whole.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-5)


def test_lanes_without_a_token_for_some_ranks_experts_keep_nobody_waiting(tmp_path: Path, few_rows: Path) -> None:
    """Lanes of a row of four tokens, each for one of two experts: tensor ranks of a cell had gradients of other blocks,
    so that ranks waited for one another in a circle."""
    sizes = {"experts": 2, "experts_per_token": 1, "depth": 8, "shared_hidden": 0, "tied": False}
    job = {**JOB, "batch": {"global_batch": 8, "micro_batch": 1}, "max_steps": 2}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": {**MODEL, **sizes}, "max_tokens": 4}}
    cells: dict[str, tuple[int, list[str]]] = {"one": (2, [])}
    for shards in ("gradients", "parameters"):
        cells[shards] = 4, ["--parallel.shards", shards, "--parallel.copies", "1"]
    for name, (num_ranks, how) in cells.items():
        run = config(tmp_path / name, few_rows, {**job, "task": task})
        succeed(start([run, *TENSOR, *how], num_ranks=num_ranks))
        assert_same_bits(tmp_path / name, tmp_path / "one")


@pytest.mark.parametrize("how", [[], STAGES], ids=["whole", "staged"])
def test_lanes_are_audited_where_nothing_below_the_first_experts_is_trained(
    tmp_path: Path, few_rows: Path, how: list[str]
) -> None:
    """A backward pass comes to experts wherever their tokens are from, also of a lane that is computed again."""
    task = {"path": "tests.tasks:ExpertsAlone", "params": {**PARAMS, "model": {**MODEL, **STAGED}}}
    job = {**JOB, "task": task, "max_steps": 2}
    for name, audits in [("plain", []), ("audited", ["--run.audit_lanes", "1"])]:
        run = config(tmp_path / name, few_rows, job)
        succeed(start([run, "--parallel.expert", "2", *how, *audits], num_ranks=4))
    assert_same_bits(tmp_path / "audited", tmp_path / "plain")
    assert history(tmp_path / "audited", "event") == []


def assert_same_bits(folder: Path, other: Path) -> None:
    for what in ("weights_sha256", "metrics", "num_samples"):
        assert result(folder)[what] == result(other)[what]
    assert average_of(folder) == average_of(other)
    assert losses(folder) == losses(other)
