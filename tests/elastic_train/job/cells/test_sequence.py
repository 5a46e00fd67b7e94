"""Sequence-parallel tensor ranks compute the same as plain tensor ranks, and keep less for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.core.mesh import Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cell_plan import cell_plan_of, cut_dims_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.model_layout import store_in_memory_order
from elastic_train.job.units.blocks import recompute_blocks
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.placements import Degrees, Placements
from elastic_train.tasks.task import Task
from elastic_train.tasks.witness import Witness
from tests.elastic_train.job.cells.test_cut_model import assert_like
from tests.memory_machine import in_memory
from tests.memory_world import group_of

SHAPE = DecoderShape(vocabulary=11, dim=16, depth=2, heads=8, kv_heads=4, hidden=12, dropout=0.2)
SIZES = {"dim": 16, "heads": 8, "kv_heads": 4, "hidden": 12}
TASK = CausalLM(model=SIZES, max_tokens=16)


class Biased(Witness):
    """A task whose cut layers have biases, unlike the decoder's."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return Placements({"0": "split", "1": "column", "3": "row", "4": "tokens", "5": "join"})


def make_biased() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(6, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


def make_model(**changes: int) -> Decoder:
    torch.manual_seed(3)
    return Decoder(replace(SHAPE, **changes)).double()


def cut_of(model: nn.Module, group: Group, task: Task = TASK, *, sequence: bool) -> CutModel:
    parallel = ParallelConfig(tensor=group.size, sequence=sequence)
    plan = cell_plan_of(task, model, parallel)
    assert plan is not None
    cut = CutModel(model, plan, parallel.cell, CellLinks())
    cut.bind(Mesh(group.rank, group.size, parallel.cell), group)
    cut.take_place(group.rank)
    return cut


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    if isinstance(model, Decoder):
        return model(tokens)  # type: ignore[no-any-return]
    return model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def run_once(model: nn.Module, width: int = 8) -> Tensor:
    """Run forward and backward on the same tokens, with the same dropout; return the output."""
    torch.manual_seed(5)
    made = logits_of(model, torch.randint(3, 11, (3, width)))
    made.square().sum().backward()
    torch.randint(9, (1,))
    return made.detach()


def kept_bytes(model: nn.Module) -> int:
    """Return the memory that a forward pass keeps, without the model's own."""
    own, kept = {one.untyped_storage().data_ptr() for one in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a graph that saves its own outputs would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = logits_of(model, torch.zeros(3, 16, dtype=torch.int64))
        total = sum(kept.values())
    assert made.requires_grad
    return total


def of_rank(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    compare_tokens(make_model, TASK, group, share=0.75 if size == 2 else 0.6)
    mixture = {"experts": 8, "expert_hidden": 6, "shared_hidden": 8}
    compare_tokens(partial(make_model, **mixture), TASK, group, share=1.0)
    group.close()


def compare_tokens(
    make_model: Callable[[], nn.Module],
    task: Task,
    group: Group,
    *,
    share: float,
    tolerance: float = 1e-11,
    rounded: tuple[str, ...] = (),
) -> None:
    """Compare sequence-parallel ranks with plain tensor ranks and with the whole model; for a backward pass they keep
    at most `share` of what plain ranks keep. The gradients of the parameters `rounded` are added in another order."""
    rank, size = group.rank, group.size
    whole, plain, model = make_model(), make_model(), make_model()
    store_in_memory_order(whole, cut_dims_of(task, whole))
    expected = run_once(whole)
    cut_of(plain, group, task, sequence=False)
    cut = cut_of(model, group, task, sequence=True)
    added = [
        f"{name}.{one}"
        for name, module in model.named_modules()
        for one, _ in module.named_parameters(recurse=False)
        if cut.plan.tensor.get(name) == "tokens" or (cut.plan.tensor.get(name) == "row" and one == "bias")
    ]
    without, found, state = run_once(plain), run_once(model), torch.get_rng_state()
    assert torch.equal(found, without), "all that is computed token by token has the bits of before"
    assert_like(found, expected, tolerance)
    assert torch.equal(group.all_gather(state), state.expand(size, -1)), "all ranks draw as much"
    gradients = {name: one.grad for name, one in model.named_parameters()}
    for name, one in whole.named_parameters():
        mine, other = gradients[name], plain.get_parameter(name).grad
        assert mine is not None and other is not None and one.grad is not None
        assert torch.equal(mine, other) or name in (*added, *rounded), "of norms' gradients parts are added"
        assert_like(mine, cut.cuts[name].part_of(one.grad, rank) if name in cut.cuts else one.grad, tolerance)
    shared = torch.cat([one.reshape(-1) for name, one in gradients.items() if one is not None and name not in cut.cuts])
    assert torch.equal(group.all_gather(shared), shared.expand(size, -1)), "what all hold gets the same bits on all"

    kept_whole, kept = kept_bytes(plain.eval()), kept_bytes(model.eval())
    assert kept < share * kept_whole
    model.train().zero_grad()
    recompute_blocks(model, "units")
    assert torch.equal(run_once(model), found)
    for name, one in model.named_parameters():
        assert torch.equal(one.grad, gradients[name])  # type: ignore[arg-type]
    cut.become_whole()
    model.zero_grad()
    again = make_model()
    store_in_memory_order(again, cut.plan.dims)
    assert torch.equal(run_once(model, 7), run_once(again, 7)), "whole again, it computes by itself"
    uneven = make_model()
    cut_of(uneven, group, task, sequence=True)
    with pytest.raises(ConfigError, match=r"sequence does not work with rows of 7 tokens between . ranks, since"):
        run_once(uneven, 7)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "on_devices"), [(2, True), (4, False)])
def test_ranks_with_some_tokens_compute_what_those_with_all_do(size: int, on_devices: bool) -> None:
    """Outputs and gradients in float64, with dropout and recomputation, and only a part of the kept memory."""
    in_memory(of_rank, size, on_devices=on_devices)


def of_biased_rank(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    whole, plain, model, frozen = (make_biased() for _ in range(4))
    for name, one in frozen.named_parameters():
        one.requires_grad_(name.endswith("bias"))
    cut_of(plain, group, Biased(), sequence=False)
    cut = cut_of(model, group, Biased(), sequence=True)
    cut_of(frozen, group, Biased(), sequence=True)
    given = torch.randn(3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    expected, without, found, _ = made = [one(given) for one in (whole, plain, model, frozen)]
    assert torch.equal(found, without)
    assert_like(found, expected, 1e-11)
    for output in made:
        output.square().sum().backward()
    for name, one in whole.named_parameters():
        mine, other, alone = (tested.get_parameter(name).grad for tested in (model, plain, frozen))
        assert one.grad is not None and mine is not None and other is not None
        assert torch.equal(mine, other) or name in ("3.bias", "4.weight", "4.bias"), "parts of these are added"
        assert_like(mine, cut.cuts[name].part_of(one.grad, rank) if name in cut.cuts else one.grad, 1e-11)
        if name not in cut.cuts:
            assert torch.equal(group.all_gather(mine.reshape(-1)), mine.reshape(-1).expand(size, -1)), name
        assert (alone is not None) == name.endswith("bias")
        assert alone is None or torch.equal(alone, mine), "biases are trained where weights are not"
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "on_devices"), [(2, True), (4, False)])
def test_biases_of_layers_that_are_cut_have_one_gradient_on_all_ranks(size: int, on_devices: bool) -> None:
    """A row layer's bias is added to each rank's tokens, a column layer's to all tokens of its outputs."""
    in_memory(of_biased_rank, size, on_devices=on_devices)


class Sharing(Witness):
    """A task that declares a linear layer as dropout."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return Placements({"0": "column", "1": "dropout"})


class Cutting(Witness):
    """A task that says how matrices are cut, but nothing about tokens."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        return Placements({"0": "column", "1": "row"})


@pytest.mark.parametrize(
    ("task", "degree", "message"),
    [
        (
            Cutting(),
            2,
            r"parallel.sequence: true does not work with Cutting, which does not say how \(`tensor` of `placements`\)",
        ),
        (Sharing(), 2, "the task's placements have '1' as a dropout, which it is not"),
        (
            CausalLM(model=SIZES, max_tokens=14),
            4,
            r"parallel.sequence: true does not work with task.params.max_tokens: 14, since",
        ),
        (
            CausalLM(model={**SIZES, "heads": 3, "kv_heads": 3, "dim": 18}, max_tokens=24),
            3,
            r"rows that are padded to a multiple of 8 tokens \(task.params.fixed_width: false\)",
        ),
    ],
)
def test_what_cannot_share_out_tokens_is_refused(task: Any, degree: int, message: str) -> None:
    shape = {**SIZES, "heads": 3, "kv_heads": 3, "dim": 18} if degree == 3 else SIZES
    decoder: nn.Module = Decoder(DecoderShape(vocabulary=11, **shape))
    model = decoder if isinstance(task, CausalLM) else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=message):
        cell_plan_of(task, model, ParallelConfig(tensor=degree, sequence=True))


def test_rows_of_one_width_may_be_shared_out_between_any_number_of_ranks() -> None:
    sizes = {**SIZES, "heads": 3, "kv_heads": 3, "dim": 18}
    task = CausalLM(model=sizes, max_tokens=24, fixed_width=True)
    plan = cell_plan_of(task, Decoder(DecoderShape(vocabulary=11, **sizes)), ParallelConfig(tensor=3, sequence=True))
    assert plan is not None and plan.tensor["blocks.1.norm_mlp"] == "tokens"


def test_tokens_are_shared_out_between_tensor_ranks_alone() -> None:
    with pytest.raises(ValueError, match=r"parallel.sequence to false, or parallel.tensor to 2 or more"):
        Config.model_validate({"data": {"train": "rows"}, "parallel": {"sequence": True}})
