"""Compute the order of samples from docs/arithmetic.md alone, with the letters of that page."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

WORD = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def derive(*words: int) -> int:
    key = 0
    for word in words:
        key = mix((key + 0x9E3779B97F4A7C15 & WORD) ^ mix(word + 0x9E3779B97F4A7C15 & WORD))
    return key


def permute(x: int, n: int, key: int) -> int:
    b = max(2, (n - 1).bit_length())
    a = b // 2
    while n > 1:
        low, high = x % (1 << a), x >> a
        for r in range(0, 8, 2):
            high ^= mix(low + derive(key, r) & WORD) % (1 << b - a)
            low ^= mix(high + derive(key, r + 1) & WORD) % (1 << a)
        x = (high << a) + low
        if x < n:
            return x
    return 0


def sort(classes: Sequence[int], key: int) -> list[int]:
    shift = 2 * len(classes).bit_length()
    return sorted(range(len(classes)), key=lambda i: (classes[i], mix(i ^ key) >> shift, i))


def permuted(G: int, L: int, K: int, key: int) -> list[int]:  # noqa: N803
    turns = [(p - -(-(p * L // G) * G // L)) // K for p in range(G)]
    sizes = [turns.count(t) for t in range(max(turns) + 1)]
    lengths = [sum(size > permute(r, sizes[0], derive(key, 1)) for size in sizes) for r in range(sizes[0])]
    dealt = sort([r for r, length in enumerate(lengths) for _ in range(length)], derive(key, 2))
    turn_of = dict(zip(dealt, (turn for length in lengths for turn in range(length)), strict=True))
    groups = sort([turn_of[g] for g in range(G)], derive(key, 3))
    places = sorted(range(G), key=lambda p: (turns[p], p))
    return [group for _, group in sorted(zip(places, groups, strict=True))]


def lane_of(lane: int, rows: Sequence[int], L: int, K: int, S: int, e: int) -> list[int]:  # noqa: N803
    groups = permuted(len(rows), L, K, derive(S, e, 1))
    first, starts = [0, *accumulate(rows)], [0, *accumulate(rows[g] for g in groups)]
    line = [i for g in groups for i in range(first[g], first[g + 1])]
    begin, end, ids = lane * len(line) // L, (lane + 1) * len(line) // L, list[int]()
    for block, place in enumerate(range(bisect_right(starts, begin) - 1, bisect_right(starts, end - 1), K)):
        lo, hi = max(begin, starts[place]), min([end, *starts[place + K : place + K + 1]])
        ids += [line[lo + permute(x, hi - lo, derive(S, e, 2, lane, block))] for x in range(hi - lo)]
    return ids
