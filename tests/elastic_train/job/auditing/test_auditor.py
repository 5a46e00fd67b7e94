"""Audits: which lanes are computed twice, by which ranks, and which ranks are named when two computations differ."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.auditing.auditor import audits_of, others


@pytest.mark.parametrize("num_crews", [1, 2])
@pytest.mark.parametrize(("num_cells", "num_lanes", "every"), [(2, 4, 1), (3, 6, 5), (4, 8, 7), (1, 3, 2), (3, 7, 40)])
def test_one_lane_of_so_many_is_computed_by_another_cell(
    num_cells: int, num_lanes: int, every: int, num_crews: int
) -> None:
    """Every lane has its turn, with every other cell's compute group at the same position; at most once per step."""
    mesh = Mesh(0, num_cells * num_crews, Cell(expert=num_crews))
    assigned, found = mesh.assigned(num_lanes), Counter[tuple[int, int, int]]()
    num_steps = 4 * every * num_cells
    for step in range(num_steps):
        audits = audits_of(step, every, assigned, num_crews)
        assert len({audit.lane for audit in audits}) == len(audits)
        found.update(audits)
    assert found.total() == num_steps * num_lanes // every
    assert {lane for lane, _, _ in found} == set(range(num_lanes))
    for lane, owner, auditor in found:
        assert lane in assigned[owner]
        assert (auditor != owner) == (num_cells > 1)
        assert auditor % num_crews == owner % num_crews
    pairs = num_crews * max(1, num_cells * (num_cells - 1))
    assert len({(owner, auditor) for _, owner, auditor in found}) == pairs


def test_who_differs_from_most_is_named() -> None:
    assert others([(0, 7), (1, 9), (0, 7), (1, 7)]) == [1]
    assert others([(2, 5), (0, 5), (1, 5)]) == []
    assert others([(0, 7), (1, 9), (0, 7), (1, 9)]) == [0, 1, 0, 1], "no majority says who is right"
