"""A language model in whole runs: one hash at any world size, in every mode, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.config.schema import Config
from elastic_train.config.sources import load_config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import make_plan
from elastic_train.system.failpoints import VARIABLE, arm
from tests.conftest import ROOT
from tests.conftest import start as start_processes
from tests.elastic_train.training.jobs import config, result, succeed
from tests.memory_job import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("language model")]  # one reference run

MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1, "dropout": 0.1}
LANGUAGE: dict[str, object] = {
    "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": MODEL, "max_tokens": 16}},
    "batch": {"global_batch": 24, "micro_batch": 6},
    "optimizer": {"lr": 0.01, "warmup_steps": 3},
    "epochs": 1,
    "validation": {"every": "2 steps"},
    "checkpoint": {"every": "1 steps", "keep_last": 3},
}
WORLDS: list[tuple[int, list[str]]] = [
    (2, ["--parallel.recompute", "units"]),
    (3, ["--parallel.shards", "parameters", "--parallel.bucket_mb", "0.01"]),
    (4, ["--parallel.shards", "gradients", "--parallel.recompute", "selective"]),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, fewer_rows: Path) -> dict[str, object]:
    """The result of one process."""
    folder = tmp_path_factory.mktemp("language")
    succeed(start([config(folder, fewer_rows, LANGUAGE)]))
    return result(folder)


def test_the_example_is_a_configuration_of_this_task(fewer_rows: Path) -> None:
    """It uses the model that it names; a configuration for other data has to give the number of token ids."""
    given = load_config(
        ROOT / "configs" / "language.yaml", {"data.train": fewer_rows / "train", "data.validation": None}
    )
    with pytest.raises(ConfigError, match=r"task.params.model.vocabulary: .* say how many token ids it has"):
        make_plan(given)
    whole = {**given.model_dump(), "task": {"path": given.task.path, "params": {**given.task.params, "max_tokens": 64}}}
    whole["task"]["params"]["model"]["vocabulary"] = 64
    assert make_plan(Config.model_validate(whole)).total_steps == 100


@pytest.mark.parametrize(("num_ranks", "how"), WORLDS)
def test_any_world_and_mode_gives_the_same_bits(
    tmp_path: Path, fewer_rows: Path, alone: dict[str, object], num_ranks: int, how: list[str]
) -> None:
    """Rows have different numbers of targets; compared are weights and validation metrics."""
    succeed(start([config(tmp_path, fewer_rows, LANGUAGE), *how], num_ranks=num_ranks))
    found = result(tmp_path)
    assert {key: found[key] for key in ("weights_sha256", "metrics")} == {
        key: alone[key] for key in ("weights_sha256", "metrics")
    }
    assert set(found["metrics"]) == {"loss", "samples", "perplexity", "token_accuracy"}  # type: ignore[call-overload]


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, fewer_rows: Path, alone: dict[str, object]
) -> None:
    """Killed at its second commit, and resumed from the first with another number of ranks."""
    points = tmp_path / "points"
    points.mkdir()
    arm(points, "record", "kill", nth=2)
    path = config(tmp_path, fewer_rows, LANGUAGE)
    assert start_processes([path], num_ranks=2, environ={VARIABLE: str(points)}).code != 0
    done = succeed(start([path], num_ranks=3))
    assert "Resuming from step" in done.output
    assert result(tmp_path)["weights_sha256"] == alone["weights_sha256"]
