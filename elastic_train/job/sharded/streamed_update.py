"""An update of what is held in host memory: it goes through the device in blocks, and the device updates it.

The device computes what it would with all of it in its own memory, part by part, and no cut shows in an update by
elements: so the bits are those without offload. Beside weights and gradients the device has room for NUM_ROOMS blocks,
whatever is held. While one block is updated the next one comes in, and the last one goes out; the first ones of a step
come in beside the forward and backward passes before it, since nothing changes them there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.job.sharded.held_tree import HeldRun, shaped
from elastic_train.parallel.devices.host_memory import Event, HostMemory
from elastic_train.placement.grains import ALIGN
from elastic_train.placement.grains import Tensor as Place

NUM_ROOMS = 2
"""One block comes in or goes out while the other is updated, and does the opposite after that."""
_STEP, _WEIGHTS = "step", ""
_UPDATE = "_update_of_whole"
"""The attribute of a step that takes its place in which the optimizer's own is."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What a rank keeps in host memory: what its optimizer keeps of each element, and the weights that it holds."""

    memory: HostMemory
    with_weights: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """One of the optimizer's parameters: its group's number, what is held of it, and where its weights are updated.

    Where the optimizer needs whole parameters, it is the tensor `whole`.
    """

    group: int
    parameter: nn.Parameter
    held: HeldRun
    whole: Place | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [lo, hi) of a parameter; `starts` are the bytes of a room that each of its tensors begins with, and
    `end` that before which the last one ends."""

    of: Updated
    lo: int
    hi: int
    starts: dict[str, int]
    end: int


class StreamedUpdate:
    """Takes the place of an optimizer's step, as torch's schedulers do to count them."""

    def __init__(self, optimizer: Optimizer, offload: Offload) -> None:
        self._optimizer, self._memory, self._offload = optimizer, offload.memory, offload
        self._update = getattr(optimizer.step, _UPDATE, optimizer.step)  # not that of a part which it had before
        optimizer.step = functools.wraps(self._update)(lambda: self.step())  # type: ignore[method-assign,assignment]
        setattr(optimizer.step, _UPDATE, self._update)
        self._blocks: list[list[_Part]] = []
        self.rooms: list[Tensor] = []
        """The device's memory that is kept for blocks."""
        self._left: list[Event | None] = []
        self._arrived: dict[int, Event] = {}

    @property
    def room_bytes(self) -> int:
        """The device's memory that is kept for blocks."""
        return sum(room.nbytes for room in self.rooms)

    def take(self, updated: Sequence[Updated]) -> None:
        """Update these from now on, and begin to bring the first of them in."""
        self._memory.settle()
        self._blocks = list(_blocks_of(updated, self._offload))
        size = max([self._memory.room_bytes, *(part.end for block in self._blocks for part in block)])
        if any(room.nbytes < size for room in self.rooms):
            self._memory.settle("in")
            self.rooms = []
        while len(self.rooms) < min(NUM_ROOMS, len(self._blocks)):
            self.rooms.append(self._memory.room(size))  # kept: something may still come into it
        self._left, self._arrived = [None] * len(self.rooms), {}
        self._bring_first()

    def step(self) -> None:
        """Update everything; the device has, and the host's memory has after `settle`, what it comes to."""
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
        """Return what the optimizer may change of its groups in a step, of which each block's update is one."""
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
        """Ask for a block, if it was not: it comes in when the one that was in its room has gone."""
        if number in self._arrived:
            return
        room = number % len(self.rooms)
        pairs = [pair for part in self._blocks[number] for pair in self._pairs(self._views(part, self.rooms[room]))]
        left = self._left[room]
        self._arrived[number] = self._memory.copy(
            "in", [(there, here) for here, there in pairs], [] if left is None else [left]
        )

    def _views(self, part: _Part, room: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return pairs of a part's tensors in host memory and on the device, by name."""
        found = {}
        for name, start in part.starts.items():
            held = part.of.held.weights if name == _WEIGHTS else part.of.held.moments[name]
            here = held[part.lo : part.hi]
            found[name] = here, room[start : start + here.nbytes].view(here.dtype)
        return found

    def _pairs(self, views: dict[str, tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return list(views.values())

    def _apply(self, block: Sequence[_Part], views: Sequence[dict[str, tuple[Tensor, Tensor]]]) -> None:
        """Let the optimizer update parts as if they were all that it has; an optimizer within it may have its state."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        kept, state = [group["params"] for group in groups], dict(optimizer.state)
        optimizer.state.clear()
        for group in groups:
            group["params"] = []
        try:
            updated = [self._parameter(part, pairs) for part, pairs in zip(block, views, strict=True)]
            for one, part, pairs in zip(updated, block, views, strict=True):
                groups[part.of.group]["params"].append(one)
                optimizer.state[one] = self._state_of(state.get(part.of.parameter, {}), pairs, part.of.whole)
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

    def _state_of(
        self, state: dict[str, Any], pairs: dict[str, tuple[Tensor, Tensor]], whole: Place | None
    ) -> dict[str, Any]:
        moments = {name: shaped(there, whole) for name, (_, there) in pairs.items() if name != _WEIGHTS}
        return {**({_STEP: state[_STEP].clone()} if _STEP in state else {}), **moments}


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, without its parameters; its tensors may be changed in place."""
    settings = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}


def _blocks_of(updated: Sequence[Updated], offload: Offload) -> Iterator[list[_Part]]:
    """Cut what is updated into blocks whose tensors in host memory fit into a room; one that has to be whole and is
    larger than that is a block of its own."""
    block: list[_Part] = []
    end = 0
    for one in updated:
        names = [*([_WEIGHTS] if offload.with_weights else []), *one.held.moments]
        size = one.held.weights.element_size()
        each = max(1, len(names)) * size * ALIGN
        lo, numel, is_cut = 0, one.held.weights.numel(), False
        while not is_cut:  # a parameter without elements is a part, too: it counts its group's updates
            fit = (offload.memory.room_bytes - end) // each * ALIGN
            if one.whole is not None and fit < numel:
                fit = 0 if block else numel
            if fit == 0 and block:
                yield block
                block, end = [], 0
                continue
            assert fit, f"no {each} bytes fit into a room of {offload.memory.room_bytes}"
            hi = min(lo + fit, numel)
            span = -(-(hi - lo) // ALIGN) * ALIGN * size
            starts = {name: end + place * span for place, name in enumerate(names)}
            end += len(names) * span
            block.append(_Part(one, lo, hi, starts, end))
            lo, is_cut = hi, hi == numel
    if block:
        yield block
