"""The cut of a model's parameters into grains: ties, frozen tensors, groups, and what ranks compare of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elastic_train.checkpoint.format.weights_digest import join_digests, weights_digest
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.model_layout import check_memory, describe_layout, layout_of
from elastic_train.job.state import build_state
from elastic_train.shards.digest import grain_digests, tensor_digests
from elastic_train.shards.grains import GRAIN


class Tied(nn.Module):
    """An embedding that is the head's weight, too; a frozen scale; a bias."""

    def __init__(self, *, is_tied: bool = True, is_frozen: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, GRAIN)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=not is_frozen)
        self.head = nn.Linear(GRAIN, 3)
        if is_tied:
            self.head.weight = self.embed.weight


def described(model: nn.Module) -> list[str]:
    return list(describe_layout(layout_of(model, torch.optim.SGD(model.parameters(), lr=0.1))))


def test_a_line_says_what_each_parameter_is() -> None:
    assert described(Tied()) == [
        "scale float32 [], frozen, grains from 0 on",
        "embed.weight and head.weight float32 [3, 65536], in parameter group 0, grains from 1 on",
        "head.bias float32 [3], in parameter group 0, grains from 4 on",
    ]


def test_a_tie_or_a_frozen_tensor_tells_models_of_equal_shapes_apart() -> None:
    """Their norms would be of other grains."""
    kinds = [Tied(is_tied=is_tied, is_frozen=is_frozen) for is_tied in (False, True) for is_frozen in (False, True)]
    assert len({tuple(described(kind)) for kind in kinds}) == 4
    shapes = {tuple((name, tensor.shape) for name, tensor in kind.state_dict().items()) for kind in kinds}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("of_weight", "message"),
    [
        (lambda weight: nn.Parameter(weight.detach().view(4, 3)), "'a' and 'b' are two parameters that share memory"),
        (lambda weight: nn.Parameter(weight.detach()[1:]), "'a' and 'b' are two parameters that share memory"),
        (lambda weight: nn.Parameter(torch.ones(3, 4).T), r"'b' is not contiguous \(strides \[1, 4\]"),
        (lambda weight: nn.Parameter(torch.ones(1).expand(3)), r"'b' is not contiguous \(strides \[0\]"),
        (lambda weight: weight, None),
        (lambda weight: nn.Parameter(torch.zeros(0, 3)), None),
    ],
)
def test_parameters_that_shards_would_lay_out_otherwise_are_refused(
    of_weight: Callable[[nn.Parameter], nn.Parameter], message: str | None
) -> None:
    """Views of one another, and other strides; without shards both are as the model has them."""
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(3, 4))
    model.b = of_weight(model.a)
    config = OptimizerConfig()
    build_state(model, config, 3, "cpu", is_fp16=False)
    if message is None:
        check_memory(model)
        return
    with pytest.raises(ConfigError, match=message):
        build_state(model, config, 3, "cpu", is_fp16=False, parallel=ParallelConfig(shards="optimizer"))


def test_the_weights_digest_is_that_of_all_grains_whoever_holds_them() -> None:
    """Holders of grains would send their digests; nobody needs the tensors."""
    model = Tied()
    layout = layout_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    known = dict(model.named_parameters(remove_duplicate=False))
    grains: dict[int, bytes] = {}
    for tensor in layout.tensors:
        content = memoryview(known[tensor.names[0]].detach().numpy().tobytes())
        grains |= dict(zip(tensor.grains, grain_digests(content, 4), strict=True))
    assert join_digests(tensor_digests(layout, grains)) == weights_digest(model)
