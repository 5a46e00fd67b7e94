"""What an optimizer keeps of every element where it updates element by element: it can be cut where parameters are."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.cuts import MakeOptimizer, shows_no_cut
from elastic_train.job.optimizers.optimizer_memory import TENSORS, TEXT, OptimizerMemory, places_of
from elastic_train.shards.grains import ALIGN

T = TypeVar("T")
_STEP, _STEPS, _RESUMED_AT = "step", 12, 3
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
    """Return what an optimizer keeps, found by trying one of its kind on a parameter, on two parts of it
    apart, and on nothing.

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

    def tried(part: int | slice, begun: Slots | None = None) -> _Tried:
        return _tried(kind, make, settings, values[part], [gradient[part] for gradient in gradients], begun)

    try:
        whole, halves = tried(slice(None)), [tried(0), tried(1)]
        slots = _read(kind, whole.kept)
        begun, nothing = tried(slice(None), begun=slots), tried(slice(0, 0))
    except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise _not_elementwise(kind, f"it does not update a part of one: {error}") from error
    for name in ("", *slots.moments):
        if not _are_equal(whole.kept[name], torch.stack([half.kept[name] for half in halves])):
            raise _not_elementwise(kind, f"'{name or 'weights'}' of a part differs from that part of the whole's")
        if not _are_equal(whole.kept[name], begun.kept[name]):
            raise _not_elementwise(kind, "its first update is not that of one that has kept zeros")
    for other in (*halves, begun, nothing):
        if other.own != whole.own:
            raise _not_elementwise(kind, "what it keeps of a parameter group depends on the part that it updates")
    if not shows_no_cut(make, settings, device):
        raise _not_elementwise(kind, "it rounds the last elements of a tensor otherwise than the others")
    return slots


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _read(kind: type[Optimizer], kept: Kept) -> Slots:
    shape, names = kept[""].shape, [name for name in kept if name not in ("", _STEP)]
    for name in names:
        if not isinstance(kept[name], Tensor) or kept[name].shape != shape:
            raise _not_elementwise(kind, f"the '{name}' that it keeps has no number for each element")
    count = kept.get(_STEP)
    if count is not None and not isinstance(count, Tensor):
        raise _not_elementwise(kind, "it counts its updates otherwise than torch's own")
    return Slots(tuple(names), None if count is None else torch.zeros_like(count))


class _Tried(NamedTuple):
    """What is kept of a parameter after a few steps, and what the optimizer has changed of its groups, as text."""

    kept: Kept
    own: str


def _tried(
    kind: type[Optimizer],
    make: MakeOptimizer,
    settings: Settings,
    values: Tensor,
    steps: Sequence[Tensor],
    begun: Slots | None,
) -> _Tried:
    """Try a parameter of some values: from nothing, or from slots of zeros and then from what a commit holds of it."""
    parameter = nn.Parameter(values.clone())
    twin = make([{"params": [parameter], **settings}])
    memory = OptimizerMemory(twin, {})
    if begun is not None:
        twin.state[parameter] = begun.filled({name: torch.zeros_like(parameter) for name in begun.moments}, 0.0)
    for number, gradient in enumerate(steps):
        if begun is not None and number == _RESUMED_AT:
            parameter, twin, memory = _resumed(make, settings, parameter, twin, memory, begun, number)
        parameter.grad = gradient.clone()
        twin.step()
    own = memory.own({})
    if places := [place for place in places_of(own) if place[0] != "group"]:
        raise _not_elementwise(kind, f"it keeps '{places[0][-1]}' apart from its parameters and their groups")
    kept = {name: value for name, value in twin.state.get(parameter, {}).items() if value is not None}
    values_of = {name: one.tolist() for name, one in own.get(TENSORS, {}).items()}  # type: ignore[attr-defined]
    return _Tried({"": parameter.detach(), **kept}, f"{own.get(TEXT)} {values_of}")


def _resumed(
    make: MakeOptimizer,
    settings: Settings,
    parameter: nn.Parameter,
    twin: Optimizer,
    memory: OptimizerMemory,
    slots: Slots,
    num_updates: int,
) -> tuple[nn.Parameter, Optimizer, OptimizerMemory]:
    """Return another optimizer, of the weights, moments and group values that a share has of one."""
    again = nn.Parameter(parameter.detach().clone())
    other = make([{"params": [again], **settings}])
    remembered = OptimizerMemory(other, {})
    kept = twin.state.get(parameter, {})
    if state := slots.filled({name: kept[name].clone() for name in slots.moments}, num_updates):
        other.state[again] = state
    remembered.take_own(copy.deepcopy(memory.own({})), {})
    return again, other, remembered


def _not_elementwise(kind: type[Optimizer], why: str) -> ConfigError:
    return ConfigError(
        f"{kind.__name__} does not update a parameter element by element ({why}), so its state cannot be sharded, nor "
        "offloaded: set parallel.shards to none and parallel.offload, too, and parallel.tensor, pipeline and expert to "
        "1, or optimizer.name to adamw"
    )
