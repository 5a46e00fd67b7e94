"""The jobs to measure: a language model, a classifier, a ResNet, and adapters, each on rows of one shape.

All rows of a job have the same shape, so that every step is the same amount of work; their content is random.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from elastic_train.data.dataset.manifest import build_manifest

NUM_LANES = 4
VOCABULARY, NUM_TOKENS, PIXELS, NUM_CLASSES = 2048, 128, 64, 10
NUM_ROWS, ROWS_PER_GROUP = 4096, 64
Params = Mapping[str, Any]

LLAMA: Params = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": NUM_TOKENS,
}
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
    """A task, its parameters, and the samples per micro-batch."""

    task: str
    params: Params
    micro_batch: int


JOBS: Mapping[str, Job] = {
    "lm": Job(
        "elastic_train.tasks.causal_lm:CausalLM",
        {
            "max_tokens": NUM_TOKENS,
            "model": {"dim": 128, "depth": 4, "heads": 4, "kv_heads": 2, "vocabulary": VOCABULARY},
        },
        8,
    ),
    "classifier": Job(
        "elastic_train.tasks.sequence_classifier:SequenceClassifier",
        {"max_tokens": NUM_TOKENS, "hf": {"config": BERT}, "numeric": [], "categorical": []},
        8,
    ),
    "resnet": Job(
        "elastic_train.tasks.image_classifier:ImageClassifier",
        {"size": PIXELS, "crop": "shift", "hf": {"config": RESNET_18}},
        8,
    ),
}
"""Models of 1.2, 1.1 and 11 million parameters, with dropout where transformers has it by default."""

LARGE: Mapping[str, Job] = {
    "lm": Job(
        JOBS["lm"].task, {**JOBS["lm"].params, "model": {"dim": 512, "depth": 8, "heads": 8, "vocabulary": 8192}}, 8
    ),
    "classifier": Job(
        JOBS["classifier"].task,
        {
            **JOBS["classifier"].params,
            "hf": {"config": {**BERT, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048}},
        },
        8,
    ),
    "resnet": JOBS["resnet"],
}
"""Models of 30, 27 and 11 million parameters, large enough to dominate a process's memory."""


def adapters(base: Path) -> Job:
    """Return a job that trains adapters on a transformers folder."""
    params = {"max_tokens": NUM_TOKENS, "hf": {"path": str(base)}, "lora": {"r": 8, "lora_dropout": 0.1}}
    return Job(JOBS["lm"].task, params, 8)


def write_job(folder: Path, job: Job, *, num_lanes: int = NUM_LANES, **changes: object) -> str:
    """Write the rows and configuration of a job that commits only at its end; return the configuration's path.

    `changes` are sections or top-level keys that replace those written here.
    """
    write_rows(folder / "rows", has_images="image_classifier" in job.task)
    tree: dict[str, object] = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "task": {"path": job.task, "params": dict(job.params)},
        "data": {"train": str(folder / "rows")},
        "batch": {"global_batch": num_lanes * job.micro_batch, "micro_batch": job.micro_batch},
        "optimizer": {"lr": 1e-3, "warmup_steps": 10, "schedule": "constant"},
        "epochs": 100,
        "validation": {"every": None},
        "checkpoint": {"every": None},
        "device": "cpu",
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**tree, **changes}))
    return str(path)


def write_rows(folder: Path, *, has_images: bool) -> None:
    """Write rows of a label and NUM_TOKENS tokens, low ids more frequent, or an image."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, NUM_CLASSES, NUM_ROWS), pa.int32())}
    if has_images:
        columns["image"] = pa.array([_image(rng) for _ in range(64)] * (NUM_ROWS // 64), pa.binary())
    else:
        tokens = (VOCABULARY * rng.random(NUM_ROWS * NUM_TOKENS) ** 3).astype(np.int32)
        offsets = pa.array(np.arange(0, len(tokens) + 1, NUM_TOKENS), pa.int32())
        columns["input_ids"] = pa.ListArray.from_arrays(offsets, pa.array(tokens))
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=ROWS_PER_GROUP)
    build_manifest(str(folder), label_column="label")


def _image(rng: np.random.Generator) -> bytes:
    content = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)).save(content, "jpeg")
    return content.getvalue()
