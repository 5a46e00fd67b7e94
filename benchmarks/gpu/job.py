"""The job to measure: a decoder on rows of random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.jobs import WARMUP_STEPS, tokens_of, write_config, write_rows
from elastic_train.tasks.decoder.model import Decoder, DecoderShape

NUM_LANES = 4
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
    def commits_bytes(self) -> int:
        """Bytes of three commits."""
        return 3 * 12 * self.num_parameters

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
    shape, num_rows = size.shape, 64 * NUM_LANES
    tokens = tokens_of(num_rows, size.num_tokens, shape.vocabulary)
    rows = write_rows(folder / "rows", {"input_ids": tokens}, group_rows=16)
    sizes = {name: getattr(shape, name) for name in ("dim", "depth", "heads", "vocabulary")}
    tree: dict[str, object] = {
        "task": {
            "path": "elastic_train.tasks.causal_lm:CausalLM",
            "params": {"max_tokens": size.num_tokens, "model": sizes},
        },
        "batch": {"global_batch": NUM_LANES, "micro_batch": 1},
        "optimizer": {"lr": 3e-4, "warmup_steps": WARMUP_STEPS, "schedule": "constant"},
        "epochs": 1000,
        "max_steps": num_steps,
        "precision": "bf16",
        "device": device,
    }
    return write_config(folder, rows, {**tree, **changes})
