"""Collate functions for worker processes, which import this module to find them: it costs them as little as it can."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from elastic_train.core.keyed_random import SampleRandom
from elastic_train.data.arrow.numbers import numbers_of


def collate(rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Carry the label and the id."""
    return {"label": torch.from_numpy(numbers_of(rows.column("label")).copy()), "id": torch.from_numpy(ids.copy())}


class Augmenting:
    """Draws two numbers for each row, in a method."""

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> dict[str, Tensor]:
        return {"noise": torch.from_numpy(draw.uniform("noise", 2))}


class Ending:
    """Ends the process that calls it: with a code by os._exit, by sys.exit, or by a signal if the code is negative."""

    def __init__(self, code: int, *, quits: bool = False) -> None:
        self.code, self.quits = code, quits

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        if self.quits:
            sys.exit(self.code)
        if self.code < 0:
            os.kill(os.getpid(), -self.code)
        os._exit(self.code)


class AbortingAtExit:
    """Aborts a worker process when it exits, as a C++ library does whose thread still runs."""

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        if multiprocessing.parent_process() is not None:
            atexit.register(os.abort)
        return collate(rows, ids)
