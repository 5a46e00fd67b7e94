"""A real model of a dozen parameters of a few elements, which the product's own state trains, whole or in shards.

Every parameter is a grain of its own, so that shares are cut between them. Two are updated by other settings, and one
is frozen: flat vectors of three kinds. The witness's counts and the digest word of the modelled weights are its
buffers, which every rank has whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from chaos.sim.modelled.training import Gradient, hash_of
from elastic_train.config.schema import Config
from elastic_train.core.keyed_random import derive, mix64_array
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
        for number, values in enumerate(_floats_of(0, _SHAPES, -4)):
            self.register_parameter(f"p{number}", nn.Parameter(values.clone()))
        self.register_buffer("counts", torch.zeros(num_rows, dtype=torch.int64))
        self.register_buffer("digest", torch.zeros(2, dtype=torch.int64))
        self.gradient: Gradient | None = None
        self._known: list[nn.Parameter] = []

    def add_gradient(self, ids: tuple[int, ...]) -> None:
        """Add a lane's gradient, which follows from its samples and from the weights."""
        trained = self._trained()
        leaf = torch._foreach_add(_leaf_of(ids), [one.detach() for one in trained], alpha=_SHARE)
        gradients = [one.grad for one in trained if one.grad is not None]
        torch._foreach_add_(gradients, leaf)  # a single addition: the sum of the leaf's sibling may be there

    def _trained(self) -> list[nn.Parameter]:
        if not self._known:
            self._known = [one for one in self.parameters() if one.requires_grad]
        return self._known

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
    return build_state(
        model, config.optimizer, total_steps, "cpu", is_fp16=False, groups=_GROUPS, parallel=config.parallel
    )


@lru_cache(1 << 12)
def _leaf_of(ids: tuple[int, ...]) -> list[Tensor]:
    """Return a lane's part of the gradient that its samples alone decide, by trained parameter."""
    frozen = {name for group in _GROUPS if group.is_frozen for name in group.names}
    return _floats_of(hash_of(ids), [shape for place, shape in enumerate(_SHAPES) if f"p{place}" not in frozen], 0)


def _floats_of(key: int, shapes: Sequence[tuple[int, ...]], exponent: int) -> list[Tensor]:
    """Return floats of 2^-8 to 2^8, times a power of two, of either sign."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    words = mix64_array(np.arange(sum(sizes), dtype=np.uint64) + np.uint64(derive(key)))
    mantissas = 1.0 + (words >> np.uint64(8) & np.uint64(0xFFFFFF)) / (1 << 24)
    signs = 1.0 - 2.0 * (words >> np.uint64(40) & np.uint64(1))
    values = np.ldexp(signs * mantissas, (words % np.uint64(16)).astype(np.int64) - 8 + exponent)
    parts = torch.split(torch.from_numpy(values.astype(np.float32)), sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
