"""Deferred initialization: make the initial weights one by one, and keep only this rank's shards.

Until then, the model's parameters are on their device without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.job.sharded.held_tree import HeldRun
from elastic_train.placement.grains import Layout
from elastic_train.placement.norm import in_memory_order


def without_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model's parameters to a device without allocating memory; buffers are moved with their contents."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                if id(old) not in known:
                    memory = torch.empty(old.shape, dtype=old.dtype, device=device)
                    memory.untyped_storage().resize_(0)
                    known[id(old)] = nn.Parameter(memory, requires_grad=old.requires_grad)
                module._parameters[name] = known[id(old)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def fill(layout: Layout, runs: Sequence[HeldRun], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Fill held runs with their part of the weights, which come by their parameters' first names, one by one.

    Raises ConfigError if some are missing.
    """
    missing = {place.names[0]: place for place in layout.tensors}
    for name, tensor in weights:
        place = missing.pop(name)
        end = place.start + place.numel
        for one in runs:
            lo, hi = max(one.run.lo, place.start), min(one.run.hi, end)
            if one.run.flat == place.flat and lo < hi:
                part = in_memory_order(tensor, place.cut)[lo - place.start : hi - place.start]
                one.weights[lo - one.run.lo : hi - one.run.lo].copy_(part)
    if missing:
        raise ConfigError(f"task.path: initial_weights gives no '{next(iter(missing))}', which sketch_model has")
