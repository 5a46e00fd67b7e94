"""A cut model computes the same as the whole one, up to rounding; a model that does not fit the cut is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import cell_plan_of, check_fits_cells, cut_dims_of
from elastic_train.job.cells.cut_model import CutModel, all_weights
from elastic_train.job.model_layout import store_in_memory_order
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.models.adapters import leave_base_out
from elastic_train.tasks.placements import Degrees, Placements
from elastic_train.tasks.preferences import Preferences
from elastic_train.tasks.task import Task
from elastic_train.tasks.witness import Witness
from tests.elastic_train.tasks.language_rows import WITH_TRANSFORMERS
from tests.memory_machine import in_memory
from tests.memory_world import group_of

SHAPE = DecoderShape(vocabulary=11, dim=16, depth=2, heads=8, kv_heads=4, hidden=12, dropout=0.2)
TASK = CausalLM(model={"dim": 16, "heads": 8, "kv_heads": 4, "hidden": 12})


def make_model() -> Decoder:
    torch.manual_seed(3)
    return Decoder(SHAPE).double()


def run_once(model: nn.Module) -> Tensor:
    """Run forward and backward on the same tokens, with the same dropout; return the output."""
    torch.manual_seed(5)
    found = model(torch.randint(3, 11, (3, 7)))
    out: Tensor = found if isinstance(found, Tensor) else found.logits
    out.square().sum().backward()
    return out.detach()


def of_rank(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    compare(make_model, group, 0.7)
    group.close()


def assert_like(one: Tensor, other: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.abs().max()))


def compare(
    make_model: Callable[[], nn.Module], group: Group, share: float, tolerance: float = 1e-11, task: Task = TASK
) -> None:
    """Compare a cut model with a whole one; a rank has at most `share` of its elements.

    `tolerance` is relative to a tensor's largest element.
    """
    rank, size = group.rank, group.size
    whole, model = make_model(), make_model()
    links = CellLinks()
    parallel = ParallelConfig(tensor=size)
    plan = cell_plan_of(task, model, parallel)
    assert plan is not None
    store_in_memory_order(whole, plan.dims)
    expected = run_once(whole)
    cut = CutModel(model, plan, parallel.cell, links)
    cut.bind(Mesh(rank, size, parallel.cell), group)
    cut.take_place(rank)
    assert_like(run_once(model), expected, tolerance)
    shared: list[Tensor] = []
    for (name, one), (_, other) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        mine = cut.cuts[name].part_of(one.grad, rank) if name in cut.cuts else one.grad
        assert_like(other.grad, mine, tolerance)
        shared += [] if name in cut.cuts else [other.grad.reshape(-1)]
        assert torch.equal(cut.whole(name, other) if name in cut.cuts else other, one)
    gradients = group.all_gather(torch.cat(shared))
    assert all(torch.equal(one, gradients[0]) for one in gradients), "what all places hold gets the same bits on all"
    assert sum(one.numel() for one in model.parameters()) < share * sum(one.numel() for one in whole.parameters())
    cut.take_place((rank + 1) % size, make_model().state_dict().items())
    for name, one in whole.named_parameters():
        if name in cut.cuts:
            assert torch.equal(model.get_parameter(name), cut.cuts[name].part_of(one, (rank + 1) % size))
    cut.take_place(rank, make_model().state_dict().items())
    cut.become_whole()
    model.zero_grad()
    assert torch.equal(run_once(model), expected), "whole again, it computes by itself"
    parameters = dict(model.named_parameters())
    cut.become_part()
    model.zero_grad()
    assert_like(run_once(model), expected, tolerance)
    for name, one in whole.named_parameters():
        assert model.get_parameter(name) is parameters[name], "what an optimizer has stays"
        assert torch.equal(parameters[name], cut.cuts[name].part_of(one, rank) if name in cut.cuts else one)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "on_devices"), [(2, True), (4, False)])
def test_parts_compute_what_the_whole_does(size: int, on_devices: bool) -> None:
    """Outputs and gradients in float64, where a wrong or missing sum would show in the first digits."""
    in_memory(of_rank, size, on_devices=on_devices)


def test_a_pass_without_peers_computes_with_a_part_and_leaves_the_model_whole() -> None:
    """It covers all stages, since the process does not know yet which one it will run."""
    model = Decoder(replace(SHAPE, tied=False)).double()
    parallel = ParallelConfig(tensor=2, pipeline=2)
    plan = cell_plan_of(TASK, model, parallel)
    assert plan is not None
    cut = CutModel(model, plan, parallel.cell, CellLinks())
    weights, expected = {name: one.data_ptr() for name, one in model.named_parameters()}, run_once(model)
    with cut.without_peers():
        assert model.get_parameter("blocks.1.mlp.down.weight").shape == (SHAPE.dim, SHAPE.hidden // 2)
        assert run_once(model).shape == expected.shape
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == weights and cut.place is None
    model.zero_grad()
    assert torch.equal(run_once(model), expected)


def with_experts(rank: int, size: int) -> None:
    """Routers compute in fp32 whatever the rest uses, which limits the precision of the sums over ranks."""
    shape = replace(SHAPE, experts=8, expert_hidden=6, shared_hidden=12)
    group = group_of("world", rank, size)

    def make() -> Decoder:
        torch.manual_seed(3)
        return Decoder(shape).double()

    compare(make, group, 0.7, tolerance=1e-6)
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "on_devices"), [(2, True), (4, False)])
def test_parts_of_a_model_with_experts_compute_what_the_whole_does(size: int, on_devices: bool) -> None:
    """Each rank has some of the experts, and all ranks route all tokens."""
    in_memory(with_experts, size, on_devices=on_devices)


@pytest.mark.parametrize(
    ("changes", "degree", "message"),
    [
        ({}, 3, "parallel.tensor: 3 does not work with task.params.model.heads: 8, since"),
        ({"kv_heads": 2}, 4, "parallel.tensor: 4 does not work with task.params.model.kv_heads: 2, since"),
        ({"hidden": 6}, 4, "parallel.tensor: 4 does not work with task.params.model.hidden: 6, since"),
    ],
)
def test_a_degree_has_to_divide_what_is_cut(changes: dict[str, int], degree: int, message: str) -> None:
    shape = DecoderShape(**{"vocabulary": 11, "dim": 16, "heads": 8, "kv_heads": 4, "hidden": 12, **changes})
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(TASK, Decoder(shape), ParallelConfig(tensor=degree))


class Cutting(Witness):
    """A task with its own plan."""

    def __init__(self, **plan: str) -> None:
        super().__init__()
        self._plan = plan

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return Placements(self._plan)  # type: ignore[arg-type]


class Block(nn.Module):
    """One layer of each kind that a plan may name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 3), nn.LayerNorm(4), nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"up": "column"}, "parallel.tensor: 2 does not work with the 3 columns of 'up'"),
        ({"norm": "column"}, "'norm' by columns, which a LayerNorm cannot be"),
        ({"down": "row"}, "parallel.tensor: 2 does not work with the 3 rows of 'down'"),
        ({"*.up": "column"}, r"names '\*.up', and the model has no such module"),
    ],
)
def test_a_plan_that_does_not_fit_its_model_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(Cutting(**plan), Block(), ParallelConfig(tensor=2))


class Failing(Witness):
    """A task with a plan for some degrees only, or for none."""

    def __init__(self, plan: object) -> None:
        super().__init__()
        self._plan = plan

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return self._plan if self._plan is None else Placements(self._plan[degrees.tensor])  # type: ignore[index, return-value]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "returns None.* also for 1"),
        ({1: ["up"]}, "raises AttributeError: 'list' object has no attribute 'items'"),
        ({2: {"up": "column"}}, "raises KeyError: 1.* also for 1"),
        ({1: {"up": "colwise"}}, r"raises ValueError: `tensor` has 'up': 'colwise'; it knows column, row"),
    ],
)
def test_a_plan_that_cannot_be_asked_for_one_rank_is_refused_in_words(plan: object, message: str) -> None:
    """This applies even if nothing is cut: gradients are measured by the parts that all degrees have in common."""
    with pytest.raises(ConfigError, match=rf"placements\(model, Degrees\(tensor=1, .*\)\) of Failing {message}"):
        cut_dims_of(Failing(plan), Block())


def test_frozen_weights_that_commits_do_not_hold_are_cut_like_others() -> None:
    """Example: the base of adapters. A rank that moves to another place takes that place's part."""
    parallel = ParallelConfig(tensor=2)
    model, whole = make_model(), make_model()
    model.embed.requires_grad_(requires_grad=False)
    for one in model.blocks:
        one.requires_grad_(requires_grad=False)
    leave_base_out(model)
    plan = cell_plan_of(TASK, model, parallel)
    assert plan is not None
    cut = CutModel(model, plan, parallel.cell, CellLinks())
    assert not set(cut.cuts) & model.state_dict().keys(), "commits hold nothing of what is cut"
    for place, weights in ((0, None), (1, all_weights(whole).items())):
        cut.take_place(place, weights)
        for name, one in whole.named_parameters():
            mine = cut.cuts[name].part_of(one, place) if name in cut.cuts else one
            assert model.get_parameter(name).equal(mine)


def test_more_parts_than_grains_end_at_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"parallel.tensor: 2 and parallel.expert: 64 do not work with 128 parts, of which a dimension has 64",
    ):
        check_fits_cells(Cutting(), ParallelConfig(tensor=2, expert=64))


@pytest.mark.parametrize(
    ("experts", "degrees", "message"),
    [
        (4, {"expert": 3}, "parallel.expert: 3 does not work with the 4 experts of 'blocks.0.mlp.experts'"),
        (0, {"expert": 2}, "parallel.expert: 2 does not work with Decoder, which has no experts"),
        (6, {"expert": 2, "tensor": 2}, "parallel.tensor: 2 and parallel.expert: 2 do not work with the 6 experts of"),
    ],
)
def test_experts_that_cannot_be_spread_are_refused(experts: int, degrees: dict[str, int], message: str) -> None:
    shape = {"vocabulary": 11, "dim": 16, "heads": 8, "experts": experts}
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(TASK, Decoder(DecoderShape(**shape)), ParallelConfig(**degrees))


class Opaque(CausalLM):
    """A language model with a user's own model class."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(Opaque(model={}), id="own"),
        pytest.param(Opaque(hf={"config": {"model_type": "llama"}}), marks=WITH_TRANSFORMERS, id="hf"),
        pytest.param(Preferences(hf={"path": "base"}, lora={"r": 2}), marks=WITH_TRANSFORMERS, id="pairs"),
        pytest.param(Witness(), id="none"),
    ],
)
def test_a_model_of_which_nothing_is_said_is_whole_wherever_it_is(task: Task) -> None:
    """This holds in every shard mode; any other degree is refused."""
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    assert cut_dims_of(task, model) == {}
    for shards in ("none", "optimizer", "gradients", "parameters"):
        assert cell_plan_of(task, model, ParallelConfig(shards=shards)) is None
    for key in ("tensor", "pipeline", "context"):
        with pytest.raises(ConfigError, match="placements"):
            cell_plan_of(task, model, ParallelConfig.model_validate({key: 2}))


@pytest.mark.parametrize(("key", "other"), [("tensor", "shards"), ("pipeline", "shards"), ("context", "recompute")])
def test_a_task_without_placements_hears_what_else_there_is(key: str, other: str) -> None:
    message = rf"parallel.{key}: 2 does not work with Witness, which does not say how .*, use parallel.{other}"
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(Witness(), nn.Linear(2, 2), ParallelConfig.model_validate({key: 2}))
