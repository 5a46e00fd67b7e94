"""Models of transformers in stages: they have the bits of the whole model, by each schedule, with dropout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models.hugging_face import Kind
from tests.conftest import run_ranks, standby_with
from tests.elastic_train.job.cells.test_stages import Subject, of_rank
from tests.elastic_train.tasks.language_rows import GPT2, LLAMA, WITH_TRANSFORMERS

pytestmark = WITH_TRANSFORMERS
UNTIED = {"vocab_size": 11, "tie_word_embeddings": False}
CONFIGS: tuple[dict[str, Any], ...] = (
    {**LLAMA, **UNTIED, "num_hidden_layers": 5, "attention_dropout": 0.3},
    {**GPT2, **UNTIED, "n_layer": 5, "embd_pdrop": 0.3, "resid_pdrop": 0.3},
)
"""GPT-2 has learned positions and draws before its layers, so the second stage has to leave that out."""


def of_transformers(config: dict[str, Any]) -> Subject:
    task = CausalLM(hf={"config": config})
    assert task.source is not None
    return Subject(task, partial(task.source.build, Kind("AutoModelForCausalLM", task.source.load_config())))


def of_rank_with_transformers(rank: int, size: int, folder: str, kind: str) -> None:
    for number, config in enumerate(CONFIGS):
        Path(folder, str(number)).mkdir(exist_ok=True)
        of_rank(rank, size, f"{folder}/{number}", kind, partial(of_transformers, config))


@pytest.mark.parametrize(("size", "kind"), [(2, "1f1b"), (3, "gpipe"), (2, "interleaved")])
def test_stages_of_transformers_compute_the_bits_of_the_whole(tmp_path: Path, size: int, kind: str) -> None:
    """Losses and gradients, of lanes of several shapes."""
    standby_with("tests.preload_transformers")
    run_ranks(of_rank_with_transformers, size, str(tmp_path), kind)
