"""Test by trial if the bits of an optimizer's update depend on how tensors are cut.

A kernel may round the last elements of a tensor differently from those it computes in vectors: torch's fused updates on
CPUs do, for three in a thousand of them. Cutting a tensor elsewhere then changes its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Sequence[dict[str, Any]]], Optimizer]
_SHORT, _NUM_SHORT, _STEPS = 15, 137, 2
"""Elements of a part too short for a vector, and number of parts: enough to see one difference in thousands."""


def shows_no_cut(make: MakeOptimizer, settings: Mapping[str, Any], device: torch.device | str | None = None) -> bool:
    """Return True if updates of one parameter have the same bits as updates of its small parts."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _STEPS, _NUM_SHORT * _SHORT, generator=generator).to(device)
    whole = _updated(make, settings, [values], [[gradient] for gradient in gradients])
    parts = _updated(make, settings, values.split(_SHORT), [gradient.split(_SHORT) for gradient in gradients])
    return torch.equal(whole, parts)


def _updated(
    make: MakeOptimizer, settings: Mapping[str, Any], values: Sequence[Tensor], steps: Sequence[Sequence[Tensor]]
) -> Tensor:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = make([{**settings, "params": parameters, "lr": 0.1}])
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])
