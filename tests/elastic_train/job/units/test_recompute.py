"""Recomputed blocks keep less memory and have the same bits: gradients, and buffers that passes change."""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from elastic_train.errors import ConfigError
from elastic_train.job.units.blocks import Recompute, comparing_blocks, recompute_blocks, same_bits


class Block(nn.Module):
    """Dropout, and statistics that a pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.3), nn.BatchNorm1d(128))
        self.out = nn.Linear(128, 32)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.out(self.layers(x))  # type: ignore[no-any-return]


class Reading(Block):
    """A block whose result depends on buffers and attributes that its earlier passes set."""

    average: Tensor
    cached: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = spectral_norm(self.out)
        self.register_buffer("average", torch.ones(32))
        self.register_buffer("cached", torch.ones(32), persistent=False)
        self.plain, self.num_calls = torch.ones(32), 0

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        self.num_calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.cached = self.cached + self.average
        self.plain.add_(self.average)
        scaled = x * self.average.clone() + x * self.cached + x * self.plain.clone()
        return super().forward(scaled, scale=scale / self.num_calls)


class Net(nn.Module):
    """Four such blocks."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def step(how: Recompute) -> tuple[dict[str, Tensor], int]:
    """Return gradients and buffers after a step, and the bytes kept for its backward pass."""
    torch.manual_seed(1)
    model, x = Net(), torch.randn(64, 32)
    recompute_blocks(model, how)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().sum()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    num_bytes = sum(size for place, size in kept.items() if place not in weights)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients | dict(model.named_buffers()), num_bytes


@pytest.mark.parametrize("how", ["units", "selective"])
def test_what_is_computed_again_has_the_same_bits(how: Recompute) -> None:
    """Dropout masks are the same; running statistics count a batch once."""
    expected, _ = step("none")
    found, _ = step(how)
    assert found.keys() == expected.keys() and len(expected) == 4 * (6 + 3)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("how", ["units", "selective"])
def test_a_second_pass_reads_the_buffers_and_attributes_that_the_first_one_read(how: Recompute) -> None:
    """Spectral norm, averages in place and by assignment, a plain tensor, a counter: three steps have equal bits."""

    def train(how: Recompute) -> list[Tensor | int]:
        torch.manual_seed(1)
        model, x = Net(Reading), torch.randn(64, 32)
        recompute_blocks(model, how)
        for _ in range(3):
            model(x).square().sum().backward()
        left = [one for block in model.blocks for one in (block.plain, block.num_calls)]
        return [*(one.grad for one in model.parameters() if one.grad is not None), *model.buffers(), *left]

    for found, expected in zip(train(how), train("none"), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


class Keeping(nn.Module):
    """A block that reads state it has just changed; `how` is where it keeps it."""

    total = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.kept: dict[str, Any] = {"n": 0, "t": [torch.ones(())], "last": deque([1.0], maxlen=3), "a": np.ones(1)}
        self.generators = [torch.Generator().manual_seed(1), random.Random(1)]
        self.own, self.owner = np.random.default_rng(1), SimpleNamespace(n=0)

    def scale(self) -> Any:
        kept = self.kept
        if self.how == "containers":
            kept["n"] += 1
            kept["t"][0].mul_(1.1)
            kept["last"].append(kept["n"])
            kept["a"] *= 1.1
            return kept["t"][0].clone() * sum(kept["last"]) * float(kept["a"][0])
        if self.how == "generators":
            drawn = self.generators[1].random() + self.own.random()  # type: ignore[union-attr]
            return torch.rand(8, generator=self.generators[0]) * drawn
        if self.how == "drawn by numpy and Python":
            return torch.tensor(np.random.rand(8) + random.random(), dtype=torch.float32)
        if self.how == "object":
            self.owner.n += 1
            return torch.tensor(float(self.owner.n))
        if self.how == "class":
            Keeping.total += 1
            return torch.tensor(float(Keeping.total))
        return self.frozen.mul_(1.1).clone()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) * self.scale())


def trained(kept: str, how: Recompute) -> list[Tensor]:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    model = nn.Module()
    model.blocks = nn.ModuleList(Keeping(kept) for _ in range(3))
    recompute_blocks(model, how)
    for number in range(3):
        x = torch.randn(4, 8)
        with comparing_blocks() if number == 0 else contextlib.nullcontext():
            for block in model.blocks:
                x = block(x)
        x.square().sum().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("how", ["units", "selective"])
@pytest.mark.parametrize("kept", ["containers", "generators", "drawn by numpy and Python"])
def test_a_second_pass_begins_with_containers_and_generators_as_the_first_did(kept: str, how: Recompute) -> None:
    """This includes the generators of numpy and Python; comparing a block's two passes changes nothing."""
    assert all(map(torch.equal, trained(kept, how), trained(kept, "none")))


@pytest.mark.parametrize("kept", ["object", "class", "parameter"])
def test_a_block_that_differs_when_it_is_computed_again_is_refused(kept: str) -> None:
    with pytest.raises(
        ConfigError, match=r"recompute does not work with block 'blocks.0' \(Keeping\), whose results differ"
    ):
        trained(kept, "units")


def test_blocks_keep_their_input_alone() -> None:
    """The tensors that torch stores outside the graph for `selective` are not counted here."""
    _, whole = step("none")
    _, least = step("units")
    assert least <= 6 * 64 * 32 * 4 and 5 * least < whole


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recompute does not work with Linear, which has no blocks, since .*: set"):
        recompute_blocks(nn.Linear(2, 2), "units")


def test_bits_are_compared_of_every_shape() -> None:
    """Torch cannot view the strides of an empty numpy tensor as bytes."""

    def empty() -> Tensor:
        return torch.from_numpy(np.nonzero(np.zeros((2, 3)))[0])

    assert same_bits(empty(), empty()) and not same_bits(empty(), torch.zeros(1, dtype=torch.int64))
    nan = torch.tensor([[math.nan, 0.0]] * 2)
    assert same_bits(nan.T, nan.T.clone()) and not same_bits(nan, torch.tensor([[math.nan, -0.0]] * 2))
