"""Cutting a model's parameters into grains: ties, frozen tensors, groups, and what ranks compare."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_train.checkpoint.format.dcp import join_digests, weights_digest
from elastic_train.errors import ConfigError
from elastic_train.job.model_layout import check_memory_is_apart, check_model, describe_layout, layout_of
from elastic_train.placement.grains import GRAIN, digests_of, tensor_digests


class Tied(nn.Module):
    """An embedding tied to the head's weight; a frozen scale; a bias."""

    def __init__(self, *, is_tied: bool = True, is_frozen: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, GRAIN)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=not is_frozen)
        self.head = nn.Linear(GRAIN, 3)
        if is_tied:
            self.head.weight = self.embed.weight


def described(model: nn.Module) -> list[str]:
    return list(describe_layout(layout_of(model, torch.optim.SGD(model.parameters(), lr=0.1), {})))


@pytest.mark.parametrize("start", [0, GRAIN])
def test_parameters_that_share_memory_without_being_one_are_refused(start: int) -> None:
    """They may share all or a part: stored elsewhere, as in shards, they would become two tensors."""
    model = Tied()
    check_memory_is_apart(model)
    memory = torch.zeros(3 * GRAIN + start)
    model.embed.weight = nn.Parameter(memory[: 3 * GRAIN].view(3, GRAIN))
    check_memory_is_apart(model)
    model.head.weight = nn.Parameter(memory[start:].view(3, GRAIN))
    with pytest.raises(ConfigError, match=r"'embed.weight' and 'head.weight' in the same memory.*itself \(one.weight"):
        check_memory_is_apart(model)
    model.requires_grad_(False)
    check_memory_is_apart(model)


def test_a_trained_part_of_a_frozen_tensor_is_found_behind_a_frozen_part_of_it() -> None:
    memory, model = torch.zeros(12), nn.Linear(3, 2)
    model.register_buffer("all", memory)
    model.bias = nn.Parameter(memory[:2], requires_grad=False)
    check_memory_is_apart(model)
    model.weight = nn.Parameter(memory[4:10].view(2, 3))
    with pytest.raises(ConfigError, match="'all' and 'weight' in the same memory"):
        check_memory_is_apart(model)


def test_parameters_that_are_parts_of_one_tensor_are_apart() -> None:
    model, memory = nn.Linear(3, 2), torch.zeros(2, 4)
    model.weight, model.bias = nn.Parameter(memory[:, 1:]), nn.Parameter(memory[:, 0])
    check_memory_is_apart(model)
    model.weight, model.bias = nn.Parameter(memory.view(-1)[:6].view(2, 3)), nn.Parameter(memory.view(-1)[6:])
    check_memory_is_apart(model)


class Counts(nn.Module):
    """Keeps a number outside of its buffers."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}


def test_a_model_whose_state_is_not_all_tensors_is_refused_in_words() -> None:
    check_model(nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(ConfigError, match=r"a dict as '0\._extra_state' in its state_dict"):
        check_model(nn.Sequential(Counts()))


def test_a_line_says_what_each_parameter_is() -> None:
    assert described(Tied()) == [
        "scale float32 [], frozen, grains from 0 on",
        "embed.weight and head.weight float32 [3, 65536], in parameter group 0, grains from 1 on",
        "head.bias float32 [3], in parameter group 0, grains from 4 on",
    ]


def test_a_tie_or_a_frozen_tensor_tells_models_of_equal_shapes_apart() -> None:
    """Otherwise their norms would be over different grains."""
    kinds = [Tied(is_tied=is_tied, is_frozen=is_frozen) for is_tied in (False, True) for is_frozen in (False, True)]
    assert len({tuple(described(kind)) for kind in kinds}) == 4
    shapes = {tuple((name, tensor.shape) for name, tensor in kind.state_dict().items()) for kind in kinds}
    assert len(shapes) == 1


def test_the_weights_digest_is_that_of_all_grains_whoever_holds_them() -> None:
    """Ranks send the digests of their grains; nobody needs the tensors."""
    model = Tied()
    layout = layout_of(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    known = dict(model.named_parameters(remove_duplicate=False))
    grains: dict[int, bytes] = {}
    for tensor in layout.tensors:
        content = memoryview(known[tensor.names[0]].detach().numpy().tobytes())
        grains |= dict(zip(tensor.grains, digests_of(content, 4, tensor.bounds), strict=True))
    assert join_digests(tensor_digests(layout, grains)) == weights_digest(model, {})
