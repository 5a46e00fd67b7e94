"""A decoder of half a billion parameters: ten steps on four processes of this machine, resumed on three.

Its weights and its tokens are random. It is a job like any other, started by torchrun.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from benchmarks.figures import Effort
from elastic_train.data.corpora.synthetic import synthesise
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.tasks.task import Batch, LaneLoss
from rendezvous.process_table import children_of

if TYPE_CHECKING:
    from torchmetrics import Metric

RANKS, STEPS, RESUMED_RANKS, MORE_STEPS = 4, 10, 3, 2
VOCABULARY, DIM, DEPTH, HEADS, TOKENS = 8192, 1024, 39, 16, 16
LOOK_EVERY_S, TIMEOUT_S = 0.1, 1800.0


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and inside a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, tokens, dim) to the same shape."""
        query, key, value = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Predicts each next token; the head shares the embedding's weights."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, dim), nn.Embedding(TOKENS, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, tokens, vocabulary)."""
        x = self.embed(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T / math.sqrt(self.embed.embedding_dim)  # type: ignore[no-any-return]


class NextToken:
    """The task: random tokens for each sample, seeded by its id."""

    def __init__(self, dim: int = DIM, depth: int = DEPTH) -> None:
        self._dim, self._depth, self._column = dim, depth, ""

    def prepare(self, manifest: Manifest) -> None:
        self._column = next(iter(manifest.columns))

    def columns(self) -> Sequence[str]:
        return [self._column]

    def build_model(self) -> nn.Module:
        return Decoder(self._dim, self._depth)

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        drawn = [np.random.default_rng(int(id_)).integers(VOCABULARY, size=TOKENS + 1) for id_ in ids]
        return {"tokens": torch.from_numpy(np.stack(drawn))}

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return LaneLoss(total, float(tokens[:, 1:].numel()))

    def metrics(self) -> Mapping[str, Metric]:
        return {}


def half_billion(effort: Effort) -> dict[str, object]:
    """Return the peak memory of all the job's processes together, with shared pages counted once, and the outcome.

    `training` is the peak until the last step; the commit after it needs a second copy of each rank's share.
    """
    dim, depth = (DIM, DEPTH) if not effort.is_quick else (DIM, 4)
    num_parameters = sum(parameter.numel() for parameter in _meta(dim, depth).parameters())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _write(folder, dim, depth)
        first = _train(folder, config, RANKS, STEPS, effort.say)
        second = _train(folder, config, RESUMED_RANKS, STEPS + MORE_STEPS, effort.say)
        result = json.loads((folder / "run" / "result.json").read_text())
    peaks = {
        f"w{num_ranks}{phase}": round(num_bytes / 2**30, 2)
        for num_ranks, found in ((RANKS, first), (RESUMED_RANKS, second))
        for phase, num_bytes in zip(("_training", ""), found, strict=True)
    }
    facts = {"parameters": num_parameters, "steps": result["step"], "samples": result["coverage"]["count"]}
    return {"decoder_gib": {**peaks, **facts}}


def _meta(dim: int, depth: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(dim, depth)


def _write(folder: Path, dim: int, depth: int) -> Path:
    synthesise(str(folder / "data"), 200, "quality", seed=1)
    tree = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "task": {"path": "benchmarks.sharding.decoder:NextToken", "params": {"dim": dim, "depth": depth}},
        "data": {"train": str(folder / "data"), "too_long": "truncate"},
        "batch": {"global_batch": RANKS, "micro_batch": 1},
        "parallel": {"shards": "parameters", "copies": 1},
        "validation": {"every": None},
        "checkpoint": {"every": None},
        "tracking": {"mlflow_uri": None},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder / "config.yaml"


def _train(folder: Path, config: Path, num_ranks: int, steps: int, say: Callable[[str], None]) -> tuple[int, int]:
    """Train up to a step on `num_ranks` processes; return their joint peak bytes until that step and overall."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "elastic_train", str(config), "--max_steps", str(steps)]
    started, seen, log = time.monotonic(), list[tuple[float, int]](), folder / "log"
    with log.open("wb") as said:
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while job.poll() is None:
            seen.append((time.time(), _memory_of(job.pid)))
            if time.monotonic() - started > TIMEOUT_S:
                raise TimeoutError(f"step {steps} did not come in {TIMEOUT_S:.0f} s:\n{log.read_text()}")
            time.sleep(LOOK_EVERY_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    if job.returncode:
        raise RuntimeError(f"{num_ranks} ranks ended with {job.returncode}:\n{log.read_text()}")
    lines = [json.loads(line) for path in (folder / "run" / "history").iterdir() for line in path.open()]
    last = max(line["t"] for line in lines if line["op"] == "step")
    training, ever = max(size for at, size in seen if at <= last), max(size for _, size in seen)
    took_s = time.monotonic() - started
    say(
        f"{num_ranks} ranks to step {steps}: {took_s:.0f} s, {training / 2**30:.2f} GiB, {ever / 2**30:.2f} with commit"
    )
    return training, ever


def _memory_of(pid: int) -> int:
    """Return the bytes of a process and its descendants, with shared pages divided among their users (PSS)."""
    total, left = 0, [pid]
    while left:
        one = left.pop()
        left += children_of(one)
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        total += next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
    return total
