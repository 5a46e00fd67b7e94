"""Rows of tokens for language models, and small models of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.language import language_model

WITH_TRANSFORMERS = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.xdist_group("transformers"),  # one process imports it
]
VOCABULARY = 40
MODEL = {"vocabulary": VOCABULARY, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 24}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
BERT = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def lists(*rows: list[int]) -> pa.Array:
    return pa.array(rows, pa.list_(pa.int32()))


def described(folder: Path, columns: Mapping[str, pa.Array], **facts: Any) -> Manifest:
    """Write columns as a dataset of row groups of two rows."""
    folder.mkdir(parents=True)
    pq.write_table(pa.table(dict(columns)), folder / "a.parquet", row_group_size=2)
    return build_manifest(str(folder), **facts)


def built(config: dict[str, Any]) -> nn.Module:
    """Return a model of transformers with the same drawn weights in each call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model


def counting_rows(num_rows: int, longest: int = 20, seed: int = 0) -> pa.Array:
    """Return rows that count up from somewhere, by one or two: what a small model learns at once."""
    rng = np.random.default_rng(seed)
    lengths, starts, steps = rng.integers(2, longest + 1, num_rows), rng.integers(0, VOCABULARY, num_rows), [1, 2]
    return lists(
        *((start + rng.choice(steps) * np.arange(n)) % VOCABULARY for n, start in zip(lengths, starts, strict=True))
    )


def prepared(manifest: Manifest, **params: Any) -> CausalLM:
    """Return a task with a small decoder, unless `params` name another model."""
    task = CausalLM(**{**({} if "hf" in params else {"model": MODEL}), "max_tokens": 20, **params})
    task.prepare(manifest)
    return task


@contextlib.contextmanager
def chunks_of(num_rows: int) -> Iterator[None]:
    """Let losses be computed by chunks of so many rows, however few logits there are."""
    with mock.patch.multiple(language_model, FEWEST_ROWS=num_rows, MOST_LOGITS=0):
        yield
