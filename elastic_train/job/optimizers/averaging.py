"""Exponential moving average of the weights, kept as one more optimizer moment, which is saved and sharded like others.

It is debiased as Adam's moments are (Kingma & Ba, 2015, section 3): after step t the weights of step i count for
decay^(t - i), and the initial weights not at all. Skipped updates do not change it. The update is elementwise, so it
does not depend on how tensors are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_train.checkpoint.format.layout import AVERAGE


def keep_average(optimizer: Optimizer, decay: float, num_updates: Callable[[], int]) -> None:
    """Update the average of every parameter after each of the optimizer's steps.

    `num_updates` returns the number of updates before the current one; skipped steps do not count, or the initial
    weights would enter the average. A parameter without an average, e.g. of a new shard, starts from its weights before
    the step.
    """
    begun: dict[Tensor, Tensor] = {}

    def begin(one: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Set the weights aside: torch's optimizers initialize a parameter's state only if it is empty."""
        begun.update((each, each.detach().clone()) for each in _trained(one) if AVERAGE not in one.state.get(each, {}))

    def update(one: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        for parameter, weights in begun.items():
            one.state[parameter][AVERAGE] = weights
        begun.clear()
        _update(one, (1.0 - decay) / (1.0 - decay ** (num_updates() + 1)))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(update)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]


@torch.no_grad()
def _update(optimizer: Optimizer, share: float) -> None:
    """Move every average towards the weights by the fraction `share`."""
    if trained := _trained(optimizer):
        torch._foreach_lerp_([optimizer.state[one][AVERAGE] for one in trained], trained, share)
