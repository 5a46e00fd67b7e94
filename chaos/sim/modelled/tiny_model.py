"""A real model of a dozen tiny parameters, trained by the product's own state, whole or in shards.

Every parameter is one grain, so shards are cut between parameters. Two have other optimizer settings, and one is
frozen: flat vectors of three kinds. Six are in two blocks, which are gathered one at a time if sharded. The witness's
counts and the digest of the modelled weights are buffers, whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from chaos.sim.modelled.training import Gradient, hash_of
from elastic_train.config.schema import Config
from elastic_train.core.keyed_random import derive, mix64_array
from elastic_train.job.build import build_state
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.state import AppliedState
from elastic_train.tasks.task import ParameterGroup

SHAPES: Mapping[str, tuple[int, ...]] = {
    "p0": (3,),
    "p1": (2, 2),
    "p2": (5,),
    "blocks.0.p3": (2, 3),
    "blocks.0.p4": (7,),
    "blocks.0.p5": (2, 4),
    "blocks.1.p6": (9,),
    "blocks.1.p7": (3, 1),
    "blocks.1.p8": (3, 3),
    "p9": (4,),
    "p10": (6,),
    "p11": (5, 1),
}
CUT_DIMS = {name: (len(shape) - 1) * (number % 2) for number, (name, shape) in enumerate(SHAPES.items())}
"""Dimension along which cells split each parameter: the first for vectors and some matrices, else the second."""
_GROUPS = (
    ParameterGroup(("blocks.0.p3", "blocks.1.p8"), lr_factor=0.5),
    ParameterGroup(("blocks.1.p6",), is_frozen=True),
)
_FROZEN = {name for group in _GROUPS if group.is_frozen for name in group.names}
_SHARE = 0.25
"""Share of the weights in each lane's gradient: a power of two, so that fused additions round alike."""


class _Part(nn.Module):
    """Some of the parameters; its forward pass adds a lane's gradient, including those of submodules."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        initial = _initial_weights()
        self._trained: list[str] = []
        for path in SHAPES:
            owner, _, name = path.rpartition(".")
            if owner == prefix:
                self.register_parameter(name, nn.Parameter(initial[path].clone()))
                if path not in _FROZEN:
                    self._trained.append(path)
        self._own = [path.rpartition(".")[2] for path in self._trained]

    def forward(self, leaf: Mapping[str, Tensor]) -> None:
        """Add a leaf, and `_SHARE` of the weights, to the gradients, which are unset if each lane has its own."""
        trained = [self._parameters[name] for name in self._own]
        weights = [one.detach() for one in trained if one is not None]
        added = torch._foreach_add([leaf[path] for path in self._trained], weights, alpha=_SHARE)
        for one, gradient in zip(trained, added, strict=True):
            assert one is not None, "a parameter by its name"
            one.grad = gradient if one.grad is None else one.grad.add_(gradient)  # adds to its sibling's gradient


class TinyModel(_Part):
    """The parameters and counting buffers; `gradient` is the next step's counts."""

    counts: Tensor
    digest: Tensor

    def __init__(self, num_rows: int) -> None:
        super().__init__("")
        self.blocks = nn.ModuleList(_Part(f"blocks.{number}") for number in range(2))
        self.register_buffer("counts", torch.zeros(num_rows, dtype=torch.int64))
        self.register_buffer("digest", torch.zeros(2, dtype=torch.int64))
        self.gradient: Gradient | None = None
        self.part_of: Callable[[tuple[int, ...]], Mapping[str, Tensor]] = leaf_of
        """Sample-dependent part of a lane's gradient."""

    def add_gradient(self, ids: tuple[int, ...]) -> None:
        """Add a lane's gradient, a function of its samples and the weights."""
        leaf = self.part_of(ids)
        self(leaf)
        for block in self.blocks:
            block(leaf)

    def counted(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers, each with its value after the next step."""
        assert self.gradient is not None, "a step has a gradient"
        low, high = self.digest.tolist()
        digest = derive(high << 32 | low, self.gradient.digest, step)
        words = torch.tensor([digest & 0xFFFFFFFF, digest >> 32])
        return [(self.counts, self.counts + torch.from_numpy(self.gradient.counts)), (self.digest, words)]


def build_tiny_state(config: Config, num_rows: int, total_steps: int) -> AppliedState:
    """Build the product's state around a tiny model."""
    return build_state(
        TinyModel(num_rows),
        config.optimizer,
        total_steps,
        "cpu",
        is_fp16=False,
        groups=_GROUPS,
        parallel=config.parallel,
        cell_plan=CellPlan(dims=CUT_DIMS) if config.parallel.cell.size > 1 else None,
        dims=CUT_DIMS,
    )


@cache
def _initial_weights() -> Mapping[str, Tensor]:
    return dict(zip(SHAPES, _floats_of(0, list(SHAPES.values()), -4), strict=True))


@lru_cache(1 << 12)
def leaf_of(ids: tuple[int, ...]) -> Mapping[str, Tensor]:
    """Return a lane's sample-dependent gradient, by trained parameter."""
    shapes = {name: shape for name, shape in SHAPES.items() if name not in _FROZEN}
    return dict(zip(shapes, _floats_of(hash_of(ids), list(shapes.values()), 0), strict=True))


def _floats_of(key: int, shapes: Sequence[tuple[int, ...]], exponent: int) -> list[Tensor]:
    """Return floats of random sign, magnitude 2^-8 to 2^8 times 2^`exponent`."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    words = mix64_array(np.arange(sum(sizes), dtype=np.uint64) + np.uint64(derive(key)))
    mantissas = 1.0 + (words >> np.uint64(8) & np.uint64(0xFFFFFF)) / (1 << 24)
    signs = 1.0 - 2.0 * (words >> np.uint64(40) & np.uint64(1))
    values = np.ldexp(signs * mantissas, (words % np.uint64(16)).astype(np.int64) - 8 + exponent)
    parts = torch.split(torch.from_numpy(values.astype(np.float32)), sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
