"""Update state in host memory (offload) by streaming it through the device in blocks.

The device computes the same elementwise updates as on state in its own memory, so the bits equal those without offload.
Besides weights and gradients, the device needs memory for only NUM_ROOMS blocks. While one block is updated, the next
is copied in and the previous one out. The first blocks of a step are copied in during its forward and backward passes,
which do not change them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.job.sharded.elementwise import Shape
from elastic_train.job.sharded.held_tree import HeldRun, shaped
from elastic_train.parallel.devices.host_memory import Event, HostMemory
from elastic_train.placement.grains import ALIGN
from elastic_train.placement.grains import Tensor as Place

NUM_ROOMS = 2
"""One buffer is copied in or out while the other is updated."""
_STEP, _WEIGHTS = "step", ""
_UPDATE = "_update_of_whole"
"""Attribute of a replaced step that has the optimizer's own step."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The state that a rank keeps in host memory: the optimizer's moments and, optionally, the weights."""

    memory: HostMemory
    with_weights: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """One of the optimizer's parameters: its group's number, the held run, and, if it must be whole, its tensor.

    `shapes` has the shapes of a whole tensor's moments.
    """

    group: int
    parameter: nn.Parameter
    held: HeldRun
    whole: Place | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def state_in(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return moments in memory as the optimizer has them."""
        return {name: shaped(one, self.whole, self.shapes.get(name)) for name, one in memory.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [lo, hi) of a parameter, with the byte range of each of its tensors in a buffer.

    `tensors` has the host memory of each tensor and its first byte in the buffer, and `end` is the byte after the last.
    """

    of: Updated
    lo: int
    hi: int
    tensors: Mapping[str, tuple[Tensor, int]]
    end: int


class StreamedUpdate:
    """Replaces an optimizer's step, as torch's schedulers do to count steps."""

    def __init__(self, optimizer: Optimizer, offload: Offload) -> None:
        self._optimizer, self._memory, self._offload = optimizer, offload.memory, offload
        self._update = getattr(optimizer.step, _UPDATE, optimizer.step)  # not the step of an earlier instance
        optimizer.step = functools.wraps(self._update)(lambda: self.step())  # type: ignore[method-assign,assignment]
        setattr(optimizer.step, _UPDATE, self._update)
        self._blocks: list[list[_Part]] = []
        self.rooms: list[Tensor] = []
        """Device memory reserved for blocks."""
        self._left: list[Event] = []
        self._arrived: dict[int, Event] = {}

    @property
    def room_bytes(self) -> int:
        """Bytes of device memory reserved for blocks."""
        return sum(room.nbytes for room in self.rooms)

    def take(self, updated: Sequence[Updated]) -> None:
        """Update these parameters from now on, and start to copy the first blocks in."""
        self._memory.settle()
        self._blocks = list(_blocks_of(updated, self._offload))
        size = max([self._memory.room_bytes, *(part.end for block in self._blocks for part in block)])
        if any(room.nbytes < size for room in self.rooms):
            self._memory.settle("in")
            self.rooms = []
        while len(self.rooms) < min(NUM_ROOMS, len(self._blocks)):
            self.rooms.append(self._memory.room(size))  # kept: a copy into it may be pending
        # New rooms may be in memory that was freed, and that earlier computations still read.
        self._left, self._arrived = [self._memory.compute(lambda: None)] * len(self.rooms), {}
        self._bring_first()

    def step(self) -> None:
        """Update everything; host memory has the result after `settle`."""
        before = self._settings()
        for number, block in enumerate(self._blocks):
            self._bring(number)
            if number:
                self._set_back(before)
            room = number % len(self.rooms)
            views = [self._views(part, self.rooms[room]) for part in block]
            updated = self._memory.compute(
                lambda block=block, views=views: self._apply(block, views),  # type: ignore[misc]
                [self._arrived.pop(number)],
            )
            self._left[room] = self._memory.copy("out", [pair for one in views for pair in self._pairs(one)], [updated])
            if number + 1 < len(self._blocks):
                self._bring(number + 1)
        self._memory.join()
        self._bring_first()

    def _settings(self) -> list[dict[str, Any]]:
        """Return the group values that a step may change, to reset them between blocks."""
        return [_settings_of(group) for group in self._optimizer.param_groups]

    def _set_back(self, before: Sequence[dict[str, Any]]) -> None:
        for group, settings in zip(self._optimizer.param_groups, before, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(_settings_of(settings), params=parameters)

    def _bring_first(self) -> None:
        for number in range(min(len(self.rooms), len(self._blocks))):
            self._bring(number)

    def _bring(self, number: int) -> None:
        """Start to copy a block in, unless started, once its buffer is free."""
        if number in self._arrived:
            return
        room = number % len(self.rooms)
        pairs = [pair for part in self._blocks[number] for pair in self._pairs(self._views(part, self.rooms[room]))]
        self._arrived[number] = self._memory.copy("in", [(there, here) for here, there in pairs], [self._left[room]])

    def _views(self, part: _Part, room: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the host and device views of a part's tensors, by name."""
        return {
            name: (here, room[start : start + here.nbytes].view(here.dtype))
            for name, (here, start) in part.tensors.items()
        }

    def _pairs(self, views: dict[str, tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return list(views.values())

    def _apply(self, block: Sequence[_Part], views: Sequence[dict[str, tuple[Tensor, Tensor]]]) -> None:
        """Run the optimizer's own step with these parts as its only parameters."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        kept, state = [group["params"] for group in groups], dict(optimizer.state)
        optimizer.state.clear()
        for group in groups:
            group["params"] = []
        try:
            updated = [self._parameter(part, pairs) for part, pairs in zip(block, views, strict=True)]
            for one, part, pairs in zip(updated, block, views, strict=True):
                groups[part.of.group]["params"].append(one)
                optimizer.state[one] = self._state_of(state.get(part.of.parameter, {}), pairs, part.of)
            self._update()
            counts = [optimizer.state[one].get(_STEP) for one in updated]
        finally:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters
        for part, count in zip(block, counts, strict=True):
            if count is not None and part.hi == part.of.held.weights.numel():
                state[part.of.parameter][_STEP] = count

    def _parameter(self, part: _Part, pairs: dict[str, tuple[Tensor, Tensor]]) -> nn.Parameter:
        weights = pairs[_WEIGHTS][1] if _WEIGHTS in pairs else part.of.held.weights[part.lo : part.hi]
        one = nn.Parameter(shaped(weights, part.of.whole))
        gradient = part.of.parameter.grad
        assert gradient is not None, "gradients are bound to what is held"
        one.grad = gradient if part.of.whole is not None else gradient[part.lo : part.hi]
        return one

    def _state_of(self, state: dict[str, Any], pairs: dict[str, tuple[Tensor, Tensor]], of: Updated) -> dict[str, Any]:
        moments = {name: there for name, (_, there) in pairs.items() if name != _WEIGHTS}
        return {**({_STEP: state[_STEP].clone()} if _STEP in state else {}), **of.state_in(moments)}


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings, without its parameters; tensors are cloned."""
    settings = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}


def _blocks_of(updated: Sequence[Updated], offload: Offload) -> Iterator[list[_Part]]:
    """Split the parameters into blocks whose tensors fit into a buffer.

    A larger parameter that must be whole is its own block.
    """
    block: list[_Part] = []
    end = 0
    for one in updated:
        tensors = {**({_WEIGHTS: one.held.weights} if offload.with_weights else {}), **one.held.moments}
        size = one.held.weights.element_size()
        each = max(1, len(tensors)) * size * ALIGN
        lo, numel, is_cut = 0, one.held.weights.numel(), False
        while not is_cut:  # also for a parameter without elements: it counts its group's updates
            fit = max(0, offload.memory.room_bytes - end) // each * ALIGN
            if one.whole is not None:
                needed = sum(-(-tensor.numel() // ALIGN) for tensor in tensors.values()) * size * ALIGN
                fit = numel if not block or end + needed <= offload.memory.room_bytes else 0
            if fit == 0 and block:
                yield block
                block, end = [], 0
                continue
            assert fit, f"no {each} bytes fit into a room of {offload.memory.room_bytes}"
            hi = min(lo + fit, numel)
            parts = dict[str, tuple[Tensor, int]]()
            for name, tensor in tensors.items():
                parts[name] = (tensor if one.whole is not None else tensor[lo:hi]), end
                end += -(-parts[name][0].numel() // ALIGN) * ALIGN * size
            block.append(_Part(one, lo, hi, parts, end))
            lo, is_cut = hi, hi == numel
    if block:
        yield block
