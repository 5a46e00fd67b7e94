"""Calls that may never return, and can be abandoned: they run on another thread while the caller can stop waiting.

Nothing can unblock a collective whose peer is frozen: neither `abort()` nor dropping the group, whose destructor blocks
as well. Nor can a hanging read or sync of storage be interrupted. So the stuck thread keeps what the call needs, for a
collective until the group's own timeout, and nobody waits for it: it is a daemon, in no executor that the interpreter
joins at exit.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

LOOK_EVERY_S = 0.02

T = TypeVar("T")


class GivenUp(Exception):  # noqa: N818 - not a failure: the caller did not want to wait any longer
    """The caller stopped waiting before the call returned; the call may still take effect."""


class Call(Generic[T]):
    """A call on another thread; `ended` is set once its result or error is known."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self.ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_given_up = False

    def run(self) -> None:
        """Make the call, on this thread; a call is made once."""
        assert self._function is not None, "a call runs once"
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            # An unread error would be kept, with everything that the call had.
            self._error = None if self._is_given_up else error
        self._function = None
        self.ended.set()

    def fail(self, error: OSError) -> None:
        """End a call that cannot be made."""
        self._function, self._error = None, error
        self.ended.set()

    def result(self, timeout_s: float | None = None) -> T:
        """Return the call's result or raise its error, once; GivenUp if that takes longer than `timeout_s`."""
        if not self.ended.wait(timeout_s):
            raise GivenUp
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # a call that keeps its error keeps, by its frames and in a cycle, all that these had
        return self._result  # type: ignore[return-value]

    def result_unless(self, is_hopeless: Callable[[], bool], look_every_s: float = LOOK_EVERY_S) -> T:
        """Return the call's result or raise its error; GivenUp as soon as `is_hopeless()`."""
        while not self.ended.wait(look_every_s):
            if is_hopeless():
                self.give_up()
                raise GivenUp
        return self.result()

    def give_up(self) -> None:
        """Discard the result or error."""
        self._is_given_up, self._error = True, None


def start_thread(name: str, function: Callable[[], object]) -> None:
    """Run a function on its own daemon thread; raise OSError (EAGAIN) if the system gives no more threads."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError as error:  # Python's name for it, which others take for a fault of the program
        raise OSError(errno.EAGAIN, f"no thread can be started for: {name}") from error


def begin(name: str, function: Callable[[], T]) -> Call[T]:
    """Make a call on its own thread; without one, the call ends with the OSError of `start_thread`."""
    call = Call(function)
    try:
        start_thread(name, call.run)
    except OSError as error:
        call.fail(error)
    return call


class Bystander:
    """A thread that makes one call after another for a caller that may stop waiting."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        start_thread(name, partial(self._serve, self._calls))

    def begin(self, function: Callable[[], T]) -> Call[T]:
        """Make a call once all earlier ones have ended."""
        call = Call(function)
        self._calls.put(call)  # type: ignore[arg-type]
        return call

    def call(self, function: Callable[[], T], is_hopeless: Callable[[], bool]) -> T:
        """Return the result of `function` or raise its error; GivenUp as soon as `is_hopeless()`."""
        return self.begin(function).result_unless(is_hopeless)

    def leave(self, last_words: Callable[[], object] = lambda: None) -> None:
        """End the thread with a last call, once it is idle; returns at once."""
        self._calls.put(Call(last_words))
        self._calls.put(None)

    @staticmethod
    def _serve(calls: SimpleQueue[Call[object] | None]) -> None:
        while (call := calls.get()) is not None:
            call.run()
            del call
