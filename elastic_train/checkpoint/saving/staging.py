"""Staging: copy a rank's part of the applied state to host memory, so that training continues while it is written.

A state that does not change until the save ends needs no copy: see `Snapshot.in_place`.

The memory is reused from save to save, as fresh memory costs several times the copy. There is one buffer, even while
the writer of an abandoned save is stuck in a store: whatever that reads cannot be published.

Copied parts may be written while the rest is being copied: `Staged` hands them out as they come. While training waits
for the copy, nothing more is handed out, so that the copy gets the machine.

Only state that nothing but an optimizer step changes is copied during the next forward and backward pass. The rest
(buffers that a forward pass may change) is cloned at the step boundary.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import Leaves, Part, bytes_of
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.errors import StorageError
from elastic_train.parallel.devices.host_memory import pinned
from elastic_train.system.huge_pages import on_huge_pages
from rendezvous.waiting import start_thread

_ALIGNMENT = 64
_RUN_BYTES = 8 << 20


class Buffer:
    """Host memory for one part's tensors, with typed views of it."""

    def __init__(self, num_bytes: int, device: torch.device | None) -> None:
        try:
            self._memory = _paged(num_bytes) if device is None else pinned(num_bytes, device)
        except (RuntimeError, MemoryError) as error:
            why = str(error).splitlines()[0]
            raise StorageError(f"cannot allocate {num_bytes} bytes of host memory to stage a save: {why}") from error
        self._part: Part | None = None
        self._views: list[Tensor] = []
        self._contents: list[memoryview] = []

    @property
    def memory(self) -> Tensor:
        return self._memory

    def fits(self, num_bytes: int, device: torch.device | None) -> bool:
        return self._memory.numel() >= num_bytes and self._memory.is_pinned() == (device is not None)

    def views_of(self, part: Part) -> list[Tensor]:
        """Return the destinations of a part's tensors, typed and shaped."""
        if part is not self._part:
            self._part, self._views, end = part, [], 0
            for slot in part.slots:
                place = self._memory[end : end + slot.frame.size]
                self._views.append(place.view(slot.dtype).view(slot.shape))
                end += _aligned(slot.frame.size)
            self._contents = [bytes_of(view) for view in self._views]
        return self._views

    def contents_of(self, part: Part) -> list[memoryview]:
        """Return the bytes of every tensor of a part."""
        self.views_of(part)
        return self._contents


class Staging:
    """A process's staging memory, across all its worlds; thread-safe."""

    def __init__(self) -> None:
        self._buffer: Buffer | None = None
        self._lock = threading.Lock()

    def buffer(self, num_bytes: int, device: torch.device | None) -> Buffer:
        """Return the buffer, replaced if too small; the last save must have ended, or be unable to publish.

        It is pinned if a device copies to it. Raise StorageError if host memory is short.
        """
        with self._lock:
            if self._buffer is None or not self._buffer.fits(num_bytes, device):
                self._buffer = None  # freed before the new one is allocated
                self._buffer = Buffer(num_bytes, device)
            return self._buffer

    def tensors(self) -> Iterator[Tensor]:
        """Yield the retained memory, if there is any, without waiting."""
        if (buffer := self._buffer) is not None:
            yield buffer.memory

    def prepare(self, num_bytes: int, device: torch.device) -> None:
        """Allocate pinned memory in the background, so that no save waits; errors surface in the save that needs it."""

        def make() -> None:
            with contextlib.suppress(StorageError):
                self.buffer(num_bytes, device)

        with contextlib.suppress(OSError):  # without a thread, the save itself makes it
            start_thread("staging memory", make)


class Staged:
    """The bytes of a part's tensors, in order, while they are being copied: an iteration waits for each.

    Once training waits (`is_awaited`), nothing more is handed out before everything is copied.
    """

    def __init__(self, contents: Sequence[memoryview], is_awaited: Callable[[], bool]) -> None:
        self._contents, self._is_awaited = contents, is_awaited
        self._num_there = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[memoryview]:
        """Yield each tensor's bytes once copied; raise the error given to `fail`."""
        for place, content in enumerate(self._contents):
            self._wait_for(place + 1)
            yield content

    def advance(self, num_there: int) -> None:
        """Record that the first `num_there` tensors have been copied."""
        with self._changed:
            self._num_there = num_there
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for all; raise the error given to `fail`."""
        self._wait_for(len(self._contents))

    def _wait_for(self, num_wanted: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._num_there >= self._least(num_wanted))
            if self._error is not None:
                raise self._error

    def _least(self, num_wanted: int) -> int:
        return len(self._contents) if self._is_awaited() else num_wanted


class Snapshot:
    """A part's tensors at a step boundary; created there, and copied by `copy` before the next update."""

    def __init__(self, part: Part, leaves: Leaves, is_still: Callable[[StatePath], bool]) -> None:
        self.part = part
        self._tensors = [_at_boundary(slot.memory(leaves), is_still(slot.path)) for slot in part.slots]
        self._versions = [tensor._version for tensor in self._tensors]
        self.device = next((tensor.device for tensor in self._tensors if tensor.is_cuda), None)
        self._event = torch.cuda.Event() if self.device is not None else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self.device))
        self.num_bytes = staged_bytes(part)

    @property
    def is_on_device(self) -> bool:
        return self.device is not None

    def copy(self, buffer: Buffer, check: Callable[[], None], advance: Callable[[int], None]) -> None:
        """Copy and release the tensors; `advance` gets the number copied, `check` may raise.

        Raise StorageError if a tensor has changed since the boundary.
        """
        views = buffer.views_of(self.part)
        with self._asking() as asked:
            for lo, hi, await_run in asked(views):
                check()
                await_run()
                self._check_unchanged(lo, hi)
                advance(hi)
        self._tensors = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[list[memoryview]]:
        """Yield the bytes of host tensors without a copy; raise StorageError at the end if one has changed."""
        assert not self.is_on_device, "files are written from host memory"
        yield [bytes_of(tensor.contiguous()) for tensor in self._tensors]
        self._check_unchanged(0, len(self._tensors))
        self._tensors = []

    def _check_unchanged(self, lo: int, hi: int) -> None:
        for place in range(lo, hi):
            if self._tensors[place]._version != self._versions[place]:
                name = self.part.slots[place].index.fqn
                raise StorageError(f"state '{name}' changed while it was read; only an update may change it")

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Group the slots into half-open runs [lo, hi) of some megabytes."""
        lo = num_bytes = 0
        for place, slot in enumerate(self.part.slots):
            num_bytes += slot.frame.size
            if num_bytes >= _RUN_BYTES:
                yield lo, place + 1
                lo, num_bytes = place + 1, 0
        if lo < len(self.part.slots):
            yield lo, len(self.part.slots)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Callable[[Sequence[Tensor]], Iterable[tuple[int, int, Callable[[], object]]]]]:
        """Yield a function that copies to views run by run, with a wait for each; a device gets all copies at once.

        The device then copies at full rate, whatever else this process does, on a separate stream, after everything
        launched before the boundary; on exit no copy is in progress.
        """
        if self._event is None:
            yield lambda views: ((lo, hi, partial(self._copy_run, views, lo, hi)) for lo, hi in self._runs())
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._event)

        def ask(views: Sequence[Tensor]) -> list[tuple[int, int, Callable[[], object]]]:
            asked: list[tuple[int, int, Callable[[], object]]] = []
            with torch.cuda.stream(stream):
                for lo, hi in self._runs():
                    self._copy_run(views, lo, hi)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(stream)
                    asked.append((lo, hi, event.synchronize))
            return asked

        try:
            yield ask
        finally:
            stream.synchronize()

    def _copy_run(self, views: Sequence[Tensor], lo: int, hi: int) -> None:
        torch._foreach_copy_(list(views[lo:hi]), self._tensors[lo:hi], non_blocking=True)


def staged_bytes(part: Part) -> int:
    return sum(_aligned(slot.frame.size) for slot in part.slots)


def _paged(num_bytes: int) -> Tensor:
    return on_huge_pages(torch.empty(num_bytes, dtype=torch.uint8))


def _at_boundary(tensor: Tensor, is_still: bool) -> Tensor:
    return tensor.detach() if is_still else tensor.detach().clone()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
