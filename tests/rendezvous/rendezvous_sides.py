"""What the tests of this room share beside fixtures: the two sides of the store's seam, and waiting for a fact."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rendezvous import Store
from tests.conftest import PATIENCE_S


@dataclass(frozen=True)
class Side:
    """One implementation of the seam, and how its time passes."""

    store: Store
    pass_time: Callable[[float], None]
    prefix: str
    later: Callable[[Callable[[], object]], None]
    """Do something a moment later, beside the test."""


def beside(act: Callable[[], object]) -> None:
    """Act on another thread, a moment later."""
    threading.Timer(0.05, act).start()


def eventually(fact: Callable[[], bool], what: str, *, within_s: float = PATIENCE_S) -> None:
    """Return as soon as `fact` holds; fail with `what` after `within_s`."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.02)
