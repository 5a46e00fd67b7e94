"""A gradient scaler for ranks that each hold part of the gradient: the norm tells if it overflowed."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

LEAST_SCALE = 2.0**-14
"""Scale below which overflows are no longer attributed to it: 30 halvings from the initial scale."""
_OVERFLOWS = "num_overflows"


class SharedScaler(GradScaler):
    """torch's scaler, which gets the overflow from outside.

    It uses private per-step state of torch's class, as `torch.distributed.fsdp.sharded_grad_scaler` does; that class
    needs a process group of torch.
    """

    num_overflows = 0
    """Number of steps skipped while finding the scale; saved with it."""

    def is_own_overflow(self) -> bool:
        """Return True if a non-finite gradient may be due to the scale.

        A gradient that overflows at the least scale would overflow without scaling, too.
        """
        return self.is_enabled() and self.get_scale() > LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, _OVERFLOWS: self.num_overflows} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_overflows = int(state_dict.get(_OVERFLOWS, 0))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients; initialize the scale on ranks without a loss, such as a pipeline's first stage."""
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        super().unscale_(optimizer)

    def note_overflow(self, optimizer: Optimizer) -> None:
        """Mark the unscaled step as overflowed, on whichever rank it did; does nothing if scaling is off."""
        if self.is_enabled():
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)

    def forget_step(self) -> None:
        """Discard a step that was unscaled but is not applied."""
        if self.is_enabled():
            self._per_optimizer_states.clear()
