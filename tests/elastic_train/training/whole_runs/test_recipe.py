"""Early stopping and weight averaging in whole runs: one last step and one hash, in any world and after a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from chaos.judge.invariants.written.recomputed import check_improvement
from elastic_train.checkpoint.commits.lookup import find
from elastic_train.checkpoint.commits.weights import export
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.errors import ConfigError
from elastic_train.inference.opening import open_trained
from elastic_train.inference.predicting import evaluate_trained
from tests import memory_live
from tests.conftest import start as start_processes
from tests.elastic_train.training.jobs import CLASSIFIER, average_of, config, failing, history, result, succeed
from tests.memory_job import Loss, start

pytestmark = pytest.mark.slow

RECIPE: dict[str, object] = {
    "optimizer": {"lr": 0.01, "warmup_steps": 3, "schedule": "wsd", "ema_decay": 0.8},
    "validation": {
        "every": "3 steps",
        "weights": "ema",
        "early_stopping": {"metric": "max loss", "patience": 2},
    },
    "checkpoint": {"every": "7 steps", "keep_last": 1},
}
BEST, END = 3, 9
"""The monitored loss falls, so that the first validation has the highest."""


def steps_of_commits(folder: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in (folder / "run" / "commits").iterdir())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A run of one process that stopped early."""
    folder = tmp_path_factory.mktemp("stopped")
    done = succeed(start([config(folder, rows, {**CLASSIFIER, **RECIPE})]))
    assert f"early stopping after step {END}: 2 validations in a row were not better (max loss)" in done.output
    return folder


def test_training_ends_when_validations_do_not_improve_and_says_so(stopped: Path, rows: Path) -> None:
    """The best and the last commit are kept; starting again trains nothing unless the patience was raised."""
    ended = result(stopped)
    assert (ended["status"], ended["step"], ended["ended_by"]) == ("done", END, "early stopping")
    assert ended["improvement"]["best_step"] == BEST  # type: ignore[index,call-overload]
    assert steps_of_commits(stopped) == [BEST, END]
    succeed(start([str(stopped / "config.yaml")]))
    assert result(stopped)["weights_sha256"] == ended["weights_sha256"] and len(history(stopped, "step")) == END


def test_keep_best_commits_the_best_state_at_its_step(tmp_path: Path, rows: Path) -> None:
    """Validations and periodic commits are at other steps; nothing ends early, and the judge recomputes the best."""
    keys = {
        "optimizer": {**RECIPE["optimizer"], "ema_decay": None},  # type: ignore[dict-item]
        "validation": {"every": "3 steps"},
        "checkpoint": {"every": "7 steps", "keep_last": 1, "keep_best": "max loss"},
        "max_steps": END + 2,
    }
    succeed(start([config(tmp_path, rows, {**CLASSIFIER, **keys})]))
    assert (result(tmp_path)["ended_by"], steps_of_commits(tmp_path)) == ("last step", [BEST, END + 2])
    trained = open_trained(str(tmp_path / "run"), validation=str(rows / "validation"))
    assert evaluate_trained(trained)["loss"] == result(tmp_path)["improvement"]["best"]  # type: ignore[index,call-overload]
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert check_improvement(collect(tmp_path / "run"), "result.json", record)


def test_a_fault_in_a_validation_and_another_world_change_nothing(tmp_path: Path, rows: Path, stopped: Path) -> None:
    """Failed in the last validation on two ranks, continued by three from a commit between two validations."""
    path = config(tmp_path, rows, {**failing(tmp_path, after=42), **RECIPE})
    assert "planted failure" in start_processes([path], num_ranks=2).output
    assert len(history(tmp_path, "validate")) == 6, "the third validation has begun on both ranks"
    done = succeed(start([path], num_ranks=3))
    assert "Resuming from step 7 (commits/00000001-000000000007.json" in done.output
    for key in ("step", "ended_by", "improvement", "weights_sha256", "metrics"):
        assert result(tmp_path)[key] == result(stopped)[key], key
    assert average_of(tmp_path) == average_of(stopped)
    assert steps_of_commits(tmp_path) == [BEST, END]


def test_the_average_is_what_is_validated_evaluated_and_exported(tmp_path: Path, rows: Path, stopped: Path) -> None:
    """Bit for bit; and the average differs from the trained weights."""
    found = {}
    for weights in ("trained", "ema"):
        trained = open_trained(
            str(stopped / "run"), commit="newest", validation=str(rows / "validation"), weights=weights
        )  # type: ignore[arg-type]
        found[weights] = evaluate_trained(trained)
    assert found["ema"] == result(stopped)["metrics"] and found["trained"]["loss"] != found["ema"]["loss"]
    store = open_store(str(stopped / "run"))
    export(store, find(store, None), tmp_path / "weights.safetensors", "safetensors", "ema")
    header = json.loads((tmp_path / "weights.safetensors").read_bytes()[8:].partition(b'"}')[0].decode() + '"}}')
    assert header["__metadata__"]["weights"] == "ema"


def test_a_run_without_an_average_has_none_to_export(tmp_path: Path, rows: Path, alone: Path) -> None:
    store = open_store(str(alone / "run"))
    with pytest.raises(ConfigError, match=r"holds no average of the weights: the run has no optimizer\.ema_decay"):
        export(store, find(store, None), tmp_path / "weights.pt", "torch", "ema")


def test_a_validation_that_a_lost_rank_ends_is_done_again(tmp_path: Path, rows: Path, stopped: Path) -> None:
    """The survivors, whose weights and averages are sharded, repeat the validation before they train on."""
    job = [config(tmp_path, rows, {**CLASSIFIER, **RECIPE}), "--parallel.shards", "parameters"]
    done = memory_live.start(job, num_ranks=3, losses=[Loss(1, 2, "validate")])
    assert sorted(done.codes) == [-9, 0, 0, 0], done.output
    assert "early stopping after step" in done.output and result(tmp_path)["term"] != 1
    for key in ("step", "ended_by", "improvement", "weights_sha256", "metrics"):
        assert result(tmp_path)[key] == result(stopped)[key], key
    assert average_of(tmp_path) == average_of(stopped)
