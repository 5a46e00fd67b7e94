"""Rows for jobs that compare ways to train: just enough for several steps and a smaller last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_sets


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training set of 121 rows (six steps of 24 or five of 30; the last step has one sample); validation set of 13."""
    return write_sets(tmp_path_factory.mktemp("few_rows"), 121, 13)


@pytest.fixture(scope="session")
def fewer_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training set of 61 rows (two steps of 30, and one of a single sample); validation set of 13."""
    return write_sets(tmp_path_factory.mktemp("fewer_rows"), 61, 13)
