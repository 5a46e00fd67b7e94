"""By how much losses of the same samples may differ where only the order of sums does.

A sum of n terms in any order has a relative error of at most lambda * sqrt(n) * u with a probability of at least
1 - 2 exp(-lambda^2 / 2), where u is half the distance of 1 to the next number (Higham and Mary 2019, "A new approach to
probabilistic rounding error analysis", theorem 2.4). Sums of sums count as one of all their terms: n is the number of
terms along the longest way through the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from elastic_train.tasks.decoder.shape import DecoderShape

UNIT_ROUNDOFF = 2.0**-24
LAMBDA = 6.0
"""Exceeded with a probability of 3e-8."""


def num_terms(shape: DecoderShape, num_tokens: int, num_rows: int) -> int:
    """Return the terms that a step's loss is a sum of, along the longest way, for rows of so many tokens."""
    attention = shape.dim + shape.head_dim + 2 * num_tokens + shape.dim
    mlp = shape.dim + shape.hidden
    norms = 2 * shape.dim
    ends = shape.dim + shape.dim + shape.vocabulary
    return shape.depth * (attention + mlp + norms) + ends + num_rows * num_tokens


def tolerance(loss: float, step: int, terms: int) -> float:
    """Return by how much a step's loss may differ: each step before it has left weights as different as its own loss.

    That is generous: an update moves weights against the gradient, so an error of them in the last bits of the gradient
    changes the next loss by less than those bits.
    """
    return step * 2 * LAMBDA * math.sqrt(terms) * UNIT_ROUNDOFF * abs(loss)


def assert_same_but_for_rounding(mine: Mapping[int, float], theirs: Mapping[int, float], terms: int) -> None:
    """Compare the losses of runs by step: those of the same samples, and other bits."""
    assert mine.keys() == theirs.keys() and len(mine) > 1
    for step, loss in theirs.items():
        assert abs(mine[step] - loss) <= tolerance(loss, step, terms), f"step {step}: {mine[step]} and {loss}"
