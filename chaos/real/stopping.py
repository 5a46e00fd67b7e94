"""Signals to stop a job: one means at the next good moment, two mean now."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Enough(Exception):  # noqa: N818 - not a failure: the user wants no more faults
    """Raised when the user ends the soak."""


@contextlib.contextmanager
def on_first_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at the first Ctrl-C or SIGTERM; afterwards, and after the context, the previous handlers apply.

    A handler that was replaced meanwhile, because a second signal came, is left in place.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        take_back()
        act()

    def take_back() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    for number in numbers:
        signal.signal(number, note)
    try:
        yield
    finally:
        take_back()
