"""Random numbers of tensor ranks: one stream that all share, and one of each rank's own for its parts of tensors.

What all ranks compute alike has to draw alike; dropout of a rank's own attention heads must not drop the elements that
the other ranks drop of theirs (as in Megatron-LM, Shoeybi et al. 2019). Each switch to the own stream seeds it with a
number from the shared one and the rank's place, so it depends on lane, step and tensor degree, but not on the world.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.core.keyed_random import derive
from elastic_train.parallel.cells.pipeline import Generators


class RandomStreams:
    """The stream in use by this rank's generators, which start with the shared one."""

    def __init__(self) -> None:
        self._shared: tuple[Generators, Tensor] | None = None
        """State of the shared stream while the own one is in use."""

    def use_own(self, place: int, device: torch.device) -> None:
        """Draw from the own stream of the rank at `place` from now on."""
        if self._shared is not None:
            return
        generators, number = Generators(device), torch.randint(1 << 62, (), generator=torch.default_generator)
        self._shared = generators, generators.state()
        generators.seed(derive(int(number), place) >> 1)

    def use_shared(self) -> None:
        """Continue with the shared stream."""
        if self._shared is not None:
            generators, state = self._shared
            self._shared = None
            generators.continue_at(state)
