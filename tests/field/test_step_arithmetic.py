"""Reports about what the losses and gradients of micro-batches are divided by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_train.checkpoint.commits.lookup import find
from elastic_train.checkpoint.commits.reader import read_state
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.data.dataset.manifest import build_manifest, load_manifest
from elastic_train.tasks.causal_lm import CausalLM
from tests.elastic_train.training.jobs import config, losses, result, succeed
from tests.memory_job import start

MODEL = {"vocabulary": 32, "dim": 16, "depth": 1, "heads": 2, "dropout": 0.0}
TASK = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": MODEL, "max_tokens": 128}}
WRONG = {**TASK, "path": "tests.field.averaging_task:MeanOfMeans"}
SGD = {"name": "sgd", "lr": 0.5, "weight_decay": 0, "warmup_steps": 0, "schedule": "constant"}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerance for sums of at most 150 tokens in a different order, after a few steps."""


def write_texts(folder: Path, lengths: list[int]) -> None:
    """Write rows of as many tokens; each row repeats tokens of its own, so that no two have the same gradient."""
    tokens = [np.arange(length, dtype=np.int32) % (3 + row) + 7 * row for row, length in enumerate(lengths)]
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"input_ids": pa.array(tokens, pa.list_(pa.int32()))}), folder / "part-0.parquet")
    build_manifest(str(folder))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 11, 101 and 40 tokens, all of one step of four: whatever their order, a lane has room left."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder / "train", [11, 101, 40])
    write_texts(folder / "validation", [5, 90, 30])
    return folder


def train(folder: Path, texts: Path, micro_batch: int, num_ranks: int | None = None, **changes: object) -> Path:
    """Train three epochs, each of one step that has room for a fourth row."""
    tree: dict[str, object] = {
        "task": TASK,
        "batch": {"global_batch": 4, "micro_batch": micro_batch},
        "optimizer": {**SGD, "clip_norm": 0.5},
        "epochs": 3,
        **changes,
    }
    succeed(start([config(folder, texts, tree)], num_ranks=num_ranks))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    store = open_store(str(folder / "run"))
    found: dict[str, torch.Tensor] = read_state(store, find(store, None))["model"]  # type: ignore[assignment]
    return found


def counted(folder: Path) -> int:
    """Return how many samples a run has trained on, each as often as that."""
    coverage = result(folder)["coverage"]
    assert isinstance(coverage, dict)
    return int(coverage["count"])


def validated(folder: Path) -> float:
    metrics = result(folder)["metrics"]
    assert isinstance(metrics, dict)
    return float(metrics["loss"])


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """A run without accumulation: each step is one micro-batch."""
    return train(tmp_path_factory.mktemp("at_once"), texts, 4)


@pytest.mark.heavy
@pytest.mark.parametrize("num_ranks", [None, 2])
def test_accumulating_rows_of_11_and_101_tokens_is_training_on_both_at_once(
    tmp_path: Path, texts: Path, at_once: Path, num_ranks: int | None
) -> None:
    """A mean of means weighed tokens of short rows more: https://github.com/huggingface/transformers/issues/24725.

    Each micro-batch's gradient was clipped, not the step's: https://github.com/huggingface/transformers/issues/1563.
    The rest of an epoch was divided by all of a step: https://github.com/Lightning-AI/pytorch-lightning/issues/19987.
    """
    accumulated = train(tmp_path, texts, 1, num_ranks)
    assert losses(accumulated) == pytest.approx(losses(at_once), rel=1e-4)
    torch.testing.assert_close(weights(accumulated), weights(at_once), **CLOSE)


@pytest.mark.heavy
def test_a_mean_of_means_is_something_else(tmp_path: Path, texts: Path) -> None:
    """The mistake of the reports, planted: rows and tolerances here are such that it is seen."""
    wrong = [weights(train(tmp_path / str(size), texts, size, task=WRONG)) for size in (1, 4)]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*wrong, **CLOSE)


@pytest.mark.heavy
def test_a_dataset_smaller_than_a_step_is_trained_on(tmp_path: Path, texts: Path) -> None:
    """No step was taken, the loss was 0.0: https://github.com/dreamquark-ai/tabnet/issues/537."""
    train(tmp_path, texts, 8, batch={"global_batch": 64, "micro_batch": 8})
    first, _, last = losses(tmp_path).values()
    assert 0.0 < last < first
    assert counted(tmp_path) == 9


@pytest.mark.heavy
def test_a_validations_loss_does_not_depend_on_the_micro_batch(tmp_path: Path, texts: Path) -> None:
    """Means of batches were averaged: https://github.com/huggingface/transformers/issues/39241."""
    still: dict[str, Any] = {"optimizer": {**SGD, "lr": 1e-12}, "validation": {"every": "1 steps"}}
    found = [validated(train(tmp_path / str(size), texts, size, **still)) for size in (1, 4)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_tokens_with_the_id_of_the_padding_are_targets(texts: Path) -> None:
    """Each end of a text was masked with the padding: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4660.

    Rows are filled up with 0. A text that ends with 0 and has it in its midst has as many targets as any other.
    """
    task = CausalLM(model=MODEL, max_tokens=128)
    task.prepare(load_manifest(str(texts / "train")))
    rows = pa.table({"input_ids": pa.array([[5, 0, 6, 0], [1, 2, 3, 4, 5, 6, 7]], pa.list_(pa.int32()))})
    loss = task.loss(task.build_model(), task.collate(rows, np.arange(2)))
    assert loss.weight == 3 + 6


@pytest.mark.heavy
def test_gradients_are_clipped_at_their_own_size_not_at_that_of_a_scaled_loss(
    tmp_path: Path, texts: Path, at_once: Path
) -> None:
    """Scaled gradients were clipped, then unscaled to nothing: https://github.com/milesial/Pytorch-UNet/issues/468.

    Once the scale is found, which leaves out some updates, steps of fp16 lower the loss as those of fp32 do.
    """
    scaled = losses(train(tmp_path, texts, 4, precision="fp16", epochs=20))
    expected = list(losses(at_once).values())
    # Without an update the loss stays, but for its last bits, as each epoch has another order.
    begun = next(step for step, loss in scaled.items() if loss < 0.99 * scaled[1])
    assert begun > 2, "no scale was too large for the first update"
    found = [scaled[step] for step in range(begun - 1, begun + 2)]
    assert found == pytest.approx(expected, rel=0.02)
