"""Collate functions for worker processes, which import this module to find them: it costs them as little as it can."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from elastic_train.core.sample_random import SampleRandom
from elastic_train.data.arrow.numbers import numbers_of


def collate(rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Carry the label and the id."""
    return {"label": torch.from_numpy(numbers_of(rows.column("label")).copy()), "id": torch.from_numpy(ids.copy())}


class Augmenting:
    """Draws two numbers for each row, in a method."""

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> dict[str, Tensor]:
        return {"noise": torch.from_numpy(draw.uniform("noise", 2))}
