"""The gradient sum of a model that every rank holds in full."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from elastic_train.core.lanes import contiguous
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum, TreeSum, tree_of
from elastic_train.parallel.group import Group


def make_gradient_sum(
    kind: Reduction, parameters: Sequence[nn.Parameter], ranks: Group, num_lanes: int, bucket_bytes: float | None = None
) -> GradientSum:
    """Bind the parameters' gradients to buffers and return the sum that the configuration asks for.

    With `bucket_bytes`, slices of about that size are exchanged during the backward pass.
    """
    return TreeSum([tree_of(kind, parameters, ranks, contiguous(ranks.size, num_lanes))], bucket_bytes)
