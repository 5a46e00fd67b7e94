"""The weights of a transformers folder: one safetensors file, or several with an index, as transformers writes them.

Tensors are written as they are read, so memory holds one tensor, or a few small ones, whatever a file's size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from elastic_train.checkpoint.commits.weights import CommitWeights
from elastic_train.checkpoint.format.safetensors_file import write_safetensors
from elastic_train.checkpoint.format.stored_tensors import Kind
from elastic_train.system.progress_bar import Track, silent

MOST_BYTES = 5 * 10**9
"""Largest total size of a file's tensors, as in Hugging Face's own tools."""
_FILE, _INDEX = "model{}.safetensors", "model.safetensors.index.json"


def write_weights(folder: Path, weights: CommitWeights, most_bytes: int, track: Track = silent) -> None:
    """Write weights under their names into a folder that has no weights."""
    kinds = weights.kinds
    shards = split(kinds, most_bytes)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = _FILE.format("" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}")
        files |= dict.fromkeys(names, file)
        with (folder / file).open("wb") as opened:
            read = weights.tracked(track, f"writing {file}")
            write_safetensors(opened, {name: kinds[name] for name in names}, read, {"format": "pt"})
    if len(shards) > 1:
        sizes = {
            "total_parameters": sum(kind.shape.numel() for kind in kinds.values()),
            "total_size": sum(kind.num_bytes for kind in kinds.values()),
        }
        index = json.dumps({"metadata": sizes, "weight_map": files}, indent=2, sort_keys=True)
        (folder / _INDEX).write_text(index + "\n")


def split(kinds: Mapping[str, Kind], most_bytes: int) -> list[list[str]]:
    """Assign tensors to files in order, each as full as possible; a tensor larger than a file gets its own."""
    shards, shard, num_bytes = list[list[str]](), list[str](), 0
    for name, kind in kinds.items():
        if kind.num_bytes > most_bytes:
            shards.append([name])
            continue
        if num_bytes + kind.num_bytes > most_bytes:
            shards.append(shard)
            shard, num_bytes = [], 0
        shard.append(name)
        num_bytes += kind.num_bytes
    return [*shards, shard] if shard else shards
