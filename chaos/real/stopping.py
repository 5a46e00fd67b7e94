"""Being told to stop in the middle of a job: once means at the next good moment, twice means now."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Enough(Exception):  # noqa: N818 - not a failure: somebody wants no more faults
    """The soak was told to end."""


@contextlib.contextmanager
def told_once(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` at the first Ctrl-C or SIGTERM; from then on, and behind the context, they do what they did.

    What another handler has changed since, because it was told a second time, stays.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        take_back()
        tell()

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
