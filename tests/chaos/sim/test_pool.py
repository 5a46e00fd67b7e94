"""Seeds over several processes: no seed waits for another, and outcomes come in the order of the seeds."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from chaos.sim.campaign import pool
from tests.conftest import PATIENCE_S

pytestmark = pytest.mark.slow


def test_a_long_seed_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends only after all others, which one process has to run meanwhile; yet it comes first."""
    are_done = multiprocessing.get_context("fork").Event()

    def simulate(seed: int) -> tuple[int, bool]:
        if seed == 4:
            are_done.set()
        return seed, seed > 0 or are_done.wait(PATIENCE_S)

    monkeypatch.setattr(pool, "simulate", simulate)
    assert list(pool.simulate_each(range(5), lambda seed: seed, 2)) == [(seed, True) for seed in range(5)]  # type: ignore[arg-type, comparison-overlap]


def test_a_process_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seed has no outcome, and the campaign must not simply look shorter."""
    monkeypatch.setattr(pool, "simulate", lambda seed: os._exit(1) if seed == 2 else seed)
    with pytest.raises(EOFError):
        list(pool.simulate_each(range(4), lambda seed: seed, 2))  # type: ignore[arg-type]
