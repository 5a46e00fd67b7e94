"""Host memory and a device without an accelerator: its three queues run in any order that the events permit.

A seed determines the schedule. A copy may begin at any permitted time; its target then holds NaN until the copy is
made, and its source is read when it is made. Code that reads, writes or computes without waiting for the right event
therefore sees NaN or stale values under some schedule. Memory that is not host memory counts as the device's.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_train.parallel.devices.host_memory import Event, Pairs, Way

_HOST: set[int] = set()
"""The addresses of host memory, for all fakes of the process."""


def is_on_host(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _HOST


@dataclass(eq=False)
class Operation:
    """Copies, or a computation, that a queue runs in order."""

    work: Callable[[], None]
    after: Sequence[Operation]
    outputs: Sequence[Tensor] = ()
    is_begun: bool = False
    is_done: bool = False

    def advance(self) -> None:
        """Begin the operation if it has not begun; otherwise complete it."""
        if not self.is_begun:
            self.is_begun = True
            for output in self.outputs:
                assert _is_there(output), "memory was given back while a copy was on its way"
                output.view(torch.uint8).fill_(255)  # NaN in every float type
        else:
            self.work()
            self.is_done = True


class FakeMemory:
    """One rank's memory, with the schedule of a seed."""

    room_bytes = 96 << 10

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._queues: dict[str, deque[Operation]] = {"in": deque(), "compute": deque(), "out": deque()}
        self.order: list[str] = []
        """The completed operations, by queue."""

    def draw(self, seed: int) -> None:
        """Switch to another schedule."""
        self._random.seed(seed)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = np.zeros(max(1, numel * dtype.itemsize), dtype=np.uint8)
        start = memory.ctypes.data
        _HOST.add(start)
        weakref.finalize(memory, _HOST.discard, start)
        return torch.from_numpy(memory)[: numel * dtype.itemsize].view(dtype)

    def room(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy(self, way: Way, pairs: Pairs, after: Sequence[Event] = ()) -> Event:
        for place, source in pairs:
            assert is_on_host(place) is (way == "out"), f"nothing goes {way} here"
            assert way == "in" or not is_on_host(source), "nothing is copied within the host"

        def work() -> None:
            for place, source in pairs:
                assert _is_there(place) and _is_there(source), "memory was given back while a copy was on its way"
                place.copy_(source)

        return self._ask(way, work, after, [place for place, _ in pairs if place.numel()])

    def compute(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        return self._ask("compute", work, after)

    def join(self) -> None:
        self._finish("compute")

    def settle(self, way: Way = "out") -> None:
        self._finish(way)

    def _ask(
        self, queue: str, work: Callable[[], None], after: Sequence[Event], outputs: Sequence[Tensor] = ()
    ) -> Operation:
        operations = [event for event in after if isinstance(event, Operation)]
        assert len(operations) == len(after), "an event of something else"
        self._queues[queue].append(operation := Operation(work, operations, outputs))
        for _ in range(self._random.choice((0, 0, 1, 2, 6))):
            self._advance()
        return operation

    def _finish(self, queue: str) -> None:
        while self._queues[queue]:
            assert self._advance(), "operations wait for one another"

    def _advance(self) -> bool:
        """Run one operation that the device may run; return False if there is none."""
        ready = [name for name, queue in self._queues.items() if queue and all(one.is_done for one in queue[0].after)]
        if not ready:
            return False
        queue = self._queues[name := self._random.choice(ready)]
        queue[0].advance()
        if queue[0].is_done:
            queue.popleft()
            self.order.append(name)
        return True


class DeviceBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the device memory of tensors created since this object; `peak` is the maximum within the mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others = {ref.cdata: ref for ref in map(_reference, _living())}
        self._known: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __enter__(self) -> DeviceBytes:
        self._note(_living())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
    ) -> Any:
        found = function(*arguments, **(named or {}))
        self._note(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))
        self.peak = max(self.peak, self.now())
        return found

    def now(self) -> int:
        total = 0
        for cdata, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[cdata]
            elif storage.device.type != "meta" and storage.data_ptr() not in _HOST:
                total += storage.nbytes()
        return total

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            reference = _reference(tensor)
            if reference.cdata not in self._others:
                self._known.setdefault(reference.cdata, reference)


def _is_there(tensor: Tensor) -> bool:
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return end <= tensor.untyped_storage().nbytes()


def _living() -> list[Tensor]:
    return [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
