"""torch's generators that a forward pass uses: the host's and, if there is one, the device's."""

from __future__ import annotations

import torch
from torch import Tensor


class Generators:
    """Reads and sets all generators at once, so that another rank can continue where this one stopped."""

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.default_generator, *_own(device)]
        self._sizes = [one.get_state().numel() for one in self._all]
        self.num_bytes = sum(self._sizes)

    def state(self) -> Tensor:
        """Return the generators' states: bytes in host memory, 1-D, of constant length."""
        return torch.cat([one.get_state() for one in self._all])

    def continue_at(self, state: Tensor) -> None:
        """Set the generators to `state`, on any device."""
        for one, part in zip(self._all, state.cpu().split_with_sizes(self._sizes), strict=True):
            one.set_state(part.clone())


def _own(device: torch.device) -> list[torch.Generator]:
    """Return the generator of a device that is not the host."""
    return [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
