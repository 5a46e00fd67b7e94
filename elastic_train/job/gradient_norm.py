"""The norm of a step's gradient over the whole model, from each rank's sums of squares per grain.

It is computed per grain (`placement.norm`), so it depends neither on how tensors are cut nor on the thread count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_train.core.arrays import Int64s
from elastic_train.errors import WeightsDifferError
from elastic_train.placement.norm import clip_factor, total_norm
from elastic_train.placement.table import Parts, Table


def measured(table: Table, squares: Tensor) -> Tensor:
    """Return this rank's contribution to the norm from its grains' squares: float64, of equal shape on all ranks."""
    if table.has_all_gradients:
        return torch.tensor(total_norm(squares.numpy()), dtype=torch.float64)
    return padded(squares, max(grains.size for of_part in table.updated for _, grains in of_part))


def padded(squares: Tensor, size: int) -> Tensor:
    """Return squares padded with zeros to `size` numbers, at least one."""
    row = torch.zeros(max(1, size), dtype=torch.float64)
    row[: squares.numel()] = squares
    return row


def known_alone(table: Table, measured: Tensor) -> Tensor | None:
    """Return the norm if this rank's measurement determines it, else None."""
    return measured if table.has_all_gradients else None


def norm_of(gathered: Tensor, table: Table) -> Tensor:
    """Return the norm from all ranks' measurements, by rank: a float64 on the CPU.

    Raises WeightsDifferError if ranks measured different values for the same gradient.
    """
    if table.has_all_gradients:
        _check_same(gathered)
        return gathered[0]
    return norm_of_rows(gathered, table.parts, table.updated)


def norm_of_rows(gathered: Tensor, parts: Parts, holders: Sequence[Iterable[tuple[int, Int64s]]]) -> Tensor:
    """Return the norm from the rows of ranks that together hold all trained grains.

    `holders` has, for each model part, pairs of a rank and the grains that its row begins with.
    """
    return torch.tensor(total_norm(parts.squares_of(gathered.numpy(), holders)), dtype=torch.float64)


def clip(optimizer: Optimizer, limit: float, norm: float) -> None:
    """Scale the reduced gradients of what this rank updates so that their norm, now `norm`, is at most `limit`."""
    if (factor := clip_factor(norm, limit)) != 1.0:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _check_same(gathered: Tensor) -> None:
    """Raise WeightsDifferError unless all ranks measured the same norm; all NaN norms are equal."""
    norms = gathered.flatten().nan_to_num(nan=-1.0, posinf=math.inf)
    if not bool((norms == norms[0]).all()):
        who, _ = name_others(norms.view(torch.int64).tolist(), "gradients")
        raise WeightsDifferError(
            f"{who}, by the norm of the sum over all ranks: memory or a connection is damaged, or a device computes "
            "wrongly. The step is not applied: all ranks end, and the next start continues from the last commit"
        )


def name_others(sums: Sequence[int], what: str = "weights", ranks: Sequence[int] | None = None) -> tuple[str, int]:
    """Describe the ranks whose `what` differs from the majority's, by checksum, and return one rank of the majority.

    The checksums are of `ranks`, by default all ranks. Without a majority, the text says that none is known to be
    right.
    """
    ranks = ranks or range(len(sums))
    alike: dict[int, list[int]] = {}
    for rank, value in zip(ranks, sums, strict=True):
        alike.setdefault(value, []).append(rank)
    most = max(alike.values(), key=len)
    if 2 * len(most) > len(sums):
        others = [rank for rank in ranks if rank not in most]
        return f"ranks {others} hold other {what} than the {len(most)} others", most[0]
    if len(sums) == 2:
        return f"ranks {ranks[0]} and {ranks[1]} hold different {what}, and nothing says which of them is right", ranks[
            0
        ]
    sets = " and ".join(str(ranks) for ranks in alike.values())
    return f"ranks {sets} hold different {what}, and no majority says which are right", ranks[0]
