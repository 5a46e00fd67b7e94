"""What a machine with a GPU is tested by: `make gpu`, which sets the variable, runs these; nothing else collects them.

Set to `cpu`, the same jobs run without a GPU: that tests the tests.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "ELASTIC_TRAIN_GPU_TESTS"
DEVICE = os.environ.get(VARIABLE, "")
if DEVICE:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as a trainer: products in deterministic mode need it
collect_ignore_glob = [] if DEVICE else ["test_*"]


@pytest.fixture
def device() -> str:
    return DEVICE
