"""State that all ranks of a sharded job share besides weights and moments: settings, counts, buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import State
from elastic_train.job.optimizers.optimizer_memory import OWN, OptimizerMemory, settings_of
from elastic_train.job.optimizers.parameter_groups import set_rates


class Settings:
    """Settings of parameter groups, scheduler, scaler and buffers; the optimizer has a parameter in each group."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: LambdaLR, scaler: GradScaler) -> None:
        self._model, self._optimizer, self._scheduler, self._scaler = model, optimizer, scheduler, scaler
        self._memory = OptimizerMemory(optimizer, {})

    def groups(self) -> list[dict[str, Any]]:
        """Return the settings of every parameter group."""
        return [settings_of(group) for group in self._optimizer.param_groups]

    def own(self) -> State:
        """Return the values that the optimizer itself has changed in the groups."""
        return self._memory.own({})

    def num_updates(self) -> list[float]:
        """Return the number of updates of each parameter group."""
        groups = self._optimizer.param_groups
        states = [self._optimizer.state.get(group["params"][0], {}) if group["params"] else {} for group in groups]
        return [float(state.get("step", 0.0)) for state in states]

    def plain(self) -> State:
        """Return the part of the state that a commit has as plain values."""
        return {"scheduler": self._scheduler.state_dict(), "scaler": self._scaler.state_dict()}

    def all(self) -> State:
        """Return everything, for a rank that has nothing yet."""
        buffers = dict(self._model.named_buffers())
        found = {"groups": self.groups(), "buffers": buffers, "num_updates": self.num_updates()}
        return {**self.plain(), **found, OWN: self.own()}

    def take_all(self, settings: Mapping[str, Any]) -> list[float]:
        """Load another rank's result of `all`; return the number of updates of each parameter group."""
        self.take(settings["groups"], settings, settings.get(OWN, {}), keeps_rates=False)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(settings["buffers"][name])
        return list(settings["num_updates"])

    def take(
        self,
        groups: Sequence[Mapping[str, Any]],
        plain: Mapping[str, Any],
        own: Mapping[str, Any],
        *,
        keeps_rates: bool,
    ) -> None:
        """Load group settings (unless `keeps_rates`), plain values, and the result of `own`."""
        bases = [float(base) for base in self._scheduler.base_lrs]
        if not keeps_rates:
            for mine, theirs in zip(self._optimizer.param_groups, groups, strict=True):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
        self._memory.take_own(own, {})
        self._scheduler.load_state_dict(plain["scheduler"])
        if plain["scaler"]:
            self._scaler.load_state_dict(plain["scaler"])
        if keeps_rates:
            set_rates(self._optimizer, self._scheduler, bases)
