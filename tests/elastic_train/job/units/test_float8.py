"""Which linear layers compute in float8, and what is refused, with the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.plan import check_placements
from elastic_train.job.units import float8
from elastic_train.job.units.float8 import check_multiplies, check_repeats, scale_linear_layers
from elastic_train.parallel.devices.repeats import NotRepeatableError
from elastic_train.parallel.linear_products import ScaledLinear
from elastic_train.parallel.product_probe import Call
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape

SHAPE = DecoderShape(vocabulary=64, dim=32, depth=2, heads=4, kv_heads=1, experts=16, hidden=32, shared_hidden=32)


def scaled_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is ScaledLinear]


def test_layers_of_blocks_with_sizes_that_16_divides_are_scaled_and_keep_everything_else() -> None:
    """Neither the head nor one narrow head of keys and values is."""
    model = Decoder(SHAPE)
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    scale_linear_layers(model)
    names = [name.removeprefix("blocks.0.") for name in scaled_names(model) if name.startswith("blocks.0.")]
    mlp = [f"mlp.shared.{name}" for name in ("gate", "up", "down")]
    assert names == ["attention.q", "attention.o", "mlp.router", *mlp]
    assert not [name for name in scaled_names(model) if not name.startswith("blocks.")]
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert list(model.state_dict()) == list(before)
    Decoder(SHAPE).load_state_dict(model.state_dict())


def test_a_router_computes_as_the_model_has_it() -> None:
    """It switches autocast off, and float8 with it: the same experts are chosen."""
    model = Decoder(SHAPE)
    mixture, given = model.blocks[0].mlp, torch.randn(1, 8, 32)
    router = mixture.router
    scale_linear_layers(model)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(router(given), nn.functional.linear(given, router.weight))


class _Own(nn.Linear):
    """A layer with a forward pass of its own."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(16, 16)),
        lambda: nn.Sequential(nn.ModuleList([nn.Linear(16, 24), nn.Conv1d(16, 16, 1)])),
        lambda: nn.Sequential(nn.ModuleList([_Own(16, 16)])),
    ],
)
def test_a_model_without_such_layers_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        ConfigError, match=r"precision does not work with Sequential, which has no layer that fits.*bf16"
    ):
        scale_linear_layers(make())


@pytest.mark.parametrize("degree", [2, 4])
def test_parts_of_layers_that_do_not_fit_are_refused_before_a_model_is_built(degree: int) -> None:
    """Two ranks have 16 of the 32 rows, four have 8: they would be multiplied as bf16, unlike the same on one rank."""
    task = CausalLM(model={"vocabulary": 64, "dim": 32, "depth": 1, "heads": 4, "hidden": 64})
    tree = {"data": {"train": "rows"}, "precision": "fp8", "parallel": {"tensor": degree}}
    message = "precision does not work with the 32 columns of 'blocks.0.attention.q' on 4 tensor ranks, since float8"
    with pytest.raises(ConfigError, match=message) if degree == 4 else nullcontext():
        check_placements(task, Config.model_validate(tree))


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"NVIDIA A100, of compute capability 8\.0 \(8\.9 is the least\).*to bf16"):
        check_multiplies(torch.device("cuda"))


def test_a_torch_without_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*matrices: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Now _scaled_mm only supports per-tensor scaling")

    monkeypatch.setattr(float8, "scaled_product", lacks)
    with pytest.raises(
        ConfigError, match=r"work with torch .*, which lacks their kernel for this machine's CPU, .*to bf16"
    ):
        check_multiplies(torch.device("cpu"))


def test_products_that_do_not_repeat_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> None:
        raise NotRepeatableError("two runs gave different bits")

    monkeypatch.setattr(float8, "check_products", other)
    with pytest.raises(ConfigError, match=r"products in float8 \(two runs gave different bits\), since .*to bf16"):
        check_repeats([Call(8, 16, 16)], torch.device("cpu"))
