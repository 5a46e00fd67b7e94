"""The mixing functions: frozen by golden vectors, since a change would silently reorder every stored run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.keyed_random import derive, mix64, mix64_array, permute

words = st.integers(0, 2**64 - 1)

# Where index shuffles of others have failed: around powers of two, and small primes; see docs of `permute`.
SIZES = sorted(
    {
        1,
        2,
        3,
        5,
        7,
        11,
        13,
        97,
        997,
        10_007,
        *(2**k + d for k in range(1, 15) for d in (-1, 0, 1)),
        2**16 + 1,
        2**18 + 1,
    }
)


def test_golden_words() -> None:
    """mix64 and derive give the words that they gave when they were frozen."""
    assert [mix64(word) for word in (0, 1, 2, 2**63, 2**64 - 1)] == [
        0x0,
        0x5692161D100B05E5,
        0xDBD238973A2B148A,
        0x25C26EA579CEA98A,
        0xB4D055FCF2CBBD7B,
    ]
    assert [derive(*key) for key in ((), (0,), (1, 2), (2, 1), (1, 2, 3))] == [
        0x0,
        0x397AB29740681D9,
        0x7947B6CB424A7ED5,
        0xEF340A833C3E538D,
        0x3F53A1FE784BBF,
    ]


@pytest.mark.parametrize(
    ("n", "key", "expected"),
    [
        (1, 0, [0]),
        (2, 1, [1, 0]),
        (3, 1, [1, 0, 2]),
        (5, 1, [1, 3, 4, 2, 0]),
        (8, 7, [4, 2, 5, 3, 6, 1, 7, 0]),
        (17, 7, [3, 9, 14, 15, 10, 16, 12, 13, 11, 7, 5, 0, 2, 4, 1, 6, 8]),
    ],
)
def test_golden_permutations(n: int, key: int, expected: list[int]) -> None:
    """Whole small permutations are as they were frozen."""
    assert permute(np.arange(n, dtype=np.int64), n, key).tolist() == expected


def test_golden_places_in_a_large_permutation() -> None:
    """Single places of a permutation of 42 M are as they were frozen, and cost nothing of that size."""
    positions = np.array([0, 1, 41_999_999], dtype=np.int64)
    assert permute(positions, 42_000_000, 123).tolist() == [9_205_975, 25_088_347, 37_258_678]


@given(st.lists(words, min_size=1, max_size=20))
def test_arrays_mix_as_single_words_do(some: list[int]) -> None:
    """The two implementations are one function."""
    assert mix64_array(np.array(some, dtype=np.uint64)).tolist() == [mix64(word) for word in some]


@pytest.mark.parametrize("n", SIZES)
def test_permute_is_a_bijection(n: int) -> None:
    """Every position of [0, n) is hit exactly once, at every odd size and under several keys."""
    for key in (0, 1, 2**64 - 1, derive(n)):
        counts = np.bincount(permute(np.arange(n, dtype=np.int64), n, key), minlength=n)
        assert counts.tolist() == [1] * n


@settings(deadline=None)
@given(st.integers(1, 3000), words, st.data())
def test_permute_maps_a_position_the_same_alone_and_in_an_array(n: int, key: int, data: st.DataObject) -> None:
    """A slice of positions gives the slice of the whole: nothing depends on how a request is cut."""
    lo = data.draw(st.integers(0, n))
    hi = data.draw(st.integers(lo, n))
    whole = permute(np.arange(n, dtype=np.int64), n, key)
    assert permute(np.arange(lo, hi, dtype=np.int64), n, key).tolist() == whole[lo:hi].tolist()


def test_keys_give_different_permutations() -> None:
    """Neighbouring keys are unrelated: over 1,000 places, few stay where another key puts them."""
    positions = np.arange(1000, dtype=np.int64)
    orders = [permute(positions, 1000, key) for key in range(20)]
    agreements = [int((a == b).sum()) for a, b in itertools.pairwise(orders)]
    assert max(agreements) < 15
