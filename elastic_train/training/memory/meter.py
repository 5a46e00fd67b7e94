"""Measure a process's peak memory, and the bytes it holds by category, without waiting for a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.checkpoint import SaveMemory
from elastic_train.insight.memory import PARTS, MemoryFacts
from elastic_train.job.state import AppliedState
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.system.process_identity import resident

HOST = "host"
"""Category of tensors in host memory on a rank with a GPU."""


class Storage(NamedTuple):
    """Memory that tensors share, its category, and the first tensor in it."""

    part: str
    num_bytes: int
    tensor: Tensor


class Meter:
    """Measures one process's memory, from before its model is built until it ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._program = resident().now

    def measure(self, held: Iterable[OfPart] = ()) -> MemoryFacts:
        """Return the peaks so far, and the bytes held by category."""
        parts = dict.fromkeys((*PARTS, HOST), 0)
        for one in storages(held, self.device):
            parts[one.part] += one.num_bytes
        host, peak = parts.pop(HOST), resident().peak
        if self.device.type != "cuda":
            return MemoryFacts(str(self.device), peak, parts, self._program)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        return MemoryFacts(str(self.device), allocated, parts, 0, reserved, host, peak)


def held_by(state: AppliedState, gradients: GradientSum | None, saves: SaveMemory) -> Iterator[OfPart]:
    """Yield the tensors that a rank holds between steps; a tensor may occur more than once."""
    yield from (("weights", weights) for weights in state.model.parameters())
    yield from (("buffers", buffer) for buffer in state.model.buffers())
    yield from state.shards.tensors()
    if gradients is not None:
        yield from gradients.tensors()
    yield from (("staging", memory) for memory in saves.staging.tensors())


def storages(held: Iterable[OfPart], device: torch.device) -> Iterator[Storage]:
    """Yield each storage once, under the first category that has it; storages off the device count as `HOST`."""
    seen = set[int]()
    for part, tensor in held:
        if tensor.is_meta:
            continue
        try:
            memory = tensor.untyped_storage()
            num_bytes, start = memory.nbytes(), memory.data_ptr()
        except (NotImplementedError, RuntimeError):  # a tensor that stands for others, or has no memory
            continue
        if num_bytes and start not in seen:
            seen.add(start)
            yield Storage(part if tensor.device.type == device.type else HOST, num_bytes, tensor)
