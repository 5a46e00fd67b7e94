"""Coverage sums see every repeat and every skip, in any order of adding; holes are taken from the account."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from elastic_train.core.accounting import CoverageSums, Hole, SampleAccount, check_epoch
from elastic_train.errors import CoverageError

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


HOLE = Hole(group=2, file="a.parquet", row_group=1, lo=10, hi=20, since=3, epoch=1, applied_before=((12, 14),), why="")
STORED = {
    "group": 2,
    "file": "a.parquet",
    "row_group": 1,
    "lo": 10,
    "hi": 20,
    "since": 3,
    "epoch": 1,
    "kept": ((12, 14),),
    "why": "",
}


def test_a_hole_removes_only_what_its_epoch_had_not_applied() -> None:
    """Nothing is left out before the hole's epoch, in it what had not been applied, and everything later."""
    assert [HOLE.left_out_of(epoch) for epoch in range(3)] == [(), ((10, 12), (14, 20)), ((10, 20),)]


def test_stored_keys_do_not_change() -> None:
    """Results and commit records have `kept` for what a hole's epoch had applied, as they always had."""
    assert HOLE.to_dict() == STORED
    adapter, account = TypeAdapter(SampleAccount), SampleAccount(holes=(HOLE,))
    assert adapter.dump_python(account, by_alias=True)["holes"] == (STORED,)
    assert adapter.validate_python({"holes": [STORED]}) == account


WHOLE = CoverageSums.of_all(30)
KEPT = CoverageSums.of_range(0, 10) + CoverageSums.of_range(20, 30)


def test_an_epoch_that_applied_each_sample_once_passes() -> None:
    """With the samples that holes have left out of it, and from then on."""
    check_epoch(0, WHOLE, SampleAccount(), WHOLE)
    first = WHOLE - CoverageSums.of_range(10, 12) - CoverageSums.of_range(14, 20)
    account = SampleAccount(epochs=(WHOLE,), holes=(HOLE,))
    check_epoch(1, WHOLE, account, WHOLE + first)
    check_epoch(2, WHOLE, account.end_epoch(WHOLE + first), WHOLE + first + KEPT)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_one_sample_in_place_of_another_is_found_in_its_epoch(epoch: int) -> None:
    """The message has what was expected and what was found; the epochs after it are compared for themselves."""
    account, total = SampleAccount(), CoverageSums()
    for number in range(3):
        total += WHOLE
        if number == epoch:
            total += CoverageSums.of_range(3, 4) - CoverageSums.of_range(7, 8)
            wrong = rf"samples of epoch {epoch} were not applied once each: 30 \(sums .*\) were counted, 30 \(sums "
            with pytest.raises(CoverageError, match=wrong):
                check_epoch(number, WHOLE, account, total)
        else:
            check_epoch(number, WHOLE, account, total)
        account = account.end_epoch(total)


def test_a_run_whose_first_commits_kept_no_sums_is_not_judged() -> None:
    """Its first epochs are unknown."""
    check_epoch(2, WHOLE, SampleAccount(), WHOLE)
