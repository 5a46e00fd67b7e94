"""The paced classifier with late rows on nodes where a file in the failpoints folder orders them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chaos.tasks.paced_classifier import PacedClassifier
from elastic_train.core.sample_random import SampleRandom
from elastic_train.system.failpoints import VARIABLE
from elastic_train.tasks.task import Batch
from elastic_train.training.opening import observers

ORDER = "late_rows"
observers.PHASES_EVERY_STEPS = 1


class LateRows(PacedClassifier):
    """Waits before it builds a micro-batch, as for a slow disk, for the milliseconds in the order."""

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> Batch:  # type: ignore[override]
        with contextlib.suppress(FileNotFoundError, KeyError, ValueError):
            time.sleep(float(Path(os.environ[VARIABLE], ORDER).read_text()) / 1e3)
        return super().collate(rows, ids, draw)
