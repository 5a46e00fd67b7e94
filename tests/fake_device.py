"""A device that needs no accelerator: its operations run on a thread of its own, when the test lets them, over gloo.

What an operation is to fill holds NaN from the moment the device is asked for it until it is done, so nobody gets away
with reading it, or with an update, before that. As with NCCL's kernels, an operation whose peer is gone or frozen does
not end: only an abort ends it, and what it was to fill stays NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.parallel.devices.device import Device

KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""What is taken for the device's memory: weights and gradients; tables and messages are of other kinds."""


class FakeWork:
    """An operation on the device's queue."""

    def __init__(self, run: Callable[[], None], outputs: Sequence[Tensor]) -> None:
        self._run, self._outputs = run, outputs
        self._inside = [output.clone() for output in outputs]
        for output in outputs:
            output.fill_(torch.nan)
        self._error: BaseException | None = None
        self._is_done = False

    def run(self, is_aborted: threading.Event) -> None:
        """Run it, on the queue's thread; return once it is done or aborted."""
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
        """What the outputs held when the device was asked."""
        return self._inside

    def wait(self) -> None:
        """The queue is in order: nothing is to be done."""

    def is_completed(self) -> bool:
        return self._is_done or self._error is not None

    def get_future_result(self) -> torch.futures.Future[int]:
        """Return what torch calls a WorkResult, which it knows once it has looked: 0 of what has not failed."""
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.is_completed():
            result.set_result(0 if self._error is None else 2)
        return result

    def exception(self) -> BaseException | None:
        """NCCL's raises this, too, whatever it has to return."""
        raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")


class FakeDevice:
    """One rank's device, for all of its worlds; `gate` closed, it begins nothing."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_deaf = False
        """Whether what it does never ends, whatever is aborted."""
        self.num_asked = self.num_done = self.num_aborts = 0
        self._queue: SimpleQueue[tuple[FakeWork, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def ask(self, work: FakeWork, is_aborted: threading.Event) -> FakeWork:
        self.num_asked += 1
        self._queue.put((work, is_aborted))
        return work

    def _serve(self) -> None:
        while True:
            work, is_aborted = self._queue.get()
            while not self.gate.is_set() and (self.is_deaf or not is_aborted.is_set()):
                self.gate.wait(0.001)
            work.run(is_aborted)
            self.num_done += 1

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Callable[[], bool]:
        asked = self.num_asked
        return lambda: self.num_done >= asked

    def seen(self, kind: type[FakeCommunicator] | None = None) -> Device:
        """Return it as a group sees it."""

        def connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            return (kind or FakeCommunicator)(self, store, rank, size, timeout)

        return Device(torch.device("cpu"), lambda tensor: tensor.dtype in KINDS, lambda: self, connect)


class FakeCommunicator:
    """Takes calls as NCCL's backend does, and refuses what would need communicators of its own.

    As there, a message has no tag: the n-th that one rank sends to another is the n-th that this one receives.
    """

    def __init__(self, device: FakeDevice, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._device, self._is_aborted = device, threading.Event()
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._parts: list[tuple[str, Tensor, int]] | None = None
        self._thread: int | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing is left to connect."""

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

        work = FakeWork(run, outputs)
        return self._device.ask(work, self._is_aborted)
