"""Threads that a process may end without: they wait for storage, and storage that hangs may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def begin(name: str, act: Callable[[], T]) -> Future[T]:
    """Do something on a thread of its own."""
    result: Future[T] = Future()
    threading.Thread(target=_do, args=(act, result), name=name, daemon=True).start()
    return result


class InTurn:
    """A thread that does what it is given, one after the other."""

    def __init__(self, name: str) -> None:
        self._given = SimpleQueue[tuple[Callable[[], None], Future[None]] | None]()
        self._is_unwanted = False
        self._through = begin(name, self._go_on)

    def do(self, act: Callable[[], None]) -> Future[None]:
        result: Future[None] = Future()
        self._given.put((act, result))
        return result

    def end(self) -> None:
        """Wait for what is being done; what was not begun is left."""
        self._is_unwanted = True
        self._given.put(None)
        self._through.result()

    def _go_on(self) -> None:
        while (given := self._given.get()) is not None:
            act, result = given
            if self._is_unwanted:
                result.cancel()
            else:
                _do(act, result)


def _do(act: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(act())
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        result.set_exception(error)
