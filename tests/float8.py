"""A mark for tests of products in float8: torch 2.9 has none on CPUs with a scale for each row."""

from __future__ import annotations

import pytest
import torch

from elastic_train.errors import ConfigError
from elastic_train.job.units.float8 import check_multiplies


def _multiplies() -> bool:
    try:
        check_multiplies(torch.device("cpu"))
    except ConfigError:
        return False
    return True


needs_float8 = pytest.mark.skipif(not _multiplies(), reason="this torch has no such product on a CPU")
