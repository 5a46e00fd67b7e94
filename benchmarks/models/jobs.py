"""The jobs to measure: a language model, a classifier and a ResNet, each on rows of one shape.

All rows of a job have the same shape, so that every step is the same amount of work; their content is random.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from torch import Tensor, nn

from benchmarks.jobs import Batch, classes, images, next_tokens, tokens_of, write_config, write_rows

NUM_LANES = 4
VOCABULARY, NUM_TOKENS, PIXELS, NUM_CLASSES = 2048, 128, 64, 10
NUM_ROWS = 4096
Params = Mapping[str, Any]

BERT: Params = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": NUM_TOKENS,
}
RESNET_18: Params = {
    "model_type": "resnet",
    "depths": [2, 2, 2, 2],
    "hidden_sizes": [64, 128, 256, 512],
    "layer_type": "basic",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A task, its parameters, and a plain loop's loss of the same model."""

    task: str
    params: Params
    loss: Callable[[nn.Module, Batch], Tensor]
    micro_batch: int = 8


_SIZES: Params = {"dim": 128, "depth": 4, "heads": 4, "kv_heads": 2, "vocabulary": VOCABULARY}
JOBS: Mapping[str, Job] = {
    "lm": Job("elastic_train.tasks.causal_lm:CausalLM", {"max_tokens": NUM_TOKENS, "model": _SIZES}, next_tokens),
    "classifier": Job(
        "elastic_train.tasks.sequence_classifier:SequenceClassifier",
        {"max_tokens": NUM_TOKENS, "hf": {"config": BERT}, "numeric": [], "categorical": []},
        classes,
    ),
    "resnet": Job(
        "elastic_train.tasks.image_classifier:ImageClassifier",
        {"size": PIXELS, "crop": "shift", "hf": {"config": RESNET_18}},
        images,
    ),
}
"""Models of 1.2, 1.1 and 11 million parameters, with dropout where transformers has it by default."""


def _larger(name: str, key: str, sizes: Params) -> Job:
    return replace(JOBS[name], params={**JOBS[name].params, key: sizes})


LARGE_BERT = {**BERT, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048}
LARGE: Mapping[str, Job] = {
    "lm": _larger("lm", "model", {"dim": 512, "depth": 8, "heads": 8, "vocabulary": 8192}),
    "classifier": _larger("classifier", "hf", {"config": LARGE_BERT}),
    "resnet": JOBS["resnet"],
}
"""Models of 30, 27 and 11 million parameters, large enough to dominate a process's memory."""


def write_job(folder: Path, job: Job, *, num_lanes: int = NUM_LANES, **changes: object) -> str:
    """Write the rows and configuration of a job that commits only at its end; return the configuration's path.

    `changes` are sections or top-level keys that replace those written here.
    """
    rng = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, NUM_CLASSES, NUM_ROWS), pa.int32())}
    if "image_classifier" in job.task:
        columns["image"] = pa.array([_image(rng) for _ in range(64)] * (NUM_ROWS // 64), pa.binary())
    else:
        columns["input_ids"] = tokens_of(NUM_ROWS, NUM_TOKENS, VOCABULARY)
    tree: dict[str, object] = {
        "task": {"path": job.task, "params": dict(job.params)},
        "batch": {"global_batch": num_lanes * job.micro_batch, "micro_batch": job.micro_batch},
        "epochs": 100,
        "device": "cpu",
    }
    rows = write_rows(folder / "rows", columns, group_rows=64, label="label")
    return write_config(folder, rows, {**tree, **changes})


def _image(rng: np.random.Generator) -> bytes:
    content = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)).save(content, "jpeg")
    return content.getvalue()
