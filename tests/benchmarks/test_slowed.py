"""The benchmark of slowed processes accepts the slow rank and its slow phase, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.insight.slowed import Found, Running, Slowing, Tail, _shows
from elastic_train.insight.phases import RankFacts

ROW = RankFacts(0.0, 0.0, 0.02, 0.04, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0003)


def event(kind: str, rank: int, step: int, *, over: bool = False) -> dict[str, Any]:
    return {"op": "event", "kind": kind, "of_rank": rank, "step": step, "over": over}


def running(*events: dict[str, Any]) -> Running:
    """A job of two nodes, whose node 1 has rank 0."""
    tail = Tail(Path(), pids={0: 71, 1: 70})
    for each in events:
        tail._take(each)
    nodes: list[Any] = [SimpleNamespace(pids=lambda number=number: [70 + number]) for number in (0, 1)]
    return Running(tail, nodes, [], None)


@pytest.mark.parametrize(
    ("said", "right", "wrong", "latencies"),
    [
        ([("slow_compute", 0, 63)], 1, 0, [10]),
        ([("slow_compute", 1, 63)], 0, 1, []),
        ([("slow_data", 0, 63)], 0, 1, []),
        ([("slow_compute", 0, 40)], 0, 1, []),  # before it began
        ([("slow_data", 1, 55), ("slow_compute", 0, 63)], 1, 1, [10]),
        ([], 0, 0, []),
    ],
)
def test_only_the_slowed_rank_by_its_own_slowness_is_right(
    said: list[tuple[str, int, int]], right: int, wrong: int, latencies: list[int]
) -> None:
    found = Found()
    job = running(*(event(*each) for each in said))
    found.judge(job, Slowing("slow_compute", "crowd", 1, 3), 50, 53, 0)
    assert (found.slow, found.right, found.wrong, found.latencies) == (1, right, wrong, latencies)


def test_what_stands_is_what_is_not_over() -> None:
    job = running(event("slow_data", 1, 20), event("slow_compute", 0, 25), event("slow_data", 1, 40, over=True))
    assert job.tail.standing == {("slow_compute", 0)}


def test_a_row_shows_what_is_a_good_part_of_a_step_more() -> None:
    """Of the rank's own usual step: a tenth of it, or 2 ms of a round trip."""
    tail, usual = Tail(Path()), {step: [ROW, ROW] for step in range(5)}
    tail.rows = {5: [ROW, ROW._replace(data_s=0.009, round_trip_s=0.0025)], 6: [ROW._replace(data_s=0.007), ROW]}
    shown = {
        (kind, step, rank)
        for kind in ("slow_data", "slow_link", "slow_compute")
        for step in (5, 6)
        for rank in (0, 1)
        if _shows(tail, step, usual, Slowing(kind, "", 0, 0.0), rank)
    }
    assert shown == {("slow_data", 5, 1), ("slow_link", 5, 1)}
