"""Being asked to stop once, and twice."""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest

from chaos.real.leftovers import on_first_signal


def test_a_handler_set_during_cleanup_is_kept() -> None:
    """A handler that ignores further signals during its cleanup stays in place."""
    calls = list[str]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with on_first_signal(lambda: calls.append("once")):
            os.kill(os.getpid(), signal.SIGINT)
        assert calls == ["once"] and signal.getsignal(signal.SIGINT) is interrupt
        with pytest.raises(KeyboardInterrupt), on_first_signal(lambda: calls.append("again")):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        assert calls == ["once", "again"] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
