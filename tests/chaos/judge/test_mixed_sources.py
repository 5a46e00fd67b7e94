"""Judging mixtures: its independent arithmetic agrees with the trainer's order, and miscounted sources are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.judge.evidence.applied import shape_of
from chaos.judge.evidence.run_files import Evidence, Line, collect
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.exactly_once.samples import check_sources, witness_of_sources
from chaos.judge.job_shape import MixedShape
from elastic_train.core.mixture import Mixture
from elastic_train.core.order import Cursor, Order
from tests.conftest import write_rows

SIZES, SHARES, LANES, MICRO_BATCH = (20, 9), (2, 1), 2, 3


def mixture_of(sizes: tuple[int, ...], shares: tuple[int, ...], num_lanes: int) -> Mixture:
    return Mixture([Order([size], num_lanes=num_lanes, seed=1) for size in sizes], shares)


@pytest.mark.heavy
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(5, 40), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 60),
    st.integers(1, 3),
)
def test_the_judges_arithmetic_is_the_trainers(
    sources: list[tuple[int, int]], num_lanes: int, micro_batch: int, step: int, epochs: int
) -> None:
    """The samples of each source, how often all had passed it, and when a job is over."""
    sizes, shares = (tuple(column) for column in zip(*sources, strict=True))
    mixture = mixture_of(sizes, shares, num_lanes)
    shape = MixedShape(sum(sizes), num_lanes, micro_batch, step, sizes, shares)
    place = step * micro_batch
    assert shape.applied().tolist() == [mixture.counts(lane, place).tolist() for lane in range(num_lanes)]
    whole, begun = shape.passes()
    assert whole.tolist() == mixture.num_passes(place).tolist()
    runs = [mixture.runs(lane, 0, place) for lane in range(num_lanes)]
    for number in range(len(sizes)):
        epochs_of = np.concatenate([of_lane[number].epochs for of_lane in runs])
        assert begun[number] == (epochs_of.max() + 1 if len(epochs_of) else 0)
    assert shape.steps_of(epochs) == mixture.steps_for(epochs, micro_batch)


@pytest.fixture
def run(tmp_path: Path) -> Evidence:
    """The files of a healthy job of 40 steps."""
    mixture = mixture_of(SIZES, SHARES, LANES)
    counts = np.zeros(sum(SIZES), dtype=np.int64)
    for lane in range(LANES):
        np.add.at(counts, mixture.samples(Cursor(), lane, 40 * MICRO_BATCH).ids, 1)
    passes = mixture.num_passes(40 * MICRO_BATCH).tolist()
    bounds = [0, SIZES[0], sum(SIZES)]
    sources: list[object] = [
        {"name": name, "num_samples": size, "share": share, "applied": int(counts[lo:hi].sum()), "epochs": epochs}
        for name, size, share, lo, hi, epochs in zip("ab", SIZES, SHARES, bounds, bounds[1:], passes, strict=False)
    ]
    config: Line = {
        "batch": {"global_batch": LANES * MICRO_BATCH, "micro_batch": MICRO_BATCH},
        "data": {"mixture": [{"source": "a", "weight": 1.0}, {"source": "b", "weight": 0.5}]},
        "max_steps": 40,
    }
    result: Line = {"status": "done", "step": 40, "sources": sources}
    return Evidence(tmp_path, [], [], config, result, counts, rows=sum(SIZES), sizes=SIZES)


def judged(run: Evidence) -> str:
    """Check a run's sources and its witness against its shape."""
    shape = shape_of(run)
    assert isinstance(shape, MixedShape) and run.result is not None and run.witness is not None
    check_sources(shape, run.result)
    return witness_of_sources(run, shape, run.witness)


def test_a_run_in_which_all_is_well_passes(run: Evidence) -> None:
    assert "each as often as its source was passed" in judged(run)


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("change", [1, -1, 3])
def test_a_sample_too_many_or_too_few_is_found(run: Evidence, source: int, change: int) -> None:
    """The witness, whose counts are the weights, exceeds the passes of its source, or differs from the source's sum."""
    counts = np.array(run.witness)
    counts[SIZES[0] * source] += change
    with pytest.raises(Violated, match=f"source {source}"):
        judged(replace(run, witness=counts))


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("times", [3, -3])
def test_a_sample_in_place_of_another_is_found(run: Evidence, source: int, times: int) -> None:
    """The sums are right, but a sample was applied more often than its source was begun, or passed."""
    counts = np.array(run.witness)
    own = counts[SIZES[0] * source :][: SIZES[source]]
    own[0] += times
    own[1:4] -= times // 3
    with pytest.raises(Violated, match=f"sample {SIZES[0] * source}, of source {source}, was applied"):
        judged(replace(run, witness=counts))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("applied", 79, "source b: 79 samples counted, its places are"),
        ("epochs", 1, "source b: 1 epochs of 9 samples, not"),
        ("num_samples", 10, "epochs of 10 samples"),
        ("share", 2, "names the shares"),
    ],
)
def test_a_result_that_says_something_else_is_found(run: Evidence, key: str, value: int, expected: str) -> None:
    """The result has each source's size, how much of it was applied, and its share."""
    assert run.result is not None
    first, second = run.result["sources"]  # type: ignore[misc]
    with pytest.raises(Violated, match=expected):
        judged(replace(run, result={**run.result, "sources": [first, {**second, key: value}]}))


def test_rows_are_counted_by_all_manifests(tmp_path: Path) -> None:
    """All configured ones, or all copies in the run's folder; not only some of them."""
    places = [write_rows(tmp_path / name, rows, seed=rows) for name, rows in (("a", 30), ("b", 20))]
    folder = tmp_path / "run"
    folder.mkdir()
    sources = "".join(f"    - {{source: {place}, weight: 1}}\n" for place in places)
    (folder / "config.yaml").write_text(f"data:\n  mixture:\n{sources}")
    assert (collect(folder).rows, collect(folder).sizes) == (50, (30, 20))
    (places[1] / "manifest.json").rename(folder / "manifest-1.json")
    assert (collect(folder).rows, collect(folder).sizes) == (50, (30, 20))
    (folder / "manifest-1.json").unlink()
    assert (collect(folder).rows, collect(folder).sizes) == (None, ())
    (folder / "config.yaml").write_text(f"data: {{train: {places[0]}}}\nbatch: {{global_batch: 4, micro_batch: 2}}\n")
    assert (collect(folder).rows, collect(folder).sizes) == (30, ())
    with pytest.raises(Unknown, match="manifest is neither"):
        shape_of(replace(collect(folder), rows=None, result={"status": "done", "step": 1}))
