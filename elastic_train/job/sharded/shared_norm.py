"""The norm from what several ranks have measured of their grains, where copies must agree."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.errors import WeightsDifferError
from elastic_train.shards.grains import Layout
from elastic_train.shards.norm import Float64s, total_norm


def norm_of_grains(layout: Layout, gathered: Tensor, holders: Iterable[tuple[int, Int64s]]) -> Tensor:
    """Return the norm, a float64, from a row of squares of each rank; see `squares_of_holders`."""
    return torch.tensor(total_norm(squares_of_holders(layout, gathered, holders)), dtype=torch.float64)


def squares_of_holders(layout: Layout, gathered: Tensor, holders: Iterable[tuple[int, Int64s]]) -> Float64s:
    """Return the squares of all trained grains from a row of each rank; `holders` are ranks and their grains.

    Every trained grain must be held by one of them. Raises WeightsDifferError if two copies of a grain have different
    gradients.
    """
    squares = np.full(layout.num_grains, -1.0)
    for rank, grains in holders:
        row = gathered[rank, : grains.size].numpy()
        known = squares[grains]
        other = (known != row) & (known != -1.0) & ~(np.isnan(known) & np.isnan(row))
        if other.any():
            name = layout.tensors[layout.tensor_of[grains[other][0]]].names[0]
            raise WeightsDifferError(
                f"rank {rank} and another copy's holder have different gradients of '{name}': memory or a "
                "connection is damaged. The last commit is intact: all ranks end, and the next start continues"
            )
        squares[grains] = row
    trained: Float64s = squares[layout.trained]
    assert not (trained == -1.0).any(), "some grains' gradients are held by nobody"
    return trained
