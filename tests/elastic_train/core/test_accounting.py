"""The account of a run's samples: what a hole takes away, and the keys under which holes are stored."""

from __future__ import annotations

from pydantic import TypeAdapter

from elastic_train.core.accounting import Hole, SampleAccount

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
