"""Calls that may never return and can be abandoned: they run on a thread, and the caller watches a condition.

Nothing can unblock a collective whose peer is frozen: neither `abort()` nor dropping the group, whose destructor blocks
as well. So the stuck thread keeps the group and its buffers until the group's own timeout, and nothing waits for the
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

LOOK_EVERY_S = 0.02

T = TypeVar("T")


class GivenUp(Exception):  # noqa: N818 - not a failure: the caller did not want to wait any longer
    """The watched condition came true before the call returned."""


class _Call(Generic[T]):
    """One call, its result or its error, and an event that says that it has ended."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function: Callable[[], T] | None = function
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        assert self.function is not None, "a call runs once"
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.error = error
        self.function = None
        self.done.set()


class Bystander:
    """A thread that makes one call after another for a caller that may stop waiting."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[object] | None] = SimpleQueue()
        threading.Thread(target=self._serve, args=(self._calls,), name=name, daemon=True).start()

    def call(self, function: Callable[[], T], is_hopeless: Callable[[], bool]) -> T:
        """Return what `function` returns or raise what it raises; GivenUp as soon as `is_hopeless()`."""
        call = _Call(function)
        self._calls.put(call)  # type: ignore[arg-type]
        while not call.done.wait(LOOK_EVERY_S):
            if is_hopeless():
                raise GivenUp
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def leave(self, last_words: Callable[[], object]) -> None:
        """End the thread with a last call, once it is free; returns at once."""
        self._calls.put(_Call(last_words))
        self._calls.put(None)

    @staticmethod
    def _serve(calls: SimpleQueue[_Call[object] | None]) -> None:
        while (call := calls.get()) is not None:
            call.run()
            del call
