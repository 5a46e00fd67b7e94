"""An undisturbed run, with which other runs are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic_train.training.jobs import CLASSIFIER, config, succeed
from tests.memory_job import start


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A finished run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    succeed(start([config(folder, rows, CLASSIFIER)]))
    return folder
