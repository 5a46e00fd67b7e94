"""Keyed mixing functions for order, coverage and randomness: frozen, because stored runs depend on them.

`mix64` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), a
bijection on 64-bit words. `derive` folds any number of words into one key, `derive_each` folds one more into many.
`permute` is a Feistel network with cycle walking (Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002): a
bijection on [0, n) for every n.

Golden vectors in the tests pin them: a change would silently reorder every stored run.
"""

from __future__ import annotations

import numpy as np

from elastic_train.core.arrays import Int64s, UInt64s

NUM_ROUNDS = 8
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_SHIFTS, _FACTORS = [np.uint64(by) for by in (30, 27, 31)], [np.uint64(_M1), np.uint64(_M2)]


def mix64(x: int) -> int:
    """Mix one 64-bit word."""
    x = (x ^ (x >> 30)) * _M1 & _MASK
    x = (x ^ (x >> 27)) * _M2 & _MASK
    return x ^ (x >> 31)


def mix64_array(x: UInt64s) -> UInt64s:
    """Mix every word of an array; the same function as `mix64`."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def derive(*words: int) -> int:
    """Fold words into one 64-bit key; the order of the words matters."""
    key = 0
    for word in words:
        key = mix64((key + _GAMMA & _MASK) ^ mix64(word + _GAMMA & _MASK))
    return key


def derive_each(key: int | UInt64s, words: UInt64s) -> UInt64s:
    """Fold one more word into a key or an array of keys: `derive(*some, word)` folds `word` into `derive(*some)`.

    Keys and words are broadcast; the result has their common shape, with at least one dimension.
    """
    keys = np.atleast_1d(np.asarray(key, dtype=np.uint64))  # numpy warns if a scalar overflows
    return mix64_array((keys + np.uint64(_GAMMA)) ^ mix64_array(words + np.uint64(_GAMMA)))


def permute(positions: Int64s, n: int, key: int) -> Int64s:
    """Map each position in [0, n) to its place under the keyed permutation of [0, n)."""
    assert n >= 1, "nothing to permute"
    if n == 1:
        return np.zeros_like(positions)
    num_bits = max(2, (n - 1).bit_length())
    low_bits = num_bits // 2
    round_keys = derive_each(derive(key), np.arange(NUM_ROUNDS, dtype=np.uint64))
    words = positions.astype(np.uint64)
    walking = np.arange(words.size)
    while walking.size:  # fewer than two rounds expected: the domain is smaller than 2n (than 4 for n = 2)
        words[walking] = _feistel(words[walking], low_bits, num_bits - low_bits, round_keys)
        walking = walking[words[walking] >= np.uint64(n)]
    return words.astype(np.int64)


def _feistel(words: UInt64s, low_bits: int, high_bits: int, round_keys: UInt64s) -> UInt64s:
    """Run one pass of an alternating Feistel network over `low_bits + high_bits` bits; a bijection for any rounds."""
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
    low, high = words & low_mask, words >> np.uint64(low_bits)
    for round_, round_key in enumerate(round_keys):
        if round_ % 2:
            low = low ^ (mix64_array(high + round_key) & low_mask)
        else:
            high = high ^ (mix64_array(low + round_key) & high_mask)
    return (high << np.uint64(low_bits)) | low
