"""Integer shares from weights, of which a mixture's turns consist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

FINEST_TURN = 10_000
"""Sum of shares that have to be rounded: exact to a ten-thousandth."""


def shares_of(weights: Sequence[float], turn: int = FINEST_TURN) -> tuple[int, ...]:
    """Return integer shares in the ratio of the weights as written: 0.7 and 0.3 give 7 and 3.

    Shares that would add up to more than `turn` are rounded to add up to it; none is 0. Raise ValueError if a weight is
    not a positive number, or there are more weights than positions.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be positive numbers: {list(weights)}")
    if len(weights) > turn:
        raise ValueError(f"{len(weights)} sources do not fit into a turn of {turn} places")
    written = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in written))
    whole = [int(weight * common) for weight in written]
    shares = [share // math.gcd(*whole) for share in whole]
    return tuple(shares) if sum(shares) <= turn else _rounded(shares, turn)


def _rounded(weights: Sequence[int], turn: int) -> tuple[int, ...]:
    """Return shares that add up to `turn`, each as close to its weight as possible."""
    exact = [Fraction(weight * turn, sum(weights)) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) != turn:
        step = 1 if sum(shares) < turn else -1
        changeable = [number for number, share in enumerate(shares) if share + step >= 1]
        missing = [step * (exact[number] - shares[number]) for number in changeable]
        shares[changeable[missing.index(max(missing))]] += step
    return tuple(shares)
