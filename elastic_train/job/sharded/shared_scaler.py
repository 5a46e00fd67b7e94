"""A gradient scaler for ranks that each see a part of the gradient: whether it overflowed is known by its norm."""

from __future__ import annotations

from torch.amp import GradScaler
from torch.optim import Optimizer


class SharedScaler(GradScaler):
    """torch's scaler, told what it cannot see. What it keeps of a step is private to torch's class and its children,
    as `torch.distributed.fsdp.sharded_grad_scaler` uses it, whose process group ours is not.
    """

    def note_overflow(self, optimizer: Optimizer) -> None:
        """Let the step that was unscaled count as overflowed, wherever it did; nothing where scaling is off."""
        if self.is_enabled():
            for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                found.fill_(1.0)

    def forget_step(self) -> None:
        """Let go of a step that was unscaled and is not applied."""
        if self.is_enabled():
            self._per_optimizer_states.clear()
