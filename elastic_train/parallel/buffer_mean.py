"""Make buffers that forward passes change (e.g. BatchNorm's statistics) independent of the world.

Every lane starts a step from the same buffers. A float buffer becomes the mean over the lanes with samples, added along
the lanes' tree like gradients. An integer buffer must be equal after all these lanes or, if the task asks for it,
changes by the sum of their increments. Only persistent buffers (in `state_dict`) are state; others are caches and are
ignored.

Nothing is copied or exchanged until a forward pass has changed a buffer. All ranks learn of it with the step's tables,
and repeat the step with the buffers in the sum. Until a world has finished a step with samples, changes are detected
by value, because batch_norm bypasses torch's version counters; after that, by these counters.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group

MakeSum = Callable[[list[Tensor]], GradientSum]


@dataclass(slots=True)
class Slot:
    """A registered buffer; `version` is torch's write count at the last check."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor
    kept: Tensor
    version: int

    @property
    def kind(self) -> Literal["float", "integer", "constant"]:
        """What becomes of its changes; torch has no means of complex numbers and of floats of a byte."""
        if self.tensor.is_complex() or (self.tensor.is_floating_point() and self.tensor.itemsize == 1):
            return "constant"
        return "float" if self.tensor.is_floating_point() else "integer"

    @property
    def now(self) -> Tensor:
        """The buffer that the module has now; another tensor after an assignment."""
        found = self.module._buffers[self.key]
        assert found is not None, f"buffer {self.name} has gone"
        return found

    def has_changed(self, *, by_value: bool) -> bool:
        """Return True if a forward pass has written to it since it was kept."""
        if self.now is not self.tensor or self.tensor._version != self.version:
            return True
        if not by_value or torch.equal(self.tensor, self.kept):
            return False
        return not torch.equal(_bytes_of(self.tensor), _bytes_of(self.kept))  # NaN is not equal to itself

    def reset(self) -> None:
        """Restore the kept values into the registered tensor."""
        self.module._buffers[self.key] = self.tensor
        self.tensor.copy_(self.kept)
        self.version = self.tensor._version

    def keep(self) -> None:
        self.kept.copy_(self.tensor)
        self.version = self.tensor._version


class BufferMean:
    """The persistent buffers of a model over the steps of one world; `replicas` has one rank of every replica.

    A step calls `begin`, then `lane` around every lane's forward pass, in ascending order, then `restore`. If any
    rank's `has_changed` is True and it is not `is_tracking`, all ranks call `track` and repeat the step. `finish`
    returns the new values, to be copied when the step is applied. If a step ends within a pass, `undo` has to follow.
    """

    def __init__(self, model: nn.Module, summed: Sequence[str], replicas: Group, make_sum: MakeSum) -> None:
        self._slots = list(_slots_of(model))
        self._summed, self._replicas, self._make_sum = frozenset(summed), replicas, make_sum
        self._sum: GradientSum | None = None
        self._floats: list[list[Slot]] = []
        self._flats: list[Tensor] = []
        self._integers = [slot for slot in self._slots if slot.kind == "integer"]
        self._constants = [slot for slot in self._slots if slot.kind == "constant"]
        self._increments: Tensor | None = None
        self.has_changed = False
        self._is_first, self._is_running = True, False

    @property
    def is_tracking(self) -> bool:
        return self._sum is not None

    def begin(self) -> None:
        """Start a step: every lane starts from the current buffers."""
        self.has_changed = False
        if self._sum is not None:
            for slot in self._slots:
                slot.keep()
            self._sum.begin()
            assert self._increments is not None
            self._increments.zero_()
        self._is_running = True

    def lane(self, lane: int, *, is_empty: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of one lane's forward pass; it does nothing for a lane without samples."""
        return self._around(lane, is_empty) if self._slots else contextlib.nullcontext()

    @contextlib.contextmanager
    def _around(self, lane: int, is_empty: bool) -> Iterator[None]:
        if self._sum is None:
            yield
            self.has_changed |= any(slot.has_changed(by_value=self._is_first) for slot in self._slots)
            return
        with self._sum.turn(lane):
            if not is_empty:
                self._reset()
            yield
            if not is_empty:
                self._add()

    def restore(self) -> None:
        """Restore the step's initial buffers: lanes have no effect before the step is applied."""
        if self.is_tracking or self.has_changed:
            self._reset()
        self._is_running = False

    def undo(self) -> None:
        """Restore the buffers with which a step, or other passes, began that have not come to their end.

        Does nothing otherwise.
        """
        if self._is_running:
            self._reset()
            self._is_running = False

    def track(self) -> None:
        """Include the buffers in the sum from now on; all ranks start at the same step."""
        kinds: dict[torch.dtype, list[Slot]] = {}
        for slot in self._slots:
            if slot.kind == "float":
                kinds.setdefault(torch.promote_types(slot.tensor.dtype, torch.float32), []).append(slot)
        self._floats = list(kinds.values())
        self._flats = [
            torch.zeros(sum(slot.tensor.numel() for slot in slots), dtype=kind, device=slots[0].tensor.device)
            for kind, slots in kinds.items()
        ]
        count = sum(slot.tensor.numel() for slot in self._integers)
        device = self._slots[0].tensor.device
        self._increments = torch.zeros(count, dtype=torch.int64, device=device)
        self._sum = self._make_sum(self._flats)

    def digest(self) -> int:
        """Return a checksum of the integer buffers that must be equal after every lane; below 2^33, 0 for none.

        It is of the lane whose forward pass has just ended.
        """
        alike = [slot.now for slot in self._integers if slot.name not in self._summed]
        if self._sum is None or not alike:
            return 0
        found = 0
        for tensor in alike:
            found = zlib.crc32(_bytes_of(tensor.cpu()).numpy().data, found)
        return found | 1 << 32

    def finish(self, digests: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return (buffer, new value) for all buffers, equal on every rank; empty if no pass changes them.

        `digests` has those of all the step's lanes with samples, of all ranks. Raises ConfigError, on all ranks, if
        integer buffers differ between lanes.
        """
        self._is_first &= not digests
        if self._sum is None or not digests:
            return []
        if len(set(digests)) > 1:
            names = ", ".join(f"'{slot.name}'" for slot in self._integers if slot.name not in self._summed)
            raise ConfigError(
                f"integer buffers must be equal after the forward pass of every lane of a step; {names} differ. "
                "Name those that count in the task's summed_buffers(), or register them with persistent=False"
            )
        self._sum.finish(float(len(digests)))
        assert self._increments is not None
        self._replicas.all_reduce(self._increments)  # integers: exact in any order
        return [*self._means(), *self._counts(len(digests))]

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Undo the changes that forward passes inside (e.g. a validation) make to the buffers."""
        for slot in self._slots:
            slot.keep()
        self._is_running = True
        try:
            yield
        finally:
            self.undo()

    def _reset(self) -> None:
        for slot in self._slots:
            slot.reset()

    def _add(self) -> None:
        """Add a lane's buffers to the sums; raise ConfigError if one has changed of which there is no mean."""
        for slot in self._constants:
            if slot.has_changed(by_value=True):
                what = f"buffer '{slot.name}' is {slot.tensor.dtype} and changes in the forward pass"
                raise ConfigError(f"{what}: keep {'its real view' if slot.tensor.is_complex() else 'it in float32'}")
        for flat, slots in zip(self._flats, self._floats, strict=True):
            for part, slot in zip(_split(flat, slots), slots, strict=True):
                part.add_(_fitting(slot))
        assert self._increments is not None
        for part, slot in zip(_split(self._increments, self._integers), self._integers, strict=True):
            part.add_(_fitting(slot).to(torch.int64) - slot.kept.to(torch.int64))

    def _means(self) -> Iterator[tuple[Tensor, Tensor]]:
        for flat, slots in zip(self._flats, self._floats, strict=True):
            yield from ((slot.tensor, part) for part, slot in zip(_split(flat, slots), slots, strict=True))

    def _counts(self, num_lanes: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert self._increments is not None
        for part, slot in zip(_split(self._increments, self._integers), self._integers, strict=True):
            step = part if slot.name in self._summed else part // num_lanes  # equal in every lane: exact
            yield slot.tensor, slot.kept.to(torch.int64) + step


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _slots_of(model: nn.Module) -> Iterator[Slot]:
    """Yield the persistent buffers of a model, each tensor once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            yield Slot(name, module, key, tensor, tensor.detach().clone(), tensor._version)


def _split(flat: Tensor, slots: Sequence[Slot]) -> Iterator[Tensor]:
    """Yield the views of a flat tensor with each slot's values, in its shape."""
    parts = torch.split(flat, [slot.tensor.numel() for slot in slots])
    yield from (part.view_as(slot.tensor) for part, slot in zip(parts, slots, strict=True))


def _fitting(slot: Slot) -> Tensor:
    """Return a buffer after a lane; raise ConfigError if the forward pass has changed its shape or dtype."""
    now = slot.now.detach()
    if now.shape != slot.tensor.shape or now.dtype != slot.tensor.dtype:
        raise ConfigError(
            f"the forward pass turned buffer '{slot.name}' from {tuple(slot.tensor.shape)} {slot.tensor.dtype} into "
            f"{tuple(now.shape)} {now.dtype}: a cache is registered with persistent=False"
        )
    return now
