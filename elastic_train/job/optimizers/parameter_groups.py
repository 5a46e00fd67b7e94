"""Build optimizer groups from a task's parameter groups; map a saved optimizer's groups to the current ones."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.choice import SettingsOf, norms_and_biases
from elastic_train.job.optimizers.optimizer_memory import OWN, Names, places_of, settings_of
from elastic_train.job.optimizers.rehearsal import MakeOptimizer
from elastic_train.job.units.generators import undisturbed
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.task import ParameterGroup

log = logging.getLogger(__name__)


def build_groups(
    model: nn.Module,
    groups: Sequence[ParameterGroup],
    config: OptimizerConfig,
    settings_of: SettingsOf = lambda parameter: {},
) -> list[dict[str, Any]]:
    """Freeze the parameters that a task wants frozen, and return the optimizer's groups for all that are trained.

    Those without elements are frozen, too: an optimizer may divide by their number.
    Parameters in no group come first, with the configured rate and decay; a group without parameters is omitted. Norms
    and biases have no decay unless the configuration or their group sets one. A group is split where members differ in
    decay or in `settings_of`. Within a group, parameters are in the model's order. Raises ConfigError with every
    mistake, before anything is frozen.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    if mistakes := list(_mistakes(groups, known)):
        raise ConfigError(*mistakes)
    members = [_members(model, {id(known[name]) for name in group.names}) for group in groups]
    for group, parameters in zip(groups, members, strict=True):
        if group.is_frozen:
            for parameter in parameters:
                parameter.requires_grad_(False)
    for parameter in model.parameters():
        if not parameter.numel():
            parameter.requires_grad_(False)
    named = {id(parameter) for parameters in members for parameter in parameters}
    others = [parameter for parameter in model.parameters() if id(parameter) not in named]
    without = set() if config.decay_norms_and_biases or not config.weight_decay else norms_and_biases(model)
    built = _split(others, {}, without, settings_of)
    for group, parameters in zip(groups, members, strict=True):
        if not group.is_frozen:
            decay = config.weight_decay if group.weight_decay is None else group.weight_decay
            settings = {"lr": config.lr * group.lr_factor, "weight_decay": decay}
            built += _split(parameters, settings, without if group.weight_decay is None else set(), settings_of)
    return built


def _split(
    parameters: Sequence[nn.Parameter], settings: Mapping[str, object], without: Set[int], settings_of: SettingsOf
) -> list[dict[str, Any]]:
    """Return groups of the parameters that are trained, with equal settings; those in `without` have no decay."""
    parts: dict[tuple[tuple[str, object], ...], list[nn.Parameter]] = {}
    for parameter in (one for one in parameters if one.requires_grad):
        undecayed = {"weight_decay": 0.0} if id(parameter) in without else {}
        own = {**settings, **undecayed, **settings_of(parameter)}
        parts.setdefault(tuple(own.items()), []).append(parameter)
    return [{"params": part, **dict(own)} for own, part in parts.items()]


def _members(model: nn.Module, wanted: set[int]) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if id(parameter) in wanted]


def _mistakes(groups: Sequence[ParameterGroup], known: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Yield the mistakes in a task's groups; `known` has every name of every parameter, tied ones included."""
    owners: dict[int, tuple[int, str]] = {}
    for number, group in enumerate(groups):
        where = f"the task's parameter_groups, group {number}"
        yield from _wrong_values(where, group)
        for name in group.names:
            if name not in known:
                yield f"{where}: the model has no parameter '{name}'{did_you_mean(nearest(name, known))}"
                continue
            owner, first = owners.setdefault(id(known[name]), (number, name))
            if owner != number:
                tied = "" if first == name else f" as '{first}', which is the same tensor"
                yield f"{where}: '{name}' is in group {owner} already{tied}; name it in one group"
    frozen = {id(known[name]) for group in groups if group.is_frozen for name in group.names if name in known}
    if groups and not any(p.requires_grad and id(p) not in frozen for p in known.values()):
        yield "the task's parameter_groups: every parameter is frozen, so there is nothing to train"


def _wrong_values(where: str, group: ParameterGroup) -> Iterator[str]:
    for key, value in (("lr_factor", group.lr_factor), ("weight_decay", group.weight_decay)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"{where}: {key} must be a finite number of at least 0, not {value}"
    if group.is_frozen and (group.lr_factor != 1.0 or group.weight_decay is not None):
        yield f"{where}: it is frozen, so lr_factor and weight_decay would have no effect; leave them out"


def describe_groups(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return one line per optimizer group; equal lines mean equal parameters, rates and decays."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        _describe([names[id(parameter)] for parameter in group["params"]], group) for group in optimizer.param_groups
    ]


def _describe(names: Sequence[str], group: Mapping[str, Any]) -> str:
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    return (
        f"{len(names)} parameters, {names[0]} to {names[-1]} (names {digest}), "
        f"rate {group['initial_lr']}, weight decay {group.get('weight_decay', 0.0)}"
    )


class FirstStates:
    """An optimizer's state for a parameter before and after its first step, found with a second instance.

    With `keeps_average` it includes the average of the weights.
    """

    def __init__(self, optimizer: Optimizer, make: MakeOptimizer, *, keeps_average: bool) -> None:
        self._optimizer, self._make, self.keeps_average = optimizer, make, keeps_average
        self._known: dict[object, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}

    def of(self, number: int, parameter: Tensor) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return a copy of the result of `look`, so that no two parameters share a tensor."""
        begun, after = copy.deepcopy(self.look(number, parameter))
        return begun, after

    def look(self, number: int, parameter: Tensor) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return a parameter's state before and after a first step with zero gradient; `number` is its group.

        Read-only: all parameters of one shape and type share the result.
        """
        kind = (number, parameter.shape, parameter.dtype, parameter.device)
        if kind not in self._known:
            settings = settings_of(self._optimizer.param_groups[number])
            settings.pop("initial_lr", None)
            one = nn.Parameter(torch.zeros_like(parameter))
            with undisturbed():
                twin = self._make([{**settings, "params": [one]}])
                before = dict(twin.state.get(one, {}))
                one.grad = torch.zeros_like(one)
                twin.step()
            average = {AVERAGE: one.detach()} if self.keeps_average else {}
            self._known[kind] = before, {**twin.state.get(one, {}), **average}
        return self._known[kind]

    def forget(self) -> None:
        """Free the memory of the cached states."""
        self._known.clear()


def regroup(
    saved: Mapping[str, Any], names: Names, optimizer: Optimizer, first: FirstStates
) -> Mapping[str, Mapping[str, Any]]:
    """Return a saved optimizer's state by the names of this optimizer's parameters.

    A parameter keeps its saved moments even if its group has changed. Moments of parameters that are no longer trained
    are dropped; newly trained parameters have none, as before a first step. A new average starts from the weights,
    which must be in place. Raises ConfigError for another optimizer's moments, or for values kept per group if the
    groups have changed.
    """
    before = _names_in(saved["param_groups"])
    now = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    elsewhere = places_of(saved.get(OWN, {}))
    counted = {str(place[3]) for place in elsewhere if place[0] == "group"}
    if counted and before != now:
        raise ConfigError(
            f"the parameter groups have changed since the commit ({len(before)} groups then, {len(now)} now), and "
            f"{type(optimizer).__name__} keeps {', '.join(sorted(counted))} of each group: set the groups back, or "
            "start again in another run.dir"
        )
    old = {name: _settings(group, counted) for group in saved["param_groups"] for name in group["params"]}
    found, new = dict[str, Mapping[str, Any]](), list[str]()
    for number, group in enumerate(optimizer.param_groups):
        for one in group["params"]:
            name, (_, after) = names[id(one)], first.look(number, one)
            kept = saved["state"].get(name, {})
            own = {place[3] for place in elsewhere if place[:3] == ["state", 0, ["parameter", name]]}
            if kept or own:
                _check_fits(name, {*kept, *own}, after, is_changed=old[name] != _settings(group, counted))
                found[name] = _with_average(kept, one, keeps_it=first.keeps_average)
            elif after:
                new += [name] if set(after) - {AVERAGE} else []
                found[name], _ = first.of(number, one)
    first.forget()
    if before != now or new:
        log.warning(
            "the parameter groups have changed since the commit: %d groups then, %d now; "
            "%d parameters that were not trained begin as at a first step%s",
            len(before),
            len(now),
            len(new),
            f": {', '.join(new)}" if new else "",
        )
    return found


def _settings(group: Mapping[str, Any], counted: Set[str]) -> dict[str, Any]:
    """Return the group settings that determine a parameter's state."""
    free = {"params", "lr", "initial_lr", "weight_decay", "betas", *counted}
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings_of(group).items()
        if key not in free and not isinstance(value, Tensor)
    }


def _check_fits(name: str, saved: Set[str], own: Mapping[str, Any], *, is_changed: bool) -> None:
    """Refuse another optimizer's state; with equal settings, entries may appear after the first step."""
    needed = {key for key, value in own.items() if value is not None} - {AVERAGE}
    if needed - saved or (is_changed and saved - {AVERAGE} - set(own)):
        raise ConfigError(
            f"the commit has {', '.join(sorted(saved)) or 'nothing'} of '{name}', and this optimizer keeps "
            f"{', '.join(sorted(own)) or 'nothing'}: set optimizer.name and optimizer.options back, or start again in "
            "another run.dir"
        )


def _with_average(kept: Mapping[str, Any], parameter: Tensor, *, keeps_it: bool) -> dict[str, Any]:
    """Return a parameter's saved state, with an average exactly if `keeps_it`."""
    average = {AVERAGE: kept.get(AVERAGE, parameter.detach().clone())} if keeps_it else {}
    return {**{key: value for key, value in kept.items() if key != AVERAGE}, **average}


def _names_in(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [list(group["params"]) for group in groups]


def set_rates(optimizer: Optimizer, scheduler: LambdaLR, bases: Sequence[float]) -> None:
    """Set the parameter groups' rates to `bases` times the scheduler's factors at its current step."""
    step, factors = scheduler.last_epoch, scheduler.lr_lambdas
    rates = [base * factor(step) for base, factor in zip(bases, factors, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": list(bases), "_last_lr": rates})
