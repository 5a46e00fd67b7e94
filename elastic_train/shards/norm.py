"""The gradient's norm by grains: one number for one gradient, however it is cut, and on whatever device it is.

Every element is squared in float64, which is exact for all narrower floats. A grain's squares are added along a fixed
binary tree, and so are the grains' sums, in the layout's order. There is no addition but of whole vectors, element by
element, so the sum depends on no kernel's order, no vector width and no number of threads. It costs more passes over
memory than a kernel that adds as it likes.

Copies of a grain have equal sums: a difference between them is a rank that computes otherwise, seen before the step is
applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.shards.grains import GRAIN

Float64s = npt.NDArray[np.float64]

_BLOCK = {"cpu": 16 * GRAIN}
"""Elements that are squared at once: what stays in a CPU's cache; enough to keep a GPU busy with one operation."""
_BLOCK_ELSEWHERE = 256 * GRAIN


def split_grains(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of whole tensors' grains, in the layout's order: tensor by tensor."""
    return [grain for tensor in tensors if tensor.numel() for grain in torch.split(tensor.reshape(-1), GRAIN)]


def grain_squares(grains: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each grain, float64, shape (grains,); each is a vector on the same device."""
    if not grains:
        return torch.empty(0, dtype=torch.float64)
    sums = torch.empty(len(grains), dtype=torch.float64, device=grains[0].device)
    numbers: dict[int, list[int]] = {}
    for number, grain in enumerate(grains):
        numbers.setdefault(grain.numel(), []).append(number)
    block = _BLOCK.get(sums.device.type, _BLOCK_ELSEWHERE)
    scratch = torch.empty(min(block, sum(grain.numel() for grain in grains)), dtype=torch.float64, device=sums.device)
    for length, alike in numbers.items():
        rows = max(1, scratch.numel() // length)
        for lo in range(0, len(alike), rows):
            some = alike[lo : lo + rows]
            table = scratch[: len(some) * length].view(len(some), length)
            for row, number in zip(table, some, strict=True):
                row.copy_(grains[number])
            sums[some] = _fold(table.mul_(table))
    return sums


def _fold(table: Tensor) -> Tensor:
    """Add every row's values along the tree that adds the second half to the first; destroys the table.

    Halves are powers of two; a row that is shorter counts as filled up with zeros.
    """
    length = table.shape[1]
    while length > 1:
        half = 1 << ((length - 1).bit_length() - 1)
        table[:, : length - half].add_(table[:, half:length])
        length = half
    return table[:, 0]


def total_norm(squares: Float64s) -> float:
    """Return the norm from all trained grains' sums, in the layout's order, shape (grains,): a tree of neighbours.

    Infinite or not a number where a gradient is.
    """
    if not squares.size:
        return 0.0
    sums = np.zeros(1 << (squares.size - 1).bit_length())
    sums[: squares.size] = squares
    with np.errstate(over="ignore", invalid="ignore"):
        while sums.size > 1:
            sums = sums[0::2] + sums[1::2]
    return math.sqrt(sums[0])


def clip_factor(norm: float, limit: float) -> float:
    """Return what a gradient is multiplied by so that its norm is at most `limit`: 1.0 for one within it.

    As in `torch.nn.utils.clip_grad_norm_`, not a number for such a norm. Multiplying by it shows no cut.
    """
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
