"""Tolerances for losses of the same samples that are summed in different orders.

A sum of n terms in any order has a relative error of at most lambda * sqrt(n) * u with a probability of at least 1 - 2
exp(-lambda^2 / 2), where u is half the distance from 1 to the next number (Higham and Mary 2019, "A new approach to
probabilistic rounding error analysis", theorem 2.4). Nested sums count as one sum of all their terms: n is the number
of terms along the longest path through the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastic_train.tasks.decoder.model import DecoderShape

UNIT_ROUNDOFF = 2.0**-24
LAMBDA = 6.0
"""Exceeded with a probability of 3e-8."""


def num_terms(shape: DecoderShape, num_tokens: int, num_rows: int) -> int:
    """Return the number of terms in a step's loss along the longest path, for rows of `num_tokens` tokens."""
    attention = shape.dim + shape.head_dim + 2 * num_tokens + shape.dim
    mlp = shape.dim + shape.hidden
    norms = 2 * shape.dim
    ends = shape.dim + shape.dim + shape.vocabulary
    return shape.depth * (attention + mlp + norms) + ends + num_rows * num_tokens


def tolerance(loss: float, step: int, terms: int) -> float:
    """Return the tolerance of a step's loss: each earlier step may change the weights by its loss's own difference.

    This is generous: an update moves weights against the gradient, so an error in the last bits of the gradient changes
    the next loss by less than those bits.
    """
    return step * 2 * LAMBDA * math.sqrt(terms) * UNIT_ROUNDOFF * abs(loss)


def assert_same_but_for_rounding(mine: Mapping[int, float], theirs: Mapping[int, float], terms: int) -> None:
    """Assert that runs with the same samples have the same losses per step, up to rounding."""
    assert mine.keys() == theirs.keys() and len(mine) > 1
    for step, loss in theirs.items():
        assert abs(mine[step] - loss) <= tolerance(loss, step, terms), f"step {step}: {mine[step]} and {loss}"
