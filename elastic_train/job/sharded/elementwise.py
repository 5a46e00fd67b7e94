"""Whether an optimizer updates element by element, so that what it keeps can be cut where parameters are."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.errors import ConfigError
from elastic_train.shards.grains import ALIGN


def moments_of(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's tensors that have a number for each of a parameter's elements.

    Found by trying it on one parameter, whole and in two parts. Raises ConfigError for an optimizer that updates, or
    keeps, anything else: its update would depend on where a parameter is cut.
    """
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 2, ALIGN, generator=generator)
    try:
        (whole,), (upper, lower) = _tried(optimizer, [values], [gradients]), _tried(optimizer, [*values], [*gradients])
    except (RuntimeError, ValueError) as error:
        raise _not_elementwise(optimizer, f"it does not update a part of one: {error}") from error
    for name in whole:
        if not torch.equal(whole[name], torch.stack([upper[name], lower[name]])):
            raise _not_elementwise(optimizer, f"'{name}' of a part differs from that part of the whole's")
    return [name for name in whole if name != "parameter"]


def _tried(optimizer: Optimizer, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return parameters, and the tensors that such an optimizer keeps of each but counts of steps, after a step."""
    known = inspect.signature(type(optimizer)).parameters
    parameters = [nn.Parameter(value.clone()) for value in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    twin = type(optimizer)(parameters, **{key: value for key, value in optimizer.defaults.items() if key in known})
    twin.step()
    kept = [{name: value for name, value in twin.state.get(one, {}).items() if name != "step"} for one in parameters]
    tensors = [{name: value for name, value in one.items() if isinstance(value, Tensor)} for one in kept]
    return [{"parameter": one.detach(), **state} for one, state in zip(parameters, tensors, strict=True)]


def _not_elementwise(optimizer: Optimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} does not update a parameter element by element ({why}), so its state cannot be "
        "sharded: set parallel.shards to none, or optimizer.name to adamw"
    )
