"""An optimizer's state per element of a parameter, and if its update allows parameters to be cut.

Most of torch's optimizers update elementwise, so a shard may begin and end anywhere. Others, such as Muon, need whole
parameters and keep tensors of their shape: a rank then holds all of a parameter or none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_train.config.combinations import refused
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import TENSORS, TEXT, OptimizerMemory, places_of
from elastic_train.job.optimizers.rehearsal import MakeOptimizer, Twin, shows_no_cut
from elastic_train.placement.grains import ALIGN

T = TypeVar("T")
_STEP, _STEPS, _RESUMED_AT = "step", 12, 3
_MATRIX = (6, 10)
Kept = dict[str, Any]
"""A parameter's weights under "", and its optimizer state."""
Settings = Mapping[str, Any]
"""Settings of a parameter group."""


@dataclass(frozen=True, slots=True)
class Slots:
    """An optimizer's state per parameter: named tensors with one number per element, and an update count.

    `count` is the prototype of torch's "step", None if updates are not counted. A parameter that `is_atomic` must be
    whole for its update.
    """

    moments: tuple[str, ...]
    count: Tensor | None = None
    is_atomic: bool = False

    def filled(self, moments: Mapping[str, T], num_updates: float) -> dict[str, T | Tensor]:
        """Return the optimizer's state of a parameter, or a part of one, after `num_updates` updates."""
        counted = {} if self.count is None else {_STEP: torch.full_like(self.count, num_updates)}
        return {**counted, **moments}


def slots_of(optimizer: Optimizer, make: MakeOptimizer, device: torch.device | None = None) -> list[Slots]:
    """Return the slots of each parameter group, found by trying the optimizer.

    It is tried on a parameter, on two parts of it, and on nothing; or on whole parameters if it needs them. Raises
    ConfigError if the optimizer updates or keeps anything else, since its updates would then depend on the sharding, or
    if its state does not start from zeros, as a new shard's does.
    """
    tried: list[tuple[Settings, Slots]] = []
    found: list[Slots] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")} | {"lr": 0.1}
        slots = next((known for others, known in tried if _are_alike(settings, others)), None)
        if slots is None:  # groups often differ in their rates only
            slots = _known_slots(type(optimizer), settings, make, device)
            tried.append((settings, slots))
        found.append(slots)
    return found


def atomic_groups(optimizer: Optimizer, make: MakeOptimizer) -> set[int]:
    """Return the numbers of parameter groups that need whole parameters; empty if the optimizer cannot be sharded."""
    try:
        return numbers_of_atomic(slots_of(optimizer, make))
    except ConfigError:
        return set()


def numbers_of_atomic(slots: Sequence[Slots]) -> set[int]:
    """Return the numbers of the parameter groups that need whole parameters."""
    return {number for number, one in enumerate(slots) if one.is_atomic}


def _are_alike(settings: Settings, others: Settings) -> bool:
    """Return True if two groups' settings are certainly equal."""
    if settings.keys() != others.keys():
        return False
    return all(
        value is others[key] or (not isinstance(value, Tensor) and bool(value == others[key]))
        for key, value in settings.items()
    )


_KNOWN: list[tuple[type[Optimizer], torch.device | None, Settings, Slots]] = []
"""Results for torch's own optimizers in this process: the plan and then the state ask for them."""


def _known_slots(kind: type[Optimizer], settings: Settings, make: MakeOptimizer, device: torch.device | None) -> Slots:
    """Return the known slots of a group, or try the optimizer; torch's own depend on nothing but their groups."""
    for known_kind, known_device, others, slots in _KNOWN:
        if (kind, device) == (known_kind, known_device) and _are_alike(settings, others):
            return slots
    try:
        slots = _slots_of_group(kind, settings, make, device)
    except ConfigError as error:
        slots = _slots_of_whole(kind, settings, make, device, error)
    if kind.__module__.startswith("torch.optim."):
        _KNOWN.append((kind, device, settings, slots))
    return slots


def _slots_of_group(
    kind: type[Optimizer], settings: Settings, make: MakeOptimizer, device: torch.device | None
) -> Slots:
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _STEPS, 2, ALIGN, generator=generator).to(device)

    def tried(part: int | slice, begun: Slots | None = None) -> _Tried:
        return _tried(kind, make, settings, [values[part]], [[gradient[part]] for gradient in gradients], begun)

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


def _slots_of_whole(
    kind: type[Optimizer], settings: Settings, make: MakeOptimizer, device: torch.device | None, reason: ConfigError
) -> Slots:
    """Return the slots of an optimizer that updates each parameter as a whole, independently of others.

    Raises `reason`, why a parameter cannot be cut, for other optimizers.
    """
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _STEPS, 2, *_MATRIX, generator=generator).to(device)

    def tried(number: int, begun: Slots | None = None) -> _Tried:
        steps = [list(gradient[:number]) for gradient in gradients]
        return _tried(kind, make, settings, list(values[:number]), steps, begun)

    try:
        one = tried(1)
        slots = replace(_read(kind, one.kept), is_atomic=True)
        begun, both, nothing = tried(1, slots), tried(2, slots), tried(0, slots)
    except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError, ConfigError) as error:
        raise reason from error
    is_apart = all(
        other.own == one.own and all(_are_equal(one.kept[name], other.kept[name]) for name in ("", *slots.moments))
        for other in (begun, both)
    )
    if slots.count is not None or not is_apart or nothing.own != one.own:  # an empty shard must not count updates
        raise reason
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
    """The first parameter's state after a few steps, and the changes to the optimizer's groups, as text."""

    kept: Kept
    own: str


def _tried(
    kind: type[Optimizer],
    make: MakeOptimizer,
    settings: Settings,
    values: Sequence[Tensor],
    steps: Sequence[Sequence[Tensor]],
    begun: Slots | None,
) -> _Tried:
    """Train parameters from no state, or from zero slots with a save and load on the way."""
    twin = Twin(make, [settings], [values])
    memory = OptimizerMemory(twin.optimizer, {})
    if begun is not None:
        for one in twin.parameters:
            twin.optimizer.state[one] = begun.filled({name: torch.zeros_like(one) for name in begun.moments}, 0.0)
    for number, gradients in enumerate(steps):
        if begun is not None and number == _RESUMED_AT:
            twin, memory = _resumed(make, settings, twin, memory, begun, number)
        twin.update(gradients)
    own = memory.own({})
    if places := [place for place in places_of(own) if place[0] != "group"]:
        raise _not_elementwise(kind, f"it keeps '{places[0][-1]}' apart from its parameters and their groups")
    values_of = {name: one.tolist() for name, one in own.get(TENSORS, {}).items()}  # type: ignore[attr-defined]
    said = f"{own.get(TEXT)} {values_of}"
    if not twin.parameters:
        return _Tried({}, said)
    first = twin.parameters[0]
    kept = {name: value for name, value in twin.optimizer.state.get(first, {}).items() if value is not None}
    return _Tried({"": first.detach(), **kept}, said)


def _resumed(
    make: MakeOptimizer, settings: Settings, twin: Twin, memory: OptimizerMemory, slots: Slots, num_updates: int
) -> tuple[Twin, OptimizerMemory]:
    """Return a new optimizer with the weights, moments and group values that a shard keeps."""
    other = Twin(make, [settings], [[one.detach() for one in twin.parameters]])
    remembered = OptimizerMemory(other.optimizer, {})
    for one, before in zip(other.parameters, twin.parameters, strict=True):
        kept = twin.optimizer.state.get(before, {})
        if state := slots.filled({name: kept[name].clone() for name in slots.moments}, num_updates):
            other.optimizer.state[one] = state
    remembered.take_own(copy.deepcopy(memory.own({})), {})
    return other, remembered


def _not_elementwise(kind: type[Optimizer], why: str) -> ConfigError:
    what = f"{kind.__name__}, which does not update a parameter element by element: {why}"
    return refused("optimizers like Adafactor", what)
