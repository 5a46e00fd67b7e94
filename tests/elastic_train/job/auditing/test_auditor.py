"""Audits: which lanes are computed twice, by whom, who is named if two computations differ, and lanes in stages."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.dcp import checksum
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.auditor import StagedLane, audits_of, others
from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import Pass
from elastic_train.tasks.decoder.experts import Experts


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


def passes_of(module: nn.Linear) -> StagedLane:
    stage = SimpleNamespace(
        run=lambda chunk, batch, given: module(batch["x"] if given is None else given),
        passing=lambda one, trains: contextlib.nullcontext(),
        experts=(),
    )
    plan, state = SimpleNamespace(autocast=contextlib.nullcontext), SimpleNamespace(scaler=None)
    trained = [one for one in module.parameters() if one.requires_grad]
    return StagedLane(stage, plan, state, "key", {"x": torch.ones(2, 3)}, trained)  # type: ignore[arg-type]


def test_a_stage_sums_up_its_gradients_and_gives_the_one_before_its_own() -> None:
    module, given = nn.Linear(3, 2), torch.ones(2, 3, requires_grad=True)
    passes = passes_of(module)
    made = passes.forward(Pass("forward", 0), given)
    passes.backward(Pass("backward", 0), made, torch.ones(2, 2))
    expected: list[Tensor] = [torch.full((2, 3), 2.0), torch.full((2,), 2.0)]
    assert passes.sums == [checksum(one) for one in expected]
    assert given.grad is not None and torch.equal(given.grad, module.weight.detach().sum(0).expand(2, 3))
    assert module.weight.grad is None and module.bias.grad is None


def test_a_first_stage_of_which_nothing_is_trained_has_nothing_to_compare() -> None:
    passes = passes_of(nn.Linear(3, 2).requires_grad_(False))
    made = passes.forward(Pass("forward", 0), None)
    passes.backward(Pass("backward", 0), made, torch.ones(2, 2))
    assert passes.sums == []


@pytest.mark.parametrize("has_lane", [True, False])
def test_a_stage_looks_at_what_its_experts_get_of_the_crews_lane_alone(has_lane: bool) -> None:
    """The lane may be this rank's or another rank's."""
    experts = Experts(3, 4, 2)
    links, leaf = ExpertLinks([]), {id(experts.up): torch.ones(2, 4, 3)}
    links.bind(Group(0, 1, None, 60))
    stage = SimpleNamespace(passing=lambda one, trains: contextlib.nullcontext(), experts=(None, links))
    state = SimpleNamespace(scaler=None)
    passes = StagedLane(stage, None, state, None, None, list(experts.parameters()), crew=1)  # type: ignore[arg-type]
    with passes._seeing_experts(Pass("backward", 0, chunk=1)):
        links.leaves = [{id(experts.up): torch.zeros(2, 4, 3)}, leaf] if has_lane else [leaf, {}]
    assert passes.sums == [0, checksum(leaf[id(experts.up)]) if has_lane else 0, 0]
