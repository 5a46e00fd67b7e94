"""Being told to stop once, and twice."""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest

from chaos.real.stopping import told_once


def test_what_the_second_one_has_set_stays() -> None:
    """Whoever is told a second time may ask to be left alone while it cleans up: nothing takes that back."""
    told = list[str]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with told_once(lambda: told.append("once")):
            os.kill(os.getpid(), signal.SIGINT)
        assert told == ["once"] and signal.getsignal(signal.SIGINT) is interrupt
        with pytest.raises(KeyboardInterrupt), told_once(lambda: told.append("again")):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        assert told == ["once", "again"] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
