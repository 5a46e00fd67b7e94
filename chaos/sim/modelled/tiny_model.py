"""A real model of a dozen parameters of a few elements, which the product's own state trains, whole or in shards.

Every parameter is a grain of its own, so that shares are cut between them. Two are updated by other settings, and one
is frozen: flat vectors of three kinds. The witness's counts and the digest word of the modelled weights are its
buffers, which every rank has whole.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from chaos.sim.modelled.training import Gradient, hash_of
from elastic_train.config.schema import Config
from elastic_train.core.keyed_random import derive
from elastic_train.job.state import AppliedState, build_state
from elastic_train.tasks.task import ParameterGroup

_SHAPES = ((3,), (2, 2), (5,), (2, 3), (7,), (2, 4), (9,), (3, 1), (3, 3), (4,), (6,), (5, 1))
_GROUPS = (ParameterGroup(("p3", "p8"), lr_factor=0.5), ParameterGroup(("p6",), is_frozen=True))
_SHARE = 0.25
"""Of the weights, in every lane's gradient: a power of two, so that no kernel's fused addition rounds otherwise."""


class TinyModel(nn.Module):
    """The parameters, and beside them what is counted; `gradient` is what the next step counts."""

    counts: Tensor
    digest: Tensor

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        for number, shape in enumerate(_SHAPES):
            self.register_parameter(f"p{number}", nn.Parameter(_floats_of((number,), shape, -4)))
        self.register_buffer("counts", torch.zeros(num_rows, dtype=torch.int64))
        self.register_buffer("digest", torch.zeros(2, dtype=torch.int64))
        self.gradient: Gradient | None = None

    def add_gradient(self, ids: tuple[int, ...]) -> None:
        """Add a lane's gradient, which follows from its samples and from the weights."""
        trained = [one for one in self.parameters() if one.requires_grad]
        gradients = [one.grad for one in trained]
        torch._foreach_add_(gradients, _leaf_of(ids, tuple(one.shape for one in trained)))
        torch._foreach_add_(gradients, [one.detach() for one in trained], alpha=_SHARE)

    def counted(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers, and what they become with the step that is in place."""
        assert self.gradient is not None, "a step has a gradient"
        low, high = self.digest.tolist()
        digest = derive(high << 32 | low, self.gradient.digest, step)
        words = torch.tensor([digest & 0xFFFFFFFF, digest >> 32])
        return [(self.counts, self.counts + torch.from_numpy(self.gradient.counts)), (self.digest, words)]


def build_tiny_state(config: Config, num_rows: int, total_steps: int) -> AppliedState:
    """Build the product's state around such a model."""
    model = TinyModel(num_rows)
    return build_state(model, config.optimizer, total_steps, "cpu", is_fp16=False, groups=_GROUPS, parallel=config.parallel)


@lru_cache(1 << 12)
def _leaf_of(ids: tuple[int, ...], shapes: tuple[torch.Size, ...]) -> list[Tensor]:
    """Return a lane's part of the gradient that its samples alone decide, by parameter."""
    return [_floats_of((hash_of(ids), number), shape, 0) for number, shape in enumerate(shapes)]


def _floats_of(keys: tuple[int, ...], shape: tuple[int, ...], exponent: int) -> Tensor:
    """Return floats of 2^-8 to 2^8, times a power of two, of either sign."""
    words = [derive(*keys, place) for place in range(torch.Size(shape).numel())]
    values = [
        (1 - 2 * (word >> 40 & 1)) * 2.0 ** (word % 16 - 8 + exponent) * (1.0 + (word >> 8 & 0xFFFFFF) / (1 << 24))
        for word in words
    ]
    return torch.tensor(values).view(shape)
