"""The job to measure: a decoder on rows of random tokens, and the same in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch._dynamo.config
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from elastic_train.data.dataset.manifest import build_manifest
from elastic_train.tasks.decoder.model import Block, Decoder
from elastic_train.tasks.decoder.shape import DecoderShape

NUM_LANES, LR = 4, 3e-4
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder, the tokens per row, and the device memory needed to train it with a lane of one row."""

    shape: DecoderShape
    num_tokens: int
    least_bytes: int

    @property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in Decoder(self.shape).parameters())

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token, forward and backward.

        6 per parameter, with the tied embedding counted once, as the output layer; 12 · depth · dim · tokens for
        attention (PaLM, Chowdhery et al. 2022, appendix B).
        """
        return 6.0 * self.num_parameters + 12.0 * self.shape.depth * self.shape.dim * self.num_tokens


SIZES: Mapping[str, Size] = {
    "1b": Size(DecoderShape(vocabulary=32_000, dim=2048, depth=18, heads=16), 4096, 40 * GIB),
    "300m": Size(DecoderShape(vocabulary=32_000, dim=1024, depth=21, heads=16), 4096, 16 * GIB),
    "100m": Size(DecoderShape(vocabulary=32_000, dim=768, depth=11, heads=12), 2048, 0),
    "tiny": Size(DecoderShape(vocabulary=512, dim=64, depth=2, heads=4), 64, 1 << 62),
}
"""The first one that fits is measured; the last one, available only by name, is for trying out the program."""


def size_for(num_bytes: int) -> str:
    """Return the largest size that can be trained with `num_bytes` of device memory."""
    return next(name for name, size in SIZES.items() if num_bytes >= size.least_bytes)


def write_job(folder: Path, size: Size, device: str, *, num_steps: int, **changes: object) -> str:
    """Write rows of one length and a configuration that commits only at the end; return the configuration's path.

    `changes` are sections or top-level keys that replace those written here.
    """
    rows, shape = folder / "rows", size.shape
    rows.mkdir(parents=True)
    num_rows = 64 * NUM_LANES
    tokens = (shape.vocabulary * np.random.default_rng(0).random(num_rows * size.num_tokens) ** 3).astype(np.int32)
    offsets = pa.array(np.arange(0, len(tokens) + 1, size.num_tokens), pa.int32())
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens))})
    pq.write_table(table, rows / "rows.parquet", row_group_size=16)
    build_manifest(str(rows))
    sizes = {name: getattr(shape, name) for name in ("dim", "depth", "heads", "vocabulary")}
    tree: dict[str, object] = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "task": {
            "path": "elastic_train.tasks.causal_lm:CausalLM",
            "params": {"max_tokens": size.num_tokens, "model": sizes},
        },
        "data": {"train": str(rows)},
        "batch": {"global_batch": NUM_LANES, "micro_batch": 1},
        "optimizer": {"lr": LR, "warmup_steps": 10, "schedule": "constant"},
        "epochs": 1000,
        "max_steps": num_steps,
        "validation": {"every": None},
        "checkpoint": {"every": None},
        "precision": "bf16",
        "device": device,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**tree, **changes}))
    return str(path)


class PlainLoop:
    """A loop in plain PyTorch: bf16 autocast, gradient accumulation over micro-batches, clipping, fused AdamW."""

    def __init__(self, model: nn.Module, device: torch.device, *, compile: bool = False) -> None:
        self._model, self._device = model.to(device).train(), device
        if compile:  # block by block, as in the trainer
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
            for block in model.modules():
                if isinstance(block, Block):
                    block.compile(dynamic=False)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=device.type == "cuda")

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Take one step and read the loss, as any loop that logs it does."""
        total = torch.zeros((), device=self._device)
        for batch in batches:
            tokens = batch["tokens"].to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                logits = self._model(tokens)[:, :-1].flatten(0, 1)
                loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten()) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        assert math.isfinite(float(total)), "the plain loop has to train"
