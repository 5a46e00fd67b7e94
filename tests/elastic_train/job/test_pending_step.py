"""Steps that cells left between the sum and the update: applied if a rank may have applied them, else dropped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.core.order import Cursor
from elastic_train.errors import WeightsDifferError
from elastic_train.job.build import build_state
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.peer_states import PeerState, gather_peer_states, leave_out_unfinished, roll_forward
from elastic_train.job.reshard import take_place
from elastic_train.job.state import AppliedState, StepFacts, norm_of
from elastic_train.job.state_shards import Place
from elastic_train.parallel.gradient_sum import place_gradients
from elastic_train.parallel.group import Group
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import Column
from tests.memory_machine import in_memory
from tests.memory_world import group_of

TERM = 3
GRADIENT = torch.linspace(1.0, 2.0, 16).view(4, 4)


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))


def make_state(mesh: Mesh, step: int) -> AppliedState:
    """Return the state of a place in a cell of two at a step, with the next step's gradient ready."""
    model = make_model()
    recipe = OptimizerConfig(lr=0.1, warmup_steps=0, clip_norm=0.5)
    plan = CellPlan({"0": "column"}, dims={"0.weight": 0, "0.bias": 0})
    state = build_state(model, recipe, 9, "cpu", False, (), ParallelConfig(tensor=2), plan, plan.dims)
    state.shards.enter(mesh, Group(0, 1, None, 1.0))
    state.shards.trained_in = TERM
    place_gradients(list(model.parameters()))
    part = state.shards.cut.cuts["0.weight"].part_of
    for _ in range(step):
        _fill(state, part(GRADIENT, mesh.place))
        state.apply(FACTS, torch.tensor(2.0, dtype=torch.float64))
    _fill(state, part(GRADIENT, mesh.place))
    return state


FACTS = StepFacts(Cursor(), CoverageSums(), TERM, SampleAccount())


def _fill(state: AppliedState, gradient: Tensor) -> None:
    for parameter in state.model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(0.25)
    state.model.get_parameter("0.weight").grad.copy_(gradient)  # type: ignore[union-attr]


def settle(
    steps: list[int], pending: list[bool], newcomers: tuple[int, ...] = (), resumed: tuple[int, ...] = ()
) -> tuple[list[Place], list[AppliedState]]:
    """Let ranks of cells of two settle the next step, given the steps that each has applied and has pending."""
    size = len(steps)
    states = [make_state(Mesh(rank, size, Cell(tensor=2)), step) for rank, step in enumerate(steps)]
    for rank, state in enumerate(states):
        if pending[rank]:
            state.hold(FACTS, state.measure())
        if rank in newcomers:
            state.shards.trained_in = 0
        if rank in resumed:  # from a commit, which has no norm
            state.reached = replace(state.reached, norm=None)

    def settled(rank: int, size: int) -> list[Place]:
        group = group_of("world", rank, size)
        brought = gather_peer_states(group, states[rank], ())
        return [one.place for one in roll_forward(group, states[rank], brought)]

    found = in_memory(settled, size)
    assert found[0] is not None and found == [found[0]] * size
    assert found[0] == [state.place for state in states]
    assert all(state.pending is None for state in states)
    return found[0], states


def weights_of(state: AppliedState) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def test_what_one_has_applied_all_apply() -> None:
    """The others take its norm, which ranks with the step pending do not know."""
    places, states = settle([2, 1, 1, 1], [False, True, True, True])
    assert places == [Place(2, TERM)] * 4
    for one, other in ((0, 2), (1, 3)):
        for mine, theirs in zip(weights_of(states[one]), weights_of(states[other]), strict=True):
            assert torch.equal(mine, theirs)


def test_what_others_have_from_a_commit_is_taken_from_them() -> None:
    """Nobody knows the norm of the step, so a rank that was away with it pending cannot clip its gradient."""
    places, states = settle([2, 2, 2, 1], [False, False, False, True], resumed=(0, 1, 2))
    assert places == [Place(2, TERM)] * 3 + [Place(1, TERM)]
    expected = weights_of(make_state(Mesh(3, 4, Cell(tensor=2)), 1))
    assert all(torch.equal(one, other) for one, other in zip(weights_of(states[3]), expected, strict=True))
    places, _ = settle([2, 2, 2, 1], [False, False, False, True], resumed=(0, 1))
    assert places == [Place(2, TERM)] * 4, "one of them has applied it"


def test_what_all_that_are_left_hold_is_applied_with_the_norm_of_all_parts() -> None:
    """A newcomer at the cell's other place does not prevent it, as long as each part is known."""
    places, states = settle([1, 1, 1, 0], [True, True, True, False], newcomers=(3,))
    assert places == [Place(2, TERM)] * 3 + [Place(0, 0)]
    squares = GRADIENT.double().square().sum() + 8 * 0.25**2
    assert states[0].reached.norm == pytest.approx(float(squares.sqrt()), rel=1e-14)


@pytest.mark.parametrize(
    ("steps", "pending", "newcomers"),
    [([1, 1, 1, 1], [True, True, True, False], ()), ([1, 0], [True, False], (1,))],
)
def test_what_somebody_lacks_nobody_has_applied(
    steps: list[int], pending: list[bool], newcomers: tuple[int, ...]
) -> None:
    """A survivor lacks the step, or no holder of a part of the state is left: the step is dropped."""
    before = [weights_of(make_state(Mesh(rank, len(steps), Cell(tensor=2)), step)) for rank, step in enumerate(steps)]
    places, states = settle(steps, pending, newcomers)
    assert [place.step for place in places] == steps
    for state, weights in zip(states, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights_of(state), weights, strict=True))


def whole(places: list[Place], cell: Cell) -> Place:
    """Return the furthest step at which all of the state is held, given each rank's step."""
    columns = [Column(Layout((), ())) for _ in range(cell.num_parts)]
    table: Any = SimpleNamespace(parts=SimpleNamespace(columns=columns), cell=cell)
    kept, _ = leave_out_unfinished(table, [PeerState(place, None, ()) for place in places])
    return max(one.place for one in kept)


def test_only_what_each_place_holds_is_whole() -> None:
    a, b, none, pairs = Place(5, 2), Place(4, 2), Place(0, 0), Cell(stage=2, context=2)
    assert whole([a, b, b, a], Cell(tensor=2)) == a
    assert whole([a, b, b, none], Cell(tensor=2)) == b
    assert whole([a, none, b, none], Cell(tensor=2)) == none
    assert whole([a, none, none, a], pairs) == a, "of a cell whose neighbours hold the same"
    assert whole([a, a, none, b], pairs) == none


def test_copies_of_a_part_have_one_gradient() -> None:
    """Ranks at the same place must have equal measurements, and so must all uncut tensors; else nothing is applied."""
    shards = make_state(Mesh(0, 4, Cell(tensor=2)), 0).shards
    rows = torch.tensor([[1.0, 5.0, 2.0, 3.0], [4.0, 6.0, 2.0, 3.0]] * 2, dtype=torch.float64)
    assert float(norm_of(rows, shards.table)) == pytest.approx((1 + 5 + 4 + 6 + 2 + 3) ** 0.5)
    for rank, grain, who in [(2, 1, "ranks 0 and 2"), (1, 2, "ranks 2 and 1")]:
        wrong = rows.clone()
        wrong[rank, grain] += 1
        if rank == 1:
            wrong[3, grain] += 1
        with pytest.raises(WeightsDifferError, match=who):
            norm_of(wrong, shards.table)


def test_a_rank_that_comes_to_another_place_has_the_initial_weights_there() -> None:
    """What it held is of no use there; the next world gives it the place's state."""
    there, state = Mesh(1, 2, Cell(tensor=2)), make_state(Mesh(0, 2, Cell(tensor=2)), 2)
    take_place(state, there, Group(0, 1, None, 1.0), lambda: make_model().state_dict().items())
    assert (state.place, state.shards.table.part) == (Place(0, 0), 1)
    for mine, expected in zip(weights_of(state), weights_of(make_state(there, 0)), strict=True):
        assert torch.equal(mine, expected)
