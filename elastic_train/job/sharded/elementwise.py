"""An optimizer's state per element of a parameter, and if its update allows parameters to be cut.

Most of torch's optimizers update elementwise, so a shard may begin and end anywhere. Others, such as Muon, need whole
parameters: a rank then holds all of a parameter or none. They may keep tensors of other shapes, as Adafactor keeps one
number per row and per column.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import TENSORS, TEXT, OptimizerMemory, places_of
from elastic_train.job.optimizers.rehearsal import MakeOptimizer, Twin, shows_no_cut
from elastic_train.placement.grains import ALIGN
from elastic_train.system.wording import first_line

T = TypeVar("T")
_STEP, _STEPS, _RESUMED_AT = "step", 12, 3
_SIZES = (6, 10, 3, 5, 7, 4)
"""Sizes of the dimensions of a parameter that is tried; no two are equal, so a moment's shape says which it has."""
_LARGE, _LONG, _FEW = (512, 256, 2, 3), (1 << 17,), 2
"""Sizes of a large parameter, the shape of a long vector, and steps of their trial.

Some optimizers treat large parameters, or large matrices alone, otherwise, or keep less of them.
"""
Kept = dict[str, Any]
"""A parameter's weights under "", and its optimizer state."""
Settings = Mapping[str, Any]
"""Settings of a parameter group."""
Shape = tuple[int, ...]
Rule = tuple[int | None, ...]
"""A moment's shape: for each dimension the parameter's dimension whose size it has, None for a size of 1."""


@dataclass(frozen=True, slots=True)
class Slots:
    """An optimizer's state per parameter: named tensors, and an update count.

    `moments` have one number per element. `count` is the prototype of torch's "step", None if updates are not counted.
    A parameter that `is_atomic` must be whole for its update; `others` then has its other moments, by the parameter's
    number of dimensions.
    """

    moments: tuple[str, ...]
    count: Tensor | None = None
    is_atomic: bool = False
    others: Mapping[int, Mapping[str, Rule]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """All names in the optimizer's state of a parameter."""
        others = {name for rules in self.others.values() for name in rules}
        return {*self.moments, *others, *(() if self.count is None else (_STEP,))}

    def shapes_of(self, shape: Sequence[int]) -> dict[str, Shape]:
        """Return the shape of each moment of a parameter of some shape."""
        return {**dict.fromkeys(self.moments, tuple(shape)), **self.others_of(shape)}

    def others_of(self, shape: Sequence[int]) -> dict[str, Shape]:
        """Return the shapes of the moments that do not have one number per element of every parameter."""
        rules = self.others.get(len(shape), {})
        return {name: tuple(1 if dim is None else shape[dim] for dim in rule) for name, rule in rules.items()}

    def filled(self, moments: Mapping[str, T], num_updates: float) -> dict[str, T | Tensor]:
        """Return the optimizer's state of a parameter, or a part of one, after `num_updates` updates."""
        counted = {} if self.count is None else {_STEP: torch.full_like(self.count, num_updates)}
        return {**counted, **moments}


def slots_of(optimizer: Optimizer, make: MakeOptimizer, device: torch.device | None = None) -> list[Slots]:
    """Return the slots of each parameter group, found by trying the optimizer.

    It is tried on a parameter, on two parts of it, and on nothing; or, if it needs whole parameters, on some of each
    number of dimensions that a group has. Raises ConfigError if the optimizer updates or keeps anything else, since its
    updates would then depend on the sharding, or if its state does not start from zeros, as a new shard's does.
    """
    tried: list[tuple[Settings, Set[int], Slots]] = []
    found: list[Slots] = []
    for group in optimizer.param_groups:
        settings = _settings_of(group)
        dims = {one.dim() for one in group["params"]} or {2}
        fit = (known for others, of, known in tried if dims <= of and _are_alike(settings, others))
        slots = next(fit, None)
        if slots is None:  # groups often differ in their rates only
            slots = _known_slots(type(optimizer), settings, dims, make, device)
            tried.append((settings, dims, slots))
        found.append(slots)
    return found


def _settings_of(group: Settings) -> Settings:
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr")} | {"lr": 0.1}


def check_types(optimizer: Optimizer, make: MakeOptimizer, device: torch.device | None = None) -> None:
    """Raise ConfigError if an optimizer keeps moments of another type than the weights', which is a shard's."""
    for group in optimizer.param_groups:
        kinds = {(one.dim(), one.dtype) for one in group["params"] if one.dtype != torch.float32}
        for dims, dtype in sorted(kinds, key=str):
            values, gradient = _drawn(2, _SIZES[:dims], device).to(dtype)
            _rules(
                type(optimizer), _tried(type(optimizer), make, _settings_of(group), [values], [[gradient]], None).kept
            )


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


_KNOWN: list[tuple[type[Optimizer], torch.device | None, Settings, Set[int], Slots]] = []
"""Results for torch's own optimizers in this process: the plan and then the state ask for them."""


def _known_slots(
    kind: type[Optimizer], settings: Settings, dims: Set[int], make: MakeOptimizer, device: torch.device | None
) -> Slots:
    """Return the known slots of a group, or try the optimizer; torch's own depend on nothing but their groups.

    `dims` are the numbers of dimensions of the group's parameters, which matter only if these must be whole.
    """
    for known_kind, known_device, others, of, slots in _KNOWN:
        is_known = (kind, device) == (known_kind, known_device) and (dims <= of or not slots.is_atomic)
        if is_known and _are_alike(settings, others):
            return slots
    try:
        slots = _slots_of_group(kind, settings, make, device)
        for num in sorted(dims - {0}):
            _check_large(kind, settings, _LONG if num == 1 else _LARGE[:num], make, device, slots)
    except Exception as error:  # noqa: BLE001 - an optimizer may raise anything
        fails = depends_on_parts(kind, f"it does not update a part of a parameter: {first_line(error)}")
        reason = error if isinstance(error, ConfigError) else fails
        slots = _slots_of_whole(kind, settings, dims, make, device, reason)
    if kind.__module__.startswith("torch.optim."):
        _KNOWN.append((kind, device, settings, dims, slots))
    return slots


def _slots_of_group(
    kind: type[Optimizer], settings: Settings, make: MakeOptimizer, device: torch.device | None
) -> Slots:
    values, *gradients = _drawn(1 + _STEPS, (2, ALIGN), device)

    def tried(part: int | slice, begun: Slots | None = None) -> _Tried:
        return _tried(kind, make, settings, [values[part]], [[gradient[part]] for gradient in gradients], begun)

    whole, halves = tried(slice(None)), [tried(0), tried(1)]
    slots = _read(kind, whole.kept)
    begun, nothing = tried(slice(None), begun=slots), tried(slice(0, 0))
    for name in ("", *slots.moments):
        if not _are_equal(whole.kept[name], torch.stack([half.kept[name] for half in halves])):
            raise depends_on_parts(kind, f"'{name or 'weights'}' of a part differs from that part of the whole's")
        if not _are_equal(whole.kept[name], begun.kept[name]):
            raise depends_on_parts(kind, "its first update is not that of one that has kept zeros")
    for other in (*halves, begun, nothing):
        if other.own != whole.own:
            raise depends_on_parts(kind, "what it keeps of a parameter group depends on the part that it updates")
    if not shows_no_cut(make, settings, device):
        raise depends_on_parts(kind, "it rounds the last elements of a tensor otherwise than the others")
    return slots


def _check_large(
    kind: type[Optimizer],
    settings: Settings,
    shape: Shape,
    make: MakeOptimizer,
    device: torch.device | None,
    slots: Slots,
) -> None:
    """Raise ConfigError if the update of a large parameter differs from that of its parts, a small and a large one.

    Some moments are created only after several steps.
    """
    values, *gradients = _drawn(1 + _FEW, shape, device)
    every = [
        _tried(kind, make, settings, [part(values)], [[part(gradient)] for gradient in gradients], None).kept
        for part in (Tensor.clone, lambda one: one.flatten()[:ALIGN], lambda one: one.flatten()[ALIGN:])
    ]
    for one in every:
        _rules(kind, one)
    for name in ("", *slots.moments):
        whole, *parts = (one.get(name, values.new_empty(0)).flatten() for one in every)
        if not _are_equal(whole, torch.cat(parts)):
            of = f"a part of a large tensor, of {shape}" if len(shape) > 1 else "a part"
            raise depends_on_parts(kind, f"'{name or 'weights'}' of {of} differs from that part of the whole's")


def _drawn(num: int, shape: Shape, device: torch.device | None) -> Tensor:
    return torch.randn(num, *shape, generator=torch.Generator().manual_seed(0)).to(device)


def _slots_of_whole(
    kind: type[Optimizer],
    settings: Settings,
    dims: Set[int],
    make: MakeOptimizer,
    device: torch.device | None,
    reason: ConfigError,
) -> Slots:
    """Return the slots of an optimizer that updates each parameter as a whole, independently of others.

    Raises `reason`, why a parameter cannot be cut, for other optimizers, and for more dimensions than are tried.
    """
    if max(dims) > len(_SIZES):
        raise reason
    try:
        each = {num: _rules_of_whole(kind, settings, _SIZES[:num], make, device) for num in sorted(dims)}
    except Exception as error:  # an optimizer may raise anything
        raise reason from error
    counts = [count for _, count in each.values()]
    if len({count is None for count in counts}) > 1:
        raise reason
    names = [name for rules, _ in each.values() for name in rules]
    same = {name for name in names if all(rules.get(name) == tuple(range(num)) for num, (rules, _) in each.items())}
    moments = tuple(name for name in dict.fromkeys(names) if name in same)
    others = {num: {name: rule for name, rule in rules.items() if name not in same} for num, (rules, _) in each.items()}
    return Slots(moments, counts[0], is_atomic=True, others=others if any(others.values()) else {})


def _rules_of_whole(
    kind: type[Optimizer], settings: Settings, shape: Shape, make: MakeOptimizer, device: torch.device | None
) -> tuple[dict[str, Rule], Tensor | None]:
    """Return the shapes of the moments of parameters with some number of dimensions, and the update count.

    Raises ConfigError if the update of one parameter depends on others.
    """
    values, *gradients = _drawn(1 + _STEPS, (2, *shape), device)

    def tried(number: int, begun: Slots | None = None) -> _Tried:
        steps = [list(gradient[:number]) for gradient in gradients]
        return _tried(kind, make, settings, list(values[:number]), steps, begun)

    one = tried(1)
    rules, count = _rules(kind, one.kept)
    if len(shape) <= len(_LARGE):
        large = _drawn(2, _LARGE[: len(shape)], device)
        of_large, _ = _rules(kind, _tried(kind, make, settings, [large[0]], [[large[1]]], None).kept)
        if not of_large.items() <= rules.items():  # a moment may come later
            raise depends_on_parts(kind, "the shapes of what it keeps depend on how large a parameter is")
    slots = Slots((), count, is_atomic=True, others={len(shape): rules})
    begun, both = tried(1, slots), tried(2, slots)
    for other in (begun, both):
        if other.own != one.own or not all(_are_equal(one.kept[name], other.kept[name]) for name in ("", *rules)):
            raise depends_on_parts(kind, "the updates of two parameters depend on each other")
    nothing = tried(0, slots)
    if count is not None:  # a shard without a parameter of the group counts its updates on a stand-in
        zero = torch.zeros((1,) * len(shape), device=device)
        nothing = _tried(kind, make, settings, [zero], [[zero]] * _STEPS, slots)
        shapes = {name: nothing.kept[name].shape for name in rules}
        if shapes != slots.shapes_of(zero.shape) or not torch.equal(nothing.kept[_STEP], one.kept[_STEP]):
            raise depends_on_parts(kind, "the shapes of what it keeps do not follow from the parameter's")
    if nothing.own != one.own:
        raise depends_on_parts(kind, "what it keeps of a parameter group depends on the parameters that it updates")
    return rules, count


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _read(kind: type[Optimizer], kept: Kept) -> Slots:
    rules, count = _rules(kind, kept)
    for name, rule in rules.items():
        if rule != tuple(range(kept[""].dim())):
            raise depends_on_parts(kind, f"the '{name}' that it keeps has no number for each element")
    return Slots(tuple(rules), count)


def _rules(kind: type[Optimizer], kept: Kept) -> tuple[dict[str, Rule], Tensor | None]:
    """Return the rules of the moments' shapes, and the prototype of the update count."""
    weights, rules = kept[""], dict[str, Rule]()
    for name in [name for name in kept if name not in ("", _STEP)]:
        moment = kept[name]
        if isinstance(moment, Tensor) and moment.dtype != weights.dtype:
            raise depends_on_parts(kind, f"the '{name}' that it keeps of {weights.dtype} weights is {moment.dtype}")
        if type(moment) not in (Tensor, nn.Parameter) or not set(moment.shape) <= {1, *weights.shape}:
            raise depends_on_parts(kind, f"the '{name}' that it keeps has no number for each element, row or column")
        if moment.shape == weights.shape:
            rules[name] = tuple(range(weights.dim()))
        else:
            sizes = list(weights.shape)
            rules[name] = tuple(None if size == 1 else sizes.index(size) for size in moment.shape)
    count = kept.get(_STEP)
    if count is not None and not isinstance(count, Tensor):
        raise depends_on_parts(kind, "it counts its updates otherwise than torch's own")
    return rules, None if count is None else torch.zeros_like(count)


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
            zeros = {name: one.new_zeros(shape) for name, shape in begun.shapes_of(one.shape).items()}
            twin.optimizer.state[one] = begun.filled(zeros, 0.0)
    for number, gradients in enumerate(steps):
        if begun is not None and number == _RESUMED_AT:
            twin, memory = _resumed(make, settings, twin, memory, begun, number)
        twin.update(gradients)
    own = memory.own({})
    if places := [place for place in places_of(own) if place[0] != "group"]:
        raise depends_on_parts(kind, f"it keeps '{places[0][-1]}' apart from its parameters and their groups")
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
        if state := slots.filled({name: kept[name].clone() for name in slots.shapes_of(one.shape)}, num_updates):
            other.optimizer.state[one] = state
    remembered.take_own(copy.deepcopy(memory.own({})), {})
    return other, remembered


def depends_on_parts(kind: type[Optimizer], why: str) -> ConfigError:
    """Return the error for an optimizer that updates neither parts of parameters nor whole ones by themselves."""
    return ConfigError(
        f"optimizer.name: the results of {kind.__name__} would depend on what each rank holds, since {why}: set "
        "parallel.shards to none, parallel.offload to none, parallel.tensor to 1, parallel.pipeline to 1 and "
        "parallel.expert to 1, or optimizer.name to adamw"
    )
