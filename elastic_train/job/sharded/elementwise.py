"""What an optimizer keeps of every element where it updates element by element: it can be cut where parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.cuts import MakeOptimizer, shows_no_cut
from elastic_train.shards.grains import ALIGN

T = TypeVar("T")
_STEP, _STEPS = "step", 2
Kept = dict[str, Any]
"""A parameter's weights under "", and what an optimizer keeps of it."""
Settings = Mapping[str, Any]
"""Of a parameter group."""


@dataclass(frozen=True, slots=True)
class Slots:
    """What an optimizer keeps of a parameter: tensors that have a number for each of its elements, by name, and, where
    `count` is one, how many updates it has had, as torch does, under "step".
    """

    moments: tuple[str, ...]
    count: Tensor | None = None

    def filled(self, moments: Mapping[str, T], num_updates: float) -> dict[str, T | Tensor]:
        """Return the optimizer's state of a parameter, or of a part of one, that has had so many updates."""
        counted = {} if self.count is None else {_STEP: torch.full_like(self.count, num_updates)}
        return {**counted, **moments}

    def with_moment(self, name: str) -> Slots:
        """Return the same with one tensor more."""
        return replace(self, moments=(*self.moments, name))


def slots_of(optimizer: Optimizer, make: MakeOptimizer, device: torch.device | None = None) -> Slots:
    """Return what an optimizer keeps, found by trying one of its kind on a parameter, whole and in two parts.

    Raises ConfigError for an optimizer that updates, or keeps, anything else: its update would depend on where a
    parameter is cut. So does one that begins otherwise than with zeros, since that is how a share begins.
    """
    tried: list[tuple[Settings, Slots]] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")} | {"lr": 0.1}
        if not any(_are_alike(settings, others) for others, _ in tried):  # groups often differ in their rates alone
            tried.append((settings, _known_slots(type(optimizer), settings, make, device)))
    found = [slots for _, slots in tried]
    first = found[0]
    if any((one.moments, one.count is None) != (first.moments, first.count is None) for one in found):
        raise _not_elementwise(type(optimizer), "it keeps something else of each parameter group")
    return first


def _are_alike(settings: Settings, others: Settings) -> bool:
    """Say whether two groups' settings are surely the same."""
    if settings.keys() != others.keys():
        return False
    return all(
        value is others[key] or (not isinstance(value, Tensor) and bool(value == others[key]))
        for key, value in settings.items()
    )


_KNOWN: list[tuple[type[Optimizer], torch.device | None, Settings, Slots]] = []
"""What has been found of torch's own optimizers in this process: a plan asks for it, and the state that follows it."""


def _known_slots(kind: type[Optimizer], settings: Settings, make: MakeOptimizer, device: torch.device | None) -> Slots:
    """Return what is known of such a group, or try it; all that torch's own optimizers follow is in their groups."""
    for known_kind, known_device, others, slots in _KNOWN:
        if (kind, device) == (known_kind, known_device) and _are_alike(settings, others):
            return slots
    slots = _slots_of_group(kind, settings, make, device)
    if kind.__module__.startswith("torch.optim."):
        _KNOWN.append((kind, device, settings, slots))
    return slots


def _slots_of_group(
    kind: type[Optimizer], settings: Settings, make: MakeOptimizer, device: torch.device | None
) -> Slots:
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _STEPS, 2, ALIGN, generator=generator).to(device)

    def tried(*parts: int | slice, begun: Slots | None = None) -> list[Kept]:
        steps = [[gradient[part] for part in parts] for gradient in gradients]
        return _tried(make, settings, [values[part] for part in parts], steps, begun)

    try:
        [whole], halves = tried(slice(None)), tried(0, 1)
        slots = _read(kind, whole)
        [begun] = tried(slice(None), begun=slots)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _not_elementwise(kind, f"it does not update a part of one: {error}") from error
    for name in ("", *slots.moments):
        if not torch.equal(whole[name], torch.stack([half[name] for half in halves])):
            raise _not_elementwise(kind, f"'{name or 'weights'}' of a part differs from that part of the whole's")
        if not torch.equal(whole[name], begun[name]):
            raise _not_elementwise(kind, "its first update is not that of one that has kept zeros")
    if not shows_no_cut(make, settings, device):
        raise _not_elementwise(kind, "it rounds the last elements of a tensor otherwise than the others")
    return slots


def _read(kind: type[Optimizer], kept: Kept) -> Slots:
    shape, names = kept[""].shape, [name for name in kept if name not in ("", _STEP)]
    for name in names:
        if not isinstance(kept[name], Tensor) or kept[name].shape != shape:
            raise _not_elementwise(kind, f"the '{name}' that it keeps has no number for each element")
    count = kept.get(_STEP)
    if count is not None and not isinstance(count, Tensor):
        raise _not_elementwise(kind, "it counts its updates otherwise than torch's own")
    return Slots(tuple(names), None if count is None else torch.zeros_like(count))


def _tried(
    make: MakeOptimizer,
    settings: Settings,
    values: Sequence[Tensor],
    steps: Sequence[Sequence[Tensor]],
    begun: Slots | None,
) -> list[Kept]:
    """Return what is kept of parameters after a few steps, from nothing or from slots of zeros."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    twin = make([{"params": parameters, **settings}])
    if begun is not None:
        for one in parameters:
            twin.state[one] = begun.filled({name: torch.zeros_like(one) for name in begun.moments}, 0.0)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    kept = [{name: value for name, value in twin.state.get(one, {}).items() if value is not None} for one in parameters]
    return [{"": one.detach(), **state} for one, state in zip(parameters, kept, strict=True)]


def _not_elementwise(kind: type[Optimizer], why: str) -> ConfigError:
    return ConfigError(
        f"{kind.__name__} does not update a parameter element by element ({why}), so its state cannot be sharded, nor "
        "offloaded: set parallel.shards to none and parallel.offload, too, and parallel.tensor, pipeline and expert to "
        "1, or optimizer.name to adamw"
    )
