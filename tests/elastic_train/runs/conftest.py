"""Runs that stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic_train.runs.left_runs import Left


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    """A run of two ranks, of machines a and b, that took three steps."""
    run = Left(tmp_path, monkeypatch)
    run.train(1, 2, 3)
    return run
