"""From a task's parameter groups to the optimizer's, and from a saved optimizer's groups to those of today."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import AVERAGE
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.choice import SettingsOf
from elastic_train.job.optimizers.parameter_kinds import norms_and_biases
from elastic_train.system.wording import did_you_mean, nearest
from elastic_train.tasks.task import ParameterGroup

log = logging.getLogger(__name__)


def build_groups(
    model: nn.Module,
    groups: Sequence[ParameterGroup],
    config: OptimizerConfig,
    settings_of: SettingsOf = lambda parameter: {},
) -> list[dict[str, Any]]:
    """Freeze the parameters that a task wants frozen, and return the optimizer's groups for all others.

    The parameters that no group names come first, with the configured rate and decay; a group without parameters is
    left out. Norms and biases have no decay, unless the configuration or their group has one for them; where they need
    a group of their own for it, or where `settings_of` a parameter differ, a group is split. Within a group parameters
    are in the model's order, whatever the order of the names. Raises ConfigError with every mistake, before anything is
    frozen.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    if mistakes := list(_mistakes(groups, known)):
        raise ConfigError(*mistakes)
    members = [_members(model, {id(known[name]) for name in group.names}) for group in groups]
    for group, parameters in zip(groups, members, strict=True):
        if group.is_frozen:
            for parameter in parameters:
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
    """Return groups of parameters of equal settings; those in `without` have no decay."""
    parts: dict[tuple[tuple[str, object], ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        undecayed = {"weight_decay": 0.0} if id(parameter) in without else {}
        own = {**settings, **undecayed, **settings_of(parameter)}
        parts.setdefault(tuple(own.items()), []).append(parameter)
    return [{"params": part, **dict(own)} for own, part in parts.items()]


def _members(model: nn.Module, wanted: set[int]) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if id(parameter) in wanted]


def _mistakes(groups: Sequence[ParameterGroup], known: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Yield what is wrong with a task's groups; `known` has every name of every parameter, tied ones included."""
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
    """Return one line for each of the optimizer's groups; equal lines mean equal parameters, rates and decays."""
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


def regroup(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
    """Return a saved optimizer's state in the groups of this optimizer, whose settings are then its own.

    A parameter keeps its saved moments whichever group it was in. The moments of one that is no longer trained are
    dropped; one that was not trained before begins with zero moments, as at a run's first step. An average that was not
    kept before begins with the weights, which must be in place. Where nothing differs, `saved` is returned as it is.
    Raises ConfigError if another optimizer's moments were saved.
    """
    own = get_optimizer_state_dict(model, optimizer)
    groups: list[Mapping[str, Any]] = list(own["param_groups"])  # type: ignore[arg-type]
    state: Mapping[str, Mapping[str, Any]] = own["state"]  # type: ignore[assignment]
    before, now = _names_in(saved["param_groups"]), _names_in(groups)
    new = [name for name, values in state.items() if values and not saved["state"].get(name)]
    kept = {name: _fitted(name, saved["state"].get(name) or _begun(values), values) for name, values in state.items()}
    if before != now or new:
        log.warning(
            "the parameter groups have changed since the commit: %d groups then, %d now; "
            "%d parameters that were not trained begin with zero moments%s",
            len(before),
            len(now),
            len(new),
            f": {', '.join(new)}" if new else "",
        )
    elif all(list(kept[name]) == list(saved["state"].get(name, {})) for name in kept):
        return saved
    return {"state": kept, "param_groups": groups}


def _fitted(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's saved state as this optimizer has it: with an average if, and only if, it keeps one."""
    if set(saved) - {AVERAGE} != set(own) - {AVERAGE}:
        raise ConfigError(
            f"the commit has {', '.join(sorted(saved)) or 'nothing'} of '{name}', and this optimizer keeps "
            f"{', '.join(sorted(own)) or 'nothing'}: set optimizer.name and optimizer.options back, or start again in "
            "another run.dir"
        )
    return {key: saved.get(key, value) for key, value in own.items()} if set(saved) != set(own) else saved


def _names_in(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [list(group["params"]) for group in groups]


def _begun(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one parameter's optimizer state as before its first step, but for its average, which begins with it."""
    return {
        key: torch.zeros_like(value) if isinstance(value, Tensor) and key != AVERAGE else value
        for key, value in values.items()
    }


def set_rates(
    optimizer: Optimizer, scheduler: LambdaLR, settings: Sequence[Mapping[str, Any]], bases: Sequence[float]
) -> None:
    """Give the parameter groups their settings, and the rates that follow from `bases` at the scheduler's step."""
    step, factors = scheduler.last_epoch, scheduler.lr_lambdas
    rates = [base * factor(step) for base, factor in zip(bases, factors, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update({**own, "lr": rate})
    scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": list(bases), "_last_lr": rates})
