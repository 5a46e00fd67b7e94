"""Proofs from commits of a mixture: each source separately, and no false statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elastic_train.checkpoint.audit.coverage_proof import (
    check_counts,
    check_source,
    differing,
    expected_times,
    mixture_of,
)
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.core.accounting import CoverageSums, Hole, SampleAccount
from elastic_train.core.arrays import ranges_of
from elastic_train.core.mixture import SourceFacts, sums_of_sources
from elastic_train.core.order import Cursor
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from tests.conftest import write_rows

NUM_LANES, MICRO_BATCH, STEP = 3, 4, 17
NUMBERS = {"version": 2, "num_samples": 59, "num_lanes": NUM_LANES, "micro_batch": MICRO_BATCH, "block_row_groups": 2}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    folder = tmp_path_factory.mktemp("proof")
    sizes = (("a", 41), ("b", 18))
    return [load_manifest(str(write_rows(folder / name, rows, seed=rows, group_rows=5))) for name, rows in sizes]


def commit_of(manifests: Sequence[Manifest], holes: tuple[Hole, ...] = (), **changes: object) -> CommitRecord:
    """Return a commit at a step within both sources' epochs."""
    facts = [
        SourceFacts(name, share, each.num_rows, each.digest, CoverageSums())
        for name, share, each in zip("ab", (2, 1), manifests, strict=True)
    ]
    record: Any = SimpleNamespace(order=NUMBERS, rng={"seed": 6}, sources=facts, key="commits/1")
    order = mixture_of(record, manifests)
    cursor, left_out = order.cursor_at(STEP, MICRO_BATCH), 0
    totals = [CoverageSums()] * 2
    for step in range(STEP):
        for lane in range(NUM_LANES):
            every = order.samples(order.cursor_at(step, MICRO_BATCH), lane, MICRO_BATCH).ids
            ids = every
            for hole in holes:
                ids = ids[(ids < hole.lo) | (ids >= hole.hi) | (step < hole.since)]
            left_out += len(every) - len(ids)
            totals = [a + b for a, b in zip(totals, sums_of_sources(ids, order.first_id), strict=True)]
    record.sources = tuple(replace(fact, coverage=total) for fact, total in zip(facts, totals, strict=True))
    record.account = SampleAccount(holes=holes, left_out=left_out)
    record.coverage, record.step, record.cursor = sum(totals, CoverageSums()), STEP, cursor
    record.__dict__.update(changes)
    return cast(CommitRecord, record)


def hole_in(manifests: Sequence[Manifest], group: int, since: int) -> Hole:
    order = mixture_of(commit_of(manifests), manifests)
    epoch, applied = order.applied_of_group(group, order.cursor_at(since, MICRO_BATCH))
    lo = int(order.group_first_id[group])
    return Hole(group, "f", 0, lo, lo + int(order.group_rows[group]), since, epoch, ranges_of(applied), "gone")


@pytest.mark.parametrize("group", [None, 3, 9])
def test_each_source_of_a_good_run_is_proven(manifests: list[Manifest], group: int | None) -> None:
    """The step is within the epochs, with or without a row group of one source that was excluded from some step on."""
    holes = () if group is None else (hole_in(manifests, group, 6),)
    record = commit_of(manifests, holes)
    assert check_counts(record, mixture_of(record, None)) == []
    order = mixture_of(record, manifests)
    for number, name in enumerate("ab"):
        is_right, said = check_source(record, order, number)
        assert is_right, said
        assert f"source '{name}'" in said and "counted exactly once each" in said
    times = np.zeros(59, dtype=np.int64)
    for step in range(STEP):
        for lane in range(NUM_LANES):
            for id_ in order.samples(order.cursor_at(step, MICRO_BATCH), lane, MICRO_BATCH).ids.tolist():
                times[id_] += not any(hole.lo <= id_ < hole.hi and step >= hole.since for hole in holes)
    assert (expected_times(order, STEP * MICRO_BATCH, holes) == times).all()


Spoil = Callable[[CommitRecord], object]


def miscounted(change: CoverageSums) -> Spoil:
    return lambda record: setattr(
        record,
        "sources",
        (replace(record.sources[0], coverage=record.sources[0].coverage + change), *record.sources[1:]),  # type: ignore[index]
    )


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (miscounted(CoverageSums(1, 5, 5)), "it should be 204 in all"),
        (miscounted(CoverageSums() - CoverageSums(1)), "source 'a': 135 samples were counted, its places are 136"),
        (lambda record: setattr(record, "coverage", CoverageSums(9)), "9 samples were counted in all"),
        (lambda record: setattr(record, "cursor", Cursor(1, 0)), "step 17 is at Cursor(epoch=0, offset=68), not at"),
    ],
)
def test_numbers_that_contradict_the_shares_are_found_without_a_manifest(
    manifests: list[Manifest], spoil: Spoil, expected: str
) -> None:
    record = commit_of(manifests)
    spoil(record)
    assert expected in "; ".join(check_counts(record, mixture_of(record, None)))


def test_a_sample_in_place_of_another_is_found(manifests: list[Manifest]) -> None:
    """The counts are right, and the sums are not."""
    record = commit_of(manifests)
    miscounted(CoverageSums.of_ids(np.array([1])) - CoverageSums.of_ids(np.array([2])))(record)
    assert check_counts(record, mixture_of(record, None)) == []
    is_right, said = check_source(record, mixture_of(record, manifests), 0)
    assert not is_right and "they are not the 136 of these" in said
    assert check_source(record, mixture_of(record, manifests), 1)[0]


def test_other_manifests_prove_nothing(manifests: list[Manifest]) -> None:
    """Some manifests are missing, or in another order."""
    record = commit_of(manifests)
    assert differing(record, manifests) is None
    assert "the manifests of 1 of 2 sources were found" in str(differing(record, manifests[:1]))
    assert "is not the source 'a' that commits/1 was trained on" in str(differing(record, manifests[::-1]))
