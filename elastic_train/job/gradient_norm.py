"""The norm of a step's gradient over the whole model, from what each rank has measured of its grains.

It is that by grains (`placement.norm`), in which neither a cut nor a number of threads shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.errors import WeightsDifferError
from elastic_train.job.majority import name_others
from elastic_train.placement.norm import squares_of_holders, total_norm
from elastic_train.placement.table import Parts, Table


def measured(table: Table, squares: Tensor) -> Tensor:
    """Return what a rank knows of the norm, from the squares of its grains: of equal shape on all ranks, float64."""
    if table.has_all_gradients:
        return torch.tensor(total_norm(squares.numpy()), dtype=torch.float64)
    return padded(squares, max(grains.size for of_part in table.updated for _, grains in of_part))


def padded(squares: Tensor, size: int) -> Tensor:
    """Return squares with zeros after them, so many numbers in all, and at least one."""
    row = torch.zeros(max(1, size), dtype=torch.float64)
    row[: squares.numel()] = squares
    return row


def known_alone(table: Table, measured: Tensor) -> Tensor | None:
    """Return the norm from what this rank alone has measured; None if that does not say."""
    return measured if table.has_all_gradients else None


def norm_of(gathered: Tensor, table: Table) -> Tensor:
    """Return the norm from what all ranks have measured, by rank: a float64 on the CPU.

    Raises WeightsDifferError if ranks have measured the same otherwise.
    """
    if table.has_all_gradients:
        _check_same(gathered)
        return gathered[0]
    return norm_of_rows(gathered, table.parts, table.updated)


def norm_of_rows(gathered: Tensor, parts: Parts, holders: Sequence[Iterable[tuple[int, Int64s]]]) -> Tensor:
    """Return the norm from rows of some ranks, which hold all grains that are trained.

    `holders` are, by part, pairs of a rank and the grains that its row begins with.
    """
    pairs = zip(parts.columns, holders, strict=True)
    squares = [squares_of_holders(column.layout, gathered, some) for column, some in pairs]
    return torch.tensor(total_norm(parts.sum_once(squares)), dtype=torch.float64)


def _check_same(gathered: Tensor) -> None:
    """Raise WeightsDifferError unless all ranks have measured one norm; one that is not a number equals any other."""
    norms = gathered.flatten().nan_to_num(nan=-1.0, posinf=math.inf)
    if not bool((norms == norms[0]).all()):
        who, _ = name_others(norms.view(torch.int64).tolist(), "gradients")
        raise WeightsDifferError(
            f"{who}, by the norm of the sum over all ranks: memory or a connection is damaged, or a device computes "
            "wrongly. The step is not applied: all ranks end, and the next start continues from the last commit"
        )
