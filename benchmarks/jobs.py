"""Jobs to measure: rows of random tokens, configurations, and the same training as a loop in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch._dynamo.config
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.data.dataset.manifest import build_manifest
from elastic_train.tasks.decoder.model import Block

WARMUP_STEPS = 10
Batch = Mapping[str, Tensor]
MEAN, STD = (torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def write_config(folder: Path, data: Path, tree: Mapping[str, object]) -> str:
    """Write a configuration that commits only at its end; `tree` replaces the usual sections. Return its path."""
    usual: dict[str, object] = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "data": {"train": str(data)},
        "optimizer": {"lr": 1e-3, "warmup_steps": WARMUP_STEPS, "schedule": "constant"},
        "validation": {"every": None},
        "checkpoint": {"every": None},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**usual, **tree}))
    return str(path)


def tokens_of(num_rows: int, num_tokens: int, vocabulary: int) -> pa.Array:
    """Return rows of `num_tokens` random tokens, with low ids more frequent."""
    tokens = (vocabulary * np.random.default_rng(0).random(num_rows * num_tokens) ** 3).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(tokens) + 1, num_tokens), pa.int32()), pa.array(tokens))


def write_rows(folder: Path, columns: Mapping[str, pa.Array], *, group_rows: int, label: str | None = None) -> Path:
    """Write a dataset of one file, with its manifest."""
    folder.mkdir(parents=True)
    pq.write_table(pa.table(dict(columns)), folder / "rows.parquet", row_group_size=group_rows)
    build_manifest(str(folder), label_column=label)
    return folder


def next_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of all tokens except the first of each row."""
    tokens = _on(model, batch["tokens"])
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def classes(model: nn.Module, batch: Batch) -> Tensor:
    """Return transformers' loss of a classifier."""
    given = {name: _on(model, batch[name]) for name in ("input_ids", "attention_mask")}
    return model(**given, labels=_on(model, batch["label"])).loss  # type: ignore[no-any-return]


def images(model: nn.Module, batch: Batch) -> Tensor:
    """Return transformers' loss of images."""
    pixels = (_on(model, batch["pixels"]).float() / 255 - MEAN) / STD
    return model(pixel_values=pixels, labels=_on(model, batch["label"])).loss  # type: ignore[no-any-return]


def _on(model: nn.Module, tensor: Tensor) -> Tensor:
    return tensor.to(next(model.parameters()).device, non_blocking=True)


class PlainLoop:
    """A loop that accumulates gradients over micro-batches, clips, and applies AdamW with a warm-up."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: Mapping[str, Any],
        loss: Callable[[nn.Module, Batch], Tensor] = next_tokens,
        *,
        is_bf16: bool = False,
        is_compiled: bool = False,
    ) -> None:
        """`options` are those of the trainer's optimizer."""
        self.model, self._loss, self._clip_norm = model.to(device).train(), loss, options["clip_norm"]
        self._autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16)
        self._device = device
        if is_compiled:  # block by block, as in the trainer
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
            for block in model.modules():
                if isinstance(block, Block):
                    block.compile(dynamic=False)
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        rates = {key: options[key] for key in ("lr", "weight_decay")}
        self._optimizer = torch.optim.AdamW(groups, **rates, **options["options"], fused=device.type == "cuda" or None)
        self._scheduler = LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
        self.losses: list[float] = []

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one step and read the loss, as any loop that logs it does."""
        total = torch.zeros((), device=self._device)
        for batch in batches:
            with self._autocast:
                loss = self._loss(self.model, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        self.losses.append(float(total))
        assert math.isfinite(self.losses[-1]), "the plain loop has to train"
