"""Compute the order of a mixture from docs/arithmetic.md alone, with the letters of that page."""

# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, gcd, lcm

from tests.oracle.order import lane_of


def shares_of(weights: Sequence[str]) -> list[int]:
    exact = [Fraction(weight) for weight in weights]
    whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
    if sum(whole) // gcd(*whole) <= 10_000:
        return [each // gcd(*whole) for each in whole]
    parts = [10_000 * weight / sum(exact) for weight in exact]
    a = [max(1, int(part)) for part in parts]
    while sum(a) < 10_000:
        a[max(range(len(a)), key=lambda s: (parts[s] - a[s], -s))] += 1
    while sum(a) > 10_000:
        a[max((s for s in range(len(a)) if a[s] > 1), key=lambda s: (a[s] - parts[s], -s))] -= 1
    return a


def taken_by(
    lane: int, sources: Sequence[Sequence[int]], a: Sequence[int], L: int, K: int, S: int, places: int
) -> list[int]:
    """Return the ids at a lane's first places, numbered through all sources."""
    turn = [s for _, s in sorted((Fraction(2 * k + 1, 2 * a[s]), s) for s in range(len(a)) for k in range(a[s]))]
    of_epoch = lru_cache(None)(lambda s, e, of: lane_of(of, sources[s], L, K, S, e))
    counts, ids = [0] * len(a), []
    for place in range(places):
        s = turn[(lane * len(turn) // L + place) % len(turn)]
        N = sum(sources[s])  # noqa: N806
        x = counts[s] + lane * N // L
        counts[s] += 1
        j = ((x + 1) * L - 1) // N
        ids.append(sum(map(sum, sources[:s])) + of_epoch(s, j - lane, j % L)[x - j * N // L])
    return ids


def steps_of(sources: Sequence[Sequence[int]], a: Sequence[int], L: int, M: int, epochs: int) -> int:
    """Return after how many steps of M places every lane has taken its part of so many epochs of every source."""
    turn = [s for _, s in sorted((Fraction(2 * k + 1, 2 * a[s]), s) for s in range(len(a)) for k in range(a[s]))]
    longest = 0
    for lane in range(L):
        left = [(lane + epochs) * sum(rows) // L - lane * sum(rows) // L for rows in sources]
        place = 0
        while max(left) > 0:
            left[turn[(lane * len(turn) // L + place) % len(turn)]] -= 1
            place += 1
        longest = max(longest, ceil(place / M))
    return longest
