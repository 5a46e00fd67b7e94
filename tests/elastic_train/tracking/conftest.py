"""Trackers have as long as a busy machine may take to be given what a job has logged."""

from __future__ import annotations

import pytest

from elastic_train.tracking import tracker
from tests.conftest import PATIENCE_S


@pytest.fixture(autouse=True)
def patient_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a job waits for its trackers: a test looks at what has arrived when `finish` returns."""
    monkeypatch.setattr(tracker, "FLUSH_TIMEOUT_S", dict.fromkeys(tracker.STATUSES, PATIENCE_S))
    monkeypatch.setattr(tracker, "WRITE_TIMEOUT_S", PATIENCE_S)
