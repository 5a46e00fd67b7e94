"""Experts compute what a loop over tokens does; what their routers add is the lane's own; each world has one hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_train.config.sources import load_config
from elastic_train.planning.arithmetic.layouts import Layout, place_elements
from elastic_train.planning.reading import read_config
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.experts import MixtureOfExperts, RouterLosses
from elastic_train.tasks.decoder.model import MLP, Decoder, DecoderShape, drawn_weights
from tests.elastic_train.training.jobs import config, result, succeed
from tests.elastic_train.training.whole_runs.compared import LANGUAGE
from tests.memory_job import start

DIM, HIDDEN, EXPERTS = 8, 12, 4
MODEL = {
    "vocabulary": 64, "dim": 16, "depth": 2, "heads": 4, "hidden": 24, "dropout": 0.1, "experts": 4,
    "expert_hidden": 20, "shared_hidden": 8,
}  # fmt: skip


def made(per_token: int, *, has_shared: bool = False) -> MixtureOfExperts:
    torch.manual_seed(2)
    block = MixtureOfExperts(DIM, HIDDEN, EXPERTS, per_token, MLP(DIM, 6) if has_shared else None)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block.double()


def by_token(block: MixtureOfExperts, x: Tensor) -> Tensor:
    """Send each token to its experts, one after the other."""
    rows = []
    for token in x.flatten(0, 1):
        probabilities = (block.router.weight.float() @ token.float()).softmax(0)
        likeliest = sorted(range(EXPERTS), key=lambda expert: -probabilities[expert].item())[: block.per_token]
        total = sum(probabilities[expert] for expert in likeliest) if block.per_token > 1 else 1.0
        row = torch.zeros(DIM, dtype=x.dtype) if block.shared is None else block.shared(token)
        for expert in likeliest:
            gate, up, down = (weight[expert] for weight in (block.experts.gate, block.experts.up, block.experts.down))
            row = row + probabilities[expert] / total * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("per_token", "has_shared"), [(1, False), (2, True), (4, False)])
def test_experts_compute_what_a_loop_over_tokens_does(per_token: int, has_shared: bool) -> None:
    """Outputs, and gradients of tokens, router and experts."""
    block, found = made(per_token, has_shared=has_shared), []
    for run in (block, lambda x: by_token(block, x)):
        x = torch.randn(3, 5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = run(x)
        found.append((out, torch.autograd.grad(out.square().sum(), [x, *block.parameters()])))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-4)  # routers compute in fp32
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_an_expert_without_tokens_is_no_trouble() -> None:
    block = made(1)
    block.router.weight.data.zero_()  # then all are alike, and one of them is taken
    block(torch.randn(2, 3, DIM, dtype=torch.float64)).sum().backward()
    used = [bool(gradient.any()) for gradient in block.experts.gate.grad.unbind()]  # type: ignore[union-attr]
    assert sum(used) == 1
    assert block(torch.empty(0, 3, DIM, dtype=torch.float64)).shape == (0, 3, DIM)


def test_routers_are_held_to_equal_shares_and_small_logits() -> None:
    """Over the places that are asked for alone; at equal shares a lane adds its number of tokens, times the factor."""
    logits = torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(4))
    chosen = logits.topk(2).indices
    places = torch.tensor([0, 2, 3, 5])
    losses = RouterLosses(places, balance=0.5, z=0.1)
    losses.add(logits, chosen)
    shares = [sum(expert in chosen[place] for place in places.tolist()) / 8 for expert in range(EXPERTS)]
    likely = logits[places].softmax(-1).mean(0)
    expected = 0.5 * 4 * EXPERTS * sum(share * p for share, p in zip(shares, likely, strict=True))
    expected = expected + 0.1 * logits[places].exp().sum(-1).log().square().sum()
    torch.testing.assert_close(torch.stack(losses.terms).sum(), expected)
    equal = RouterLosses(torch.arange(EXPERTS), balance=0.5, z=0.0)
    equal.add(torch.zeros(EXPERTS, EXPERTS), torch.arange(EXPERTS)[:, None])
    assert float(sum(equal.terms)) == pytest.approx(0.5 * EXPERTS)


def test_training_alone_adds_what_routers_are_held_to() -> None:
    """And by what the task says: without factors both losses are one."""
    batch = {"tokens": torch.arange(12).view(2, 6), "places": torch.arange(5), "targets": torch.arange(1, 6)}
    totals = {}
    for name, factors in {"none": (0.0, 0.0), "balance": (0.1, 0.0), "z": (0.0, 0.1)}.items():
        task = CausalLM(model={**MODEL, "dropout": 0.0}, balance_loss=factors[0], router_z_loss=factors[1])
        torch.manual_seed(1)
        model = task.build_model()
        totals[name] = [task.loss(model.train(is_so), batch).total.item() for is_so in (True, False)]
    assert totals["none"][1] == totals["balance"][1] == totals["z"][1] == pytest.approx(totals["none"][0])
    assert min(totals["balance"][0], totals["z"][0]) > totals["none"][0] + 0.5


def test_weights_are_drawn_one_by_one_as_they_are_together() -> None:
    shape = DecoderShape(**MODEL)  # type: ignore[arg-type]
    torch.manual_seed(6)
    model = Decoder(shape)
    torch.manual_seed(6)
    for name, tensor in drawn_weights(shape):
        assert torch.equal(model.get_parameter(name), tensor)
    assert 0.001 < float(model.get_parameter("blocks.1.mlp.experts.down").detach().std()) < 0.015


@pytest.mark.heavy
def test_a_plan_counts_experts_and_the_work_of_those_that_a_token_goes_to(tmp_path: Path, rows: Path) -> None:
    """On fakes, whose routers choose nothing: tokens are dealt out evenly."""
    path = config(tmp_path, rows, {**LANGUAGE, "task": task_of(MODEL)})
    read = read_config(load_config(path))
    with torch.device("meta"):
        model = Decoder(DecoderShape(**MODEL))  # type: ignore[arg-type]
    assert read.facts.num_tensors == len(list(model.parameters()))
    experts = 4 * 3 * 16 * 20
    assert [unit.experts for unit in read.facts.blocks] == [experts, experts]
    spread = read_config(load_config(path, {"parallel.expert": 4})).layout
    assert spread.runs_today and replace(spread, pipeline=2).runs_today
    assert replace(spread, recompute="units", tensor=2).runs_today and replace(spread, shards="parameters").runs_today
    whole = place_elements(read.facts, Layout(), trained=False)
    assert whole - place_elements(read.facts, spread, trained=False) == 2 * experts * 3 // 4
    dense = read_config(load_config(config(tmp_path / "dense", rows, {**LANGUAGE, "task": task_of({"hidden": 40})})))
    extra = read.facts.blocks[0].forward.flops - dense.facts.blocks[0].forward.flops
    # Two experts of width 20 are as much work as an MLP of width 40; router and shared expert come on top.
    assert extra == pytest.approx(2 * read.facts.tokens * (16 * 4 + 3 * 16 * 8), rel=1e-2)


def task_of(changes: Mapping[str, object]) -> dict[str, object]:
    model = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 4, "dropout": 0.1, **changes}
    return {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"model": model, "max_tokens": 16}}


@pytest.mark.slow
def test_experts_give_the_same_bits_in_any_world(tmp_path: Path, rows: Path) -> None:
    """Also where blocks are computed again, and where ranks hold shares of them."""
    found = []
    for number, (num_ranks, how) in enumerate([(1, []), (3, ["units", "parameters"])]):
        folder = tmp_path / str(number)
        keys = [word for pair in zip(("--parallel.recompute", "--parallel.shards"), how) for word in pair]  # noqa: B905
        path = config(folder, rows, {**LANGUAGE, "task": task_of(MODEL)})
        succeed(start([path, *keys, "--max_steps", "3"], num_ranks=num_ranks))
        found.append((result(folder)["weights_sha256"], result(folder)["metrics"]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": -1}, "experts must be at least 0, not -1"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token must be from 1 to experts 2, not 3"),
        ({"expert": 2}, "model has no 'expert'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(model=changes)


def test_experts_without_a_token_have_a_gradient_of_zeros() -> None:
    """What ranks exchange follows from which weights have one, so each part of a block has to have it."""
    experts = made(1).experts
    out = experts.compute(torch.empty(0, DIM, dtype=torch.float64, requires_grad=True), [0] * EXPERTS)
    assert out.shape == (0, DIM)
    out.sum().backward()
    assert all(one.grad is not None and not one.grad.any() for one in experts.stacked)
