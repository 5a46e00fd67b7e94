"""Reports about runs that were stopped and started again, and about what should not show in a run's weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint import open_store
from elastic_train.checkpoint.commits.lookup import find
from elastic_train.inference.opening import open_trained
from tests.elastic_train.training.jobs import CLASSIFIER, average_of, config, history, losses, result, succeed
from tests.memory_job import start

COSINE = {"lr": 0.01, "warmup_steps": 2, "schedule": "cosine"}
JOB: dict[str, object] = {**CLASSIFIER, "optimizer": COSINE, "checkpoint": {"every": "2 steps", "keep_last": 3}}
AVERAGED = {**COSINE, "ema_decay": 0.5}


def train(folder: Path, rows: Path, *arguments: str, num_ranks: int | None = None, **changes: object) -> Path:
    succeed(start([config(folder, rows, {**JOB, **changes}), *arguments], num_ranks=num_ranks))
    return folder


def rates(folder: Path) -> dict[int, float]:
    """Return the learning rate of every step that a tracker is given."""
    files = sorted((folder / "run" / "metrics").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    shown = [line for line in lines if "train/learning_rate" in line.get("values", {})]
    return {line["step"]: line["values"]["train/learning_rate"] for line in shown}


def hash_of(folder: Path) -> object:
    return result(folder)["weights_sha256"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, reported_rows: Path) -> Path:
    """A run of six steps, without a stop."""
    return train(tmp_path_factory.mktemp("whole"), reported_rows)


def stopped_twice(folder: Path, rows: Path, **changes: object) -> Path:
    """Train to step 2, then to step 5, then to the end, on other ranks each time."""
    for until, num_ranks in (("2", 2), ("5", None)):
        train(folder, rows, "--max_steps", until, num_ranks=num_ranks, **changes)
    return train(folder, rows, num_ranks=3, **changes)


def test_dropout_after_a_resume_is_that_of_a_run_without_one(tmp_path: Path, reported_rows: Path, whole: Path) -> None:
    """The generators' states were not restored: https://github.com/huggingface/transformers/issues/17032.

    A fifth of all activations is dropped, and both stops are within an epoch.
    """
    resumed = stopped_twice(tmp_path, reported_rows, optimizer={**COSINE, "schedule_steps": 6})
    assert hash_of(resumed) == hash_of(whole)
    assert losses(resumed) == losses(whole)


def test_the_scale_of_gradients_is_resumed(tmp_path: Path, reported_rows: Path) -> None:
    """It began again at its first value: https://github.com/huggingface/accelerate/issues/4289."""
    fixed: dict[str, Any] = {"precision": "fp16", "optimizer": {**COSINE, "schedule_steps": 6}}
    never = train(tmp_path / "never", reported_rows, **fixed)
    assert hash_of(stopped_twice(tmp_path / "twice", reported_rows, **fixed)) == hash_of(never)


def test_averaged_weights_are_resumed_beside_the_trained_ones(tmp_path: Path, reported_rows: Path) -> None:
    """The average was reset (https://github.com/ai2cm/ace/issues/349), or training went on from it
    (https://github.com/atomistic-machine-learning/schnetpack/pull/785)."""
    fixed: dict[str, Any] = {
        "optimizer": {**AVERAGED, "schedule_steps": 6},
        "validation": {"every": "1 steps", "weights": "ema"},
    }
    never = train(tmp_path / "never", reported_rows, **fixed)
    twice = stopped_twice(tmp_path / "twice", reported_rows, **fixed)
    assert (hash_of(twice), average_of(twice)) == (hash_of(never), average_of(never))


def test_tied_weights_are_still_one_after_a_resume(tmp_path: Path, reported_rows: Path) -> None:
    """Output layer and embedding had parted: https://github.com/NVIDIA-NeMo/Automodel/issues/2571."""
    model = {"vocabulary": 64, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.1, "tied": True}
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": model, "max_tokens": 16}}
    fixed: dict[str, Any] = {"task": task, "optimizer": {**COSINE, "schedule_steps": 6}}
    never = train(tmp_path / "never", reported_rows, **fixed)
    twice = stopped_twice(tmp_path / "twice", reported_rows, **fixed)
    assert hash_of(twice) == hash_of(never)
    opened = open_trained(str(twice / "run")).model
    shared = Counter(parameter.data_ptr() for _, parameter in opened.named_parameters(remove_duplicate=False))
    assert sorted(shared.values())[-2:] == [1, 2]


def test_a_resumed_schedule_neither_lags_nor_repeats_a_step(tmp_path: Path, reported_rows: Path, whole: Path) -> None:
    """It lagged by one: https://github.com/Lightning-AI/pytorch-lightning/issues/1772."""
    resumed = stopped_twice(tmp_path, reported_rows, optimizer={**COSINE, "schedule_steps": 6})
    assert rates(resumed) == rates(whole)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_schedule_takes_one_step_for_each_update_on_any_number_of_ranks(
    tmp_path: Path, reported_rows: Path, whole: Path, num_ranks: int
) -> None:
    """It took one for each process: https://github.com/huggingface/accelerate/issues/2926.

    The loss that is shown jumped with the number of replicas: https://github.com/pytorch/torchtitan/pull/4663.
    """
    several = train(tmp_path, reported_rows, num_ranks=num_ranks)
    assert rates(several) == rates(whole)
    assert losses(several) == losses(whole)


@pytest.mark.parametrize("every", ["1 step", "4 steps"])
def test_how_often_a_run_validates_does_not_show_in_its_weights(
    tmp_path: Path, reported_rows: Path, whole: Path, every: str
) -> None:
    """The curves parted: https://github.com/open-mmlab/OpenUnReID/issues/46."""
    assert hash_of(train(tmp_path, reported_rows, validation={"every": every})) == hash_of(whole)


def test_how_often_a_run_commits_does_not_show_in_its_weights(tmp_path: Path, reported_rows: Path) -> None:
    """The average was left in the model at each save: https://github.com/harubaru/waifu-diffusion/pull/31."""
    runs = [
        train(tmp_path / str(every), reported_rows, optimizer=AVERAGED, checkpoint={"every": f"{every} steps"})
        for every in (1, 5)
    ]
    assert hash_of(runs[0]) == hash_of(runs[1])


def test_a_run_that_is_past_its_last_step_ends_at_once(tmp_path: Path, reported_rows: Path) -> None:
    """It waited for ever for a step that was exactly the last: https://github.com/PrimeIntellect-ai/prime-rl/pull/3352."""
    train(tmp_path, reported_rows, "--max_steps", "4")
    train(tmp_path, reported_rows, "--max_steps", "3")
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
    assert result(tmp_path)["step"] == 4


def test_the_newest_commits_are_kept_by_number_not_by_name(tmp_path: Path, reported_rows: Path) -> None:
    """Of steps 9900 and 10000 the second was deleted: https://github.com/huggingface/transformers/issues/27138."""
    train(tmp_path, reported_rows, epochs=4, checkpoint={"every": "1 steps", "keep_last": 2})
    store = open_store(str(tmp_path / "run"))
    assert find(store, None).step == 12
    assert [line["step"] for line in history(tmp_path, "commit")] == list(range(1, 13))
    assert sorted(int(path.stem[-12:]) for path in (tmp_path / "run" / "commits").glob("*.json")) == [11, 12]
