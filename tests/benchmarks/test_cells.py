"""The benchmark of cells: its figures are explained, and its peers compute the same."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from benchmarks.cells import __main__ as cells
from benchmarks.cells import experts, pipeline, tensor
from benchmarks.ranks import run
from elastic_train.program.schedules import Kind


def test_every_figure_is_explained() -> None:
    """The output of --help names each figure."""
    explained = set(re.findall(r"`([a-z0-9_.]+)`", cells.__doc__ or ""))
    assert set(cells.figures()) <= explained


@pytest.mark.slow
@pytest.mark.xdist_group("measuring ranks")
@pytest.mark.parametrize("kind", pipeline.PEERS)
def test_torchs_schedules_make_the_same_gradients(kind: Kind) -> None:
    """Of two stages on eight lanes, to the last bit, before they are timed."""
    assert [peak > 0 for _, peak in run(pipeline.in_turn, pipeline.STAGES, kind, 0, 16, 1)] == [True, True]


@pytest.mark.slow
@pytest.mark.xdist_group("measuring ranks")
@pytest.mark.parametrize("sides", [tensor, experts], ids=["tensor", "experts"])
def test_loops_of_torchs_own_parts_compute_the_same(sides: ModuleType) -> None:
    """Either side is checked against the other before it is timed, here on short rows."""
    times = run(sides.in_turn, sides.DEGREE, 1, 16, 1)
    assert times and all(len(turns) == 1 for each in times for turns in each)
