"""A fake device without an accelerator: its operations run on a separate thread, when the test permits, over gloo.

An operation's output holds NaN from the request until it is done, so that reading or updating it too early is detected.
As with NCCL kernels, an operation whose peer is gone or frozen does not end until it is aborted, and then its output
stays NaN. It starts after the work of its request's queue, and ends before later work of a queue that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.parallel.devices.device import Device, HostQueue, Mark

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""The types treated as device memory: weights and gradients; tables and messages have other types."""


class FakeWork:
    """An operation of the device."""

    def __init__(self, device: FakeDevice, run: Callable[[], None], outputs: Sequence[Tensor]) -> None:
        self._device, self._run, self._outputs = device, run, outputs
        self.may_start, self.is_over = device.queue().mark(), False
        self._inside = [output.clone() for output in outputs]
        for output in outputs:
            output.fill_(torch.nan)
        self._error: BaseException | None = None
        self._is_done = False

    def run(self, is_aborted: threading.Event) -> None:
        """Run the operation on the queue's thread; return once it is done or aborted."""
        thread = threading.Thread(target=self._try, args=(is_aborted,), daemon=True)
        thread.start()
        while not self._is_done and not is_aborted.is_set():
            thread.join(0.001)
            if self._error is not None:
                is_aborted.wait()

    def _try(self, is_aborted: threading.Event) -> None:
        try:
            self._run()
        except RuntimeError as error:
            self._error = error
            return
        if not is_aborted.is_set():
            self._is_done = True

    def fill(self, values: Sequence[Tensor]) -> None:
        for output, value in zip(self._outputs, values, strict=True):
            output.copy_(value)

    @property
    def inputs(self) -> list[Tensor]:
        """The contents of the outputs when the operation was requested."""
        return self._inside

    def wait(self) -> None:
        """Make the calling thread's queue wait for the operation."""
        self._device.queue().follow(lambda: self.is_over)

    def is_completed(self) -> bool:
        return self._is_done or self._error is not None

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return torch's WorkResult, known once it has been queried: 0 if nothing has failed."""
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.is_completed():
            result.set_result(0 if self._error is None else 2)
        return result

    def exception(self) -> BaseException | None:
        """Raise the error; NCCL's method raises it as well, whatever its return type says."""
        raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")


class FakeQueue(HostQueue):
    """Work in order: operations that it waits for, and what it follows; computation itself is done when it returns."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._work = device, list[Mark]()

    @contextmanager
    def entered(self) -> Iterator[None]:
        outer, self._device.entered.queue = self._device.queue(), self
        try:
            yield
        finally:
            self._device.entered.queue = outer

    def mark(self) -> Mark:
        self._work = work = [is_done for is_done in self._work if not is_done()]
        return lambda: all(is_done() for is_done in work)

    def follow(self, mark: Mark) -> None:
        self._work = [*self._work, mark]


class FakeDevice:
    """One rank's device in all of its worlds; it starts nothing while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_deaf = False
        """True if its operations never end, even when aborted."""
        self.num_asked = self.num_done = self.num_aborts = 0
        self.computing, self.entered = FakeQueue(self), threading.local()
        self._operations: SimpleQueue[tuple[FakeWork, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def queue(self) -> FakeQueue:
        """Return the calling thread's queue."""
        found: FakeQueue = getattr(self.entered, "queue", self.computing)
        return found

    def ask(self, work: FakeWork, is_aborted: threading.Event) -> FakeWork:
        self.num_asked += 1
        self._operations.put((work, is_aborted))
        return work

    def _serve(self) -> None:
        while True:
            work, is_aborted = self._operations.get()
            while not (self.gate.is_set() and work.may_start()) and (self.is_deaf or not is_aborted.is_set()):
                is_aborted.wait(0.001) if self.gate.is_set() else self.gate.wait(0.001)
            work.run(is_aborted)
            self.num_done += 1
            work.is_over = True

    def seen(self, kind: type[FakeCommunicator] | None = None) -> Device:
        """Return the device as a group sees it."""

        def connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            return (kind or FakeCommunicator)(self, store, rank, size, timeout)

        holds = torch.device("cpu"), lambda tensor: tensor.dtype in KINDS
        return Device(*holds, self.queue, lambda: FakeQueue(self), connect)


class FakeCommunicator:
    """Accepts the calls that NCCL's backend accepts, and rejects those that would need separate communicators.

    As in NCCL, a message has no tag: the n-th message from one rank to another matches the n-th receive.
    """

    def __init__(self, device: FakeDevice, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._device, self._is_aborted = device, threading.Event()
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._parts: list[tuple[str, Tensor, int]] | None = None
        self._thread: int | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: there is nothing to connect."""

    def allreduce(self, tensors: list[Tensor]) -> FakeWork:
        return self._ask(lambda values: self._gloo.allreduce(values).wait(), tensors)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> FakeWork:
        return self._ask(lambda values: self._gloo.broadcast(values, options).wait(), tensors)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> FakeWork:
        mine = [tensor.clone() for tensor in tensors]
        return self._ask(lambda values: self._gloo.allgather([values], mine).wait(), gathered[0])

    def _start_coalescing(self) -> None:
        assert self._parts is None, "an exchange within another"
        self._parts, self._thread = [], threading.get_ident()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self._add("send", tensors[0].clone(), rank)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self._add("recv", tensors[0], rank)

    def _add(self, kind: str, tensor: Tensor, rank: int) -> None:
        assert self._parts is not None, "a send or a receive alone makes another communicator, with nobody to guard it"
        assert self._thread == threading.get_ident(), "NCCL's groups of calls are a thread's own"
        self._parts.append((kind, tensor, rank))

    def _end_coalescing(self) -> FakeWork:
        parts, self._parts = self._parts or [], None

        def exchange(values: list[Tensor]) -> None:
            arriving = iter(values)
            works = [
                self._gloo.recv([next(arriving)], rank, 0) if kind == "recv" else self._gloo.send([tensor], rank, 0)
                for kind, tensor, rank in parts
            ]
            for work in works:
                work.wait()

        return self._ask(exchange, [tensor for kind, tensor, _ in parts if kind == "recv"])

    def abort(self) -> None:
        self._device.num_aborts += 1
        self._is_aborted.set()

    def _ask(self, operate: Callable[[list[Tensor]], object], outputs: Sequence[Tensor]) -> FakeWork:
        def run() -> None:
            operate(values := work.inputs)
            if not self._is_aborted.is_set():
                work.fill(values)

        work = FakeWork(self._device, run, outputs)
        return self._device.ask(work, self._is_aborted)
