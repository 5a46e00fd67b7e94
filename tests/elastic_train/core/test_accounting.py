"""The account of a run's samples: what a hole takes away, and the keys under which holes are stored."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from elastic_train.core.accounting import Hole, SampleAccount, check_epoch
from elastic_train.core.coverage import CoverageSums
from elastic_train.errors import CoverageError

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
