"""Rows for jobs that only compare ways to train: as few as have several steps, and a last one of fewer samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_rows


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of 121 rows, so six steps of 24 or five of 30, the last of one sample; a validation set of 13."""
    folder = tmp_path_factory.mktemp("few_rows")
    write_rows(folder / "train", 121, seed=1)
    write_rows(folder / "validation", 13, seed=2)
    return folder
