"""A dataset of 61 rows, so three steps of 24 an epoch, the last of 13 samples; and a validation set of 13."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_rows


@pytest.fixture(scope="session")
def reported_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reported")
    write_rows(folder / "train", 61, seed=1)
    write_rows(folder / "validation", 13, seed=2)
    return folder
