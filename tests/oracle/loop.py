"""The loop after docs/arithmetic.md alone: `python -m tests.oracle.loop RUN/config.yaml` prints the weights' SHA-256.

Nothing of the product is imported but the task.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from tests.oracle.grains import clip, digest, tree
from tests.oracle.order import derive, lane_of


def rate_factor(t: int, steps: int, optimizer: dict[str, Any]) -> float:
    warmup = optimizer["warmup_steps"]
    if t < warmup:
        return (t + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * min(1, (t - warmup) / max(1, steps - warmup))))
    return cosine if optimizer["schedule"] == "cosine" else 1.0


def train(config: dict[str, Any], dims: dict[str, int]) -> torch.nn.Module:
    data, batch, settings, seed = (
        Path(config["data"]["train"]),
        config["batch"],
        config["optimizer"],
        config["run"]["seed"],
    )
    manifest = json.loads((data / "manifest.json").read_text())
    table = pa.concat_tables([pq.read_table(data / file["path"]) for file in manifest["files"]])
    group_rows = [rows for file in manifest["files"] for rows in file["row_groups"]]
    micro_batch, num_lanes = batch["micro_batch"], batch["global_batch"] // batch["micro_batch"]
    epoch_steps = math.ceil(math.ceil(len(table) / num_lanes) / micro_batch)
    steps = config["max_steps"] or config["epochs"] * epoch_steps
    torch.set_num_threads(config["threads_per_rank"])
    torch.use_deterministic_algorithms(True)
    module, _, name = config["task"]["path"].partition(":")
    task = getattr(importlib.import_module(module), name)(**config["task"]["params"])
    files = [types.SimpleNamespace(**file) for file in manifest["files"]]
    task.prepare(types.SimpleNamespace(url=str(data), **{**manifest, "files": files}))
    torch.manual_seed(derive(seed, 4) >> 1)
    model = task.build_model().train()
    for name, p in model.named_parameters(remove_duplicate=False):
        p.data = p.data.movedim(dims.get(name, 0), 0).contiguous().movedim(0, dims.get(name, 0))
    decays = {name: p.ndim > 1 and not name.endswith("bias") for name, p in model.named_parameters()}
    groups = [{"params": [p for name, p in model.named_parameters() if decays[name] is kind]} for kind in (True, False)]
    groups[1]["weight_decay"] = 0.0
    adamw = torch.optim.AdamW(groups, weight_decay=settings["weight_decay"], **settings["options"])
    for t in range(steps):
        epoch, at = t // epoch_steps, t % epoch_steps * micro_batch
        gradients, weights = [], []
        for lane in range(num_lanes):
            ids = lane_of(lane, group_rows, num_lanes, config["data"]["block_row_groups"], seed, epoch)
            ids, weight = ids[at : at + micro_batch], 0.0
            model.zero_grad()
            if ids:
                torch.manual_seed(derive(seed, 3, t, lane) >> 1)
                loss = task.loss(model, task.collate(table.select(task.columns()).take(ids), ids))
                loss.total.backward()
                weight = loss.weight
            gradients.append([torch.zeros_like(p) if p.grad is None else 0 + p.grad for p in model.parameters()])
            weights.append(weight)
        divisor = tree(weights, lambda a, b: a + b) or 1.0
        total = tree(gradients, lambda one, other: [a + b for a, b in zip(one, other, strict=True)])
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / divisor
        of = [dims.get(name) for name, _ in model.named_parameters()]
        clip([p.grad for p in model.parameters()], of, settings["clip_norm"] or math.inf)
        for group in adamw.param_groups:
            group["lr"] = settings["lr"] * rate_factor(t, steps, settings)
        adamw.step()
    return model


if __name__ == "__main__":
    path = Path(sys.argv[1])
    dims = json.loads((path.parent / "result.json").read_text()).get("cut_dims", {})
    sys.stdout.write(digest(train(yaml.safe_load(path.read_text()), dims), dims) + "\n")
