"""Runs end with the weights that a plain loop computes, written after the documentation alone."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.job import state as state_module
from elastic_train.job.state import clip
from elastic_train.training.run import run
from tests.conftest import run as run_module
from tests.conftest import run_ranks, start, write_rows

FOLDER = Path(__file__).parent
TASK = "elastic_train.tasks.text_classifier:TextClassifier"
LANGUAGE_MODEL = "elastic_train.tasks.causal_lm:CausalLM"
CLIP = clip
Clip = Callable[[Optimizer, float, float], None]
PARAMS = {"max_tokens": 24, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.2, "vocabulary": 4200}
PARAMS |= {"numeric": ["size"], "categorical": ["kind"]}
JOBS: dict[str, dict[str, object]] = {
    "five lanes, a lane without samples in the last step": {
        "batch": {"global_batch": 30, "micro_batch": 6},
        "optimizer": {"lr": 0.01, "warmup_steps": 3, "clip_norm": 0.5},
        "epochs": 3,
    },
    "eight lanes, seven row groups a file, no clipping, a constant rate": {
        "batch": {"global_batch": 16, "micro_batch": 2},
        "optimizer": {"lr": 0.003, "warmup_steps": 0, "clip_norm": None, "schedule": "constant", "weight_decay": 0.1},
        "max_steps": 30,
    },
}


def write_job(folder: Path, job: dict[str, object], task: str, **params: object) -> str:
    """Write 331 rows (a prime) in 21 row groups, and the configuration of a job on them."""
    write_rows(folder / "train", 331, seed=1)
    tree = {
        "run": {"dir": str(folder / "run"), "seed": 5},
        "data": {"train": str(folder / "train"), "block_row_groups": 2},
        "task": {"path": task, "params": {**PARAMS, **params}},
        "checkpoint": {"every": "7 steps"},
        **job,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "config.yaml")


def result_of(folder: Path) -> object:
    return json.loads((folder / "run" / "result.json").read_text())["weights_sha256"]


def oracle(folder: Path) -> str:
    """Return the hash that the plain loop computes from the run's configuration."""
    done = run_module([sys.executable, "-m", "tests.oracle.loop", str(folder / "run" / "config.yaml")])
    assert done.code == 0, done.output
    return done.output.strip()


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_a_run_ends_with_the_weights_of_a_plain_loop(tmp_path: Path, job: dict[str, object]) -> None:
    """AdamW, warm-up, cosine, clipping, dropout, accumulation, several epochs with a short last step."""
    ended = start([write_job(tmp_path, job, TASK)])
    assert ended.code == 0, ended.output
    assert result_of(tmp_path) == oracle(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [["--parallel.shards", "parameters"], pytest.param(["--parallel.tensor", "1"], marks=pytest.mark.hunt)]
)
def test_so_does_a_language_model_whose_layers_could_be_cut(tmp_path: Path, how: list[str]) -> None:
    """Its gradients are measured, and its weights hashed, by parts that ranks of cells would have."""
    path = write_job(tmp_path, JOBS["five lanes, a lane without samples in the last step"], LANGUAGE_MODEL)
    sizes = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "hidden": 24, "dropout": 0.1}
    ended = start([path, "--task.params", json.dumps({"model": sizes, "max_tokens": 24}), *how], num_ranks=2)
    assert ended.code == 0, ended.output
    assert len(json.loads((tmp_path / "run" / "result.json").read_text())["cut_dims"]) == 2 * 7
    assert result_of(tmp_path) == oracle(tmp_path)


@pytest.mark.slow
def test_so_does_a_run_that_was_killed_on_two_ranks_and_continued_on_three(tmp_path: Path) -> None:
    job = JOBS["five lanes, a lane without samples in the last step"]
    path = write_job(tmp_path, job, "tests.tasks:FailsOnce", marker=str(tmp_path / "failed"), after=40, how="SIGKILL")
    assert start([path], num_ranks=2).code != 0
    assert (tmp_path / "failed").exists() and not (tmp_path / "run" / "result.json").exists()
    ended = start([path], num_ranks=3)
    assert ended.code == 0, ended.output
    assert result_of(tmp_path) == oracle(tmp_path)


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def clip_too_late(optimizer: Optimizer, limit: float, norm: float) -> None:
    """Clip as if the limit were a tenth higher."""
    CLIP(optimizer, 1.1 * limit, norm)


def clip_by_tensor(optimizer: Optimizer, limit: float, norm: float) -> None:
    """Clip every tensor by its own norm."""
    for parameter in trained_by(optimizer):
        nn.utils.clip_grad_norm_([parameter], limit)


def clip_as_before(optimizer: Optimizer, limit: float, norm: float) -> None:
    """Clip by the norm of torch, which is that by grains to a few units in the last place."""
    nn.utils.clip_grad_norm_(trained_by(optimizer), limit)


def train_with(rank: int, size: int, config: str, clip: Clip) -> None:
    with patch.object(state_module, "clip", clip):
        assert run(Path(config), []) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "is_right"), [(CLIP, True), (clip_too_late, False), (clip_by_tensor, False), (clip_as_before, False)]
)
def test_a_product_that_clips_otherwise_is_found_out(tmp_path: Path, clip: Clip, is_right: bool) -> None:
    """The plain loop would see a bug that all of the product's own comparisons share."""
    path = write_job(tmp_path, {**next(iter(JOBS.values())), "epochs": 1}, TASK)
    run_ranks(train_with, 1, path, clip)
    assert (result_of(tmp_path) == oracle(tmp_path)) is is_right


@pytest.mark.parametrize("name", ["loop", "order", "mixture", "grains"])
def test_the_plain_loop_is_short_and_imports_nothing_of_the_product(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 80
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {found.partition(".")[0] for found in names} & {"elastic_train", "rendezvous", "chaos"}


@pytest.mark.heavy
def test_the_orders_agree_for_shapes_that_no_run_here_has() -> None:
    """One row group, more lanes than row groups, blocks longer than lanes, row groups of one row; the judge's, too."""
    ours, judges = (
        importlib.import_module(name)
        for name in ("elastic_train.core.order", "chaos.judge.invariants.exactly_once.samples")
    )
    from tests.oracle.order import lane_of

    for rows, lanes, block in (
        ([5], 3, 8),
        ([1] * 9, 4, 1),
        ([7, 1, 30, 2], 6, 2),
        ([3] * 40, 3, 40),
        ([64] * 17, 2, 3),
    ):
        order = ours.Order(rows, num_lanes=lanes, seed=9, block_row_groups=block)
        for epoch in range(2):
            for lane in range(lanes):
                assert order.epoch(epoch).ids(lane, 0, sum(rows)).tolist() == lane_of(
                    lane, rows, lanes, block, 9, epoch
                )
            for most in (0, 3, sum(rows)):
                due = [each for lane in range(lanes) for each in lane_of(lane, rows, lanes, block, 9, epoch)[:most]]
                judged = judges.DealtOrder(tuple(rows), lanes, block, 9)
                assert judged.ids_before(epoch, most).tolist() == due


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("sources", "weights", "lanes"),
    [
        ([[7, 1, 30, 2], [5, 4]], ["0.7", "0.3"], 3),
        ([[3] * 12, [2, 2], [9]], ["1", "0.25", "2"], 4),
        ([[20], [31]], ["0.123456", "12.5"], 1),
        ([[6], [6]], ["1e-7", "1"], 2),
    ],
)
def test_the_orders_of_mixtures_agree(sources: list[list[int]], weights: list[str], lanes: int) -> None:
    """Source, epoch and lane of each place, and the end of the job."""
    ours = importlib.import_module("elastic_train.core.order")
    dealing = importlib.import_module("elastic_train.core.mixture")
    from elastic_train.config.datasets import shares_of
    from tests.oracle import mixture

    shares = shares_of([float(weight) for weight in weights])
    assert list(shares) == mixture.shares_of(weights)
    orders = [ours.Order(rows, num_lanes=lanes, seed=9, block_row_groups=2) for rows in sources]
    mixed = dealing.Mixture(orders, shares)
    for lane in range(lanes):
        ids = mixed.samples(ours.Cursor(0, 0), lane, 150).ids.tolist()
        assert ids == mixture.taken_by(lane, sources, shares, lanes, 2, 9, 150)
    assert mixed.steps_for(3, 4) == mixture.steps_of(sources, shares, lanes, 4, 3)
