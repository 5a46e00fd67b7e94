"""Rows for jobs that compare ways to train: just enough for several steps and a smaller last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_rows


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training set of 121 rows (six steps of 24 or five of 30; the last step has one sample); validation set of 13."""
    folder = tmp_path_factory.mktemp("few_rows")
    write_rows(folder / "train", 121, seed=1)
    write_rows(folder / "validation", 13, seed=2)
    return folder


@pytest.fixture(scope="session")
def fewer_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training set of 61 rows (two steps of 30, and one of a single sample); validation set of 13."""
    folder = tmp_path_factory.mktemp("fewer_rows")
    write_rows(folder / "train", 61, seed=1)
    write_rows(folder / "validation", 13, seed=2)
    return folder
