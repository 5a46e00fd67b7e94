"""Coverage sums see every repeat and every skip, in any order of adding."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.coverage import CoverageSums

ids = st.lists(st.integers(0, 2**40), max_size=40)


def of(some: list[int]) -> CoverageSums:
    """Return the sums of a list of ids."""
    return CoverageSums.of_ids(np.array(some, dtype=np.int64))


def test_golden_sums() -> None:
    """The sums are as they were frozen: commits carry them."""
    assert CoverageSums.of_all(10) == CoverageSums(10, 7438657777315996608, 1474963482990632360)
    assert of([3, 1, 3]) == CoverageSums(3, 14636795229207100571, 9190847419317302619)


@given(ids, st.randoms())
def test_sums_do_not_depend_on_order_or_chunking(some: list[int], shuffle: random.Random) -> None:
    """Ranks and lanes may add in any order and in any portions."""
    shuffled = list(some)
    shuffle.shuffle(shuffled)
    cut = shuffle.randint(0, len(some))
    assert of(shuffled[:cut]) + of(shuffled[cut:]) == of(some)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 2**20 - 1, 2**20, 2**20 + 1])
def test_the_closed_form_is_the_sum_of_all(n: int) -> None:
    """of_all adds [0, n), whatever its chunks."""
    assert CoverageSums.of_all(n) == CoverageSums.of_ids(np.arange(n, dtype=np.int64)[::-1])


@given(st.integers(0, 50), st.integers(0, 10))
def test_whole_epochs_multiply(n: int, times: int) -> None:
    """After E epochs the sums are E times those of one."""
    total = CoverageSums()
    for _ in range(times):
        total += CoverageSums.of_all(n)
    assert total == CoverageSums.of_all(n) * times


@given(st.integers(2, 300), st.data())
def test_a_repeat_that_hides_a_skip_is_detected(n: int, data: st.DataObject) -> None:
    """One sample in another's place leaves the count right, and both sums wrong."""
    skipped, repeated = (
        data.draw(st.permutations(range(n)))[:2] if n < 20 else (n - 1, data.draw(st.integers(0, n - 2)))
    )
    applied = [repeated if sample == skipped else sample for sample in range(n)]
    sums, whole = of(applied), CoverageSums.of_all(n)
    assert sums.count == whole.count
    assert sums.sum_a != whole.sum_a
    assert sums.sum_b != whole.sum_b
