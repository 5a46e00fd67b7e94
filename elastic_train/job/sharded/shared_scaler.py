"""A gradient scaler for ranks that each see a part of the gradient: whether it overflowed is known by its norm."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

LEAST_SCALE = 2.0**-14
"""Down to which an overflow is the scale's: 30 steps in a row from the first one."""
_OVERFLOWS = "num_overflows"


class SharedScaler(GradScaler):
    """torch's scaler, told what it cannot see. What it keeps of a step is private to torch's class and its children,
    as `torch.distributed.fsdp.sharded_grad_scaler` uses it, whose process group ours is not.
    """

    num_overflows = 0
    """How many steps left out their update to find the scale; saved with it."""

    def is_own_overflow(self) -> bool:
        """Say whether a gradient that is not finite may be the scale's doing: a gradient that overflows at the least
        scale would without one.
        """
        return self.is_enabled() and self.get_scale() > LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, _OVERFLOWS: self.num_overflows} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_overflows = int(state_dict.get(_OVERFLOWS, 0))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Undo the scale. A rank that computed no loss, such as a pipeline's first stage, has no scale before this."""
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        super().unscale_(optimizer)

    def note_overflow(self, optimizer: Optimizer) -> None:
        """Let the step that was unscaled count as overflowed, wherever it did; nothing where scaling is off."""
        if self.is_enabled():
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)

    def forget_step(self) -> None:
        """Let go of a step that was unscaled and is not applied."""
        if self.is_enabled():
            self._per_optimizer_states.clear()
