"""An average of the weights over the steps: one moment more, which is saved, cut and handed over as an optimizer's are.

It is the exponential moving average, debiased as Adam's moments are (Kingma & Ba, 2015, section 3): after step t the
weights of step i count for decay^(t - i), and those before the first step not at all. A step whose update is left out
leaves it alone. It is updated element by element, so that no cut shows in it.
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

    `num_updates` is how many of the run's steps have updated weights before the one that does: steps that left out
    their update do not count, or the first weights would be in the average. A parameter that has
    no average yet begins with its weights before the step, as a share of one does.
    """
    begun: dict[Tensor, Tensor] = {}

    def begin(one: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the weights aside: torch's optimizers prepare the state of a parameter that has none at all."""
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
    """Move every average to the weights by a share of the way."""
    if trained := _trained(optimizer):
        torch._foreach_lerp_([optimizer.state[one][AVERAGE] for one in trained], trained, share)
