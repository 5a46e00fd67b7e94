"""Measure a process's peak memory, and the bytes it holds by category, without waiting for a device; report them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.checkpoint import SaveMemory
from elastic_train.insight.memory import PARTS, MemoryFacts
from elastic_train.insight.page import Facts
from elastic_train.job.state import AppliedState
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.system.process_identity import resident
from elastic_train.system.wording import first_line
from elastic_train.tracking.history import History

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


log = logging.getLogger(__name__)


class MemoryWatch:
    """Measures a rank's memory in one world, every `every_steps` steps; `held` yields its tensors."""

    def __init__(
        self,
        meter: Meter,
        held: Callable[[], Iterable[OfPart]],
        history: History,
        every_steps: int,
        page: Facts | None = None,
    ) -> None:
        self.held, self.meter = held, meter
        self._history, self._every_steps, self._page = history, every_steps, page
        self._num_steps = 0
        self._unsaid: int | None = None
        self._has_failed = False

    def step(self, step: int) -> None:
        self._unsaid = step
        if self._num_steps % self._every_steps == 0:
            self.say()
        self._num_steps += 1

    def say(self) -> None:
        """Report the memory if steps were applied since the last report."""
        step, self._unsaid = self._unsaid, None
        if step is None or self._has_failed:
            return
        try:
            facts = self.look()
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            self._has_failed = True
            log.warning("this rank's memory is not looked at in this world any longer: %s", first_line(error))
            return
        self._history.memory(step=step, facts=facts.as_fields())
        if self._page is not None:
            self._page.memory = facts

    def look(self) -> MemoryFacts:
        return self.meter.measure(self.held())
