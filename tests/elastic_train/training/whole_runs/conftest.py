"""Rows for jobs that only compare ways to train: as few as have several steps, and a last one of fewer samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_rows


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of 151 rows (a prime), so seven steps of 24 or six of 30, and a validation set of 31."""
    folder = tmp_path_factory.mktemp("few_rows")
    write_rows(folder / "train", 151, seed=1)
    write_rows(folder / "validation", 31, seed=2)
    return folder
