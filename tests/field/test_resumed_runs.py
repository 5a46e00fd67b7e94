"""Reports about runs that were stopped and started again, and about what should not show in a run's weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elastic_train.inference.opening import open_trained
from tests.elastic_train.training.jobs import CLASSIFIER, config, losses, result, succeed
from tests.memory_job import start

pytestmark = pytest.mark.heavy
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


def test_the_scale_of_gradients_is_resumed(tmp_path: Path, reported_rows: Path) -> None:
    """It began again at its first value: https://github.com/huggingface/accelerate/issues/4289."""
    fixed: dict[str, Any] = {"precision": "fp16", "optimizer": {**COSINE, "schedule_steps": 6}}
    never = train(tmp_path / "never", reported_rows, **fixed)
    assert hash_of(stopped_twice(tmp_path / "twice", reported_rows, **fixed)) == hash_of(never)


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


def test_how_often_a_run_validates_does_not_show_in_its_weights(
    tmp_path: Path, reported_rows: Path, whole: Path
) -> None:
    """The curves parted: https://github.com/open-mmlab/OpenUnReID/issues/46."""
    assert hash_of(train(tmp_path, reported_rows, validation={"every": "1 step"})) == hash_of(whole)


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
