"""The results of two passes are compared bit for bit, for any shape and strides."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from elastic_train.job.units.recompute import same_bits


def test_bits_are_compared_of_every_shape() -> None:
    """Torch cannot view the strides of an empty numpy tensor as bytes."""

    def empty() -> Tensor:
        return torch.from_numpy(np.nonzero(np.zeros((2, 3)))[0])

    assert same_bits(empty(), empty()) and not same_bits(empty(), torch.zeros(1, dtype=torch.int64))
    nan = torch.tensor([[math.nan, 0.0]] * 2)
    assert same_bits(nan.T, nan.T.clone()) and not same_bits(nan, torch.tensor([[math.nan, -0.0]] * 2))
