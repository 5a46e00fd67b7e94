"""A loader's output: one lane's micro-batch of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from elastic_train.core.arrays import Int64s


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """One lane's micro-batch of the positions [lo, hi) of its epoch; `ids`, shape (n,), are those read.

    `tensors` is None if no sample is left, or row groups are `unreadable` (reason by number): such a micro-batch must
    not be trained on. `num_left_out` positions are in holes, `num_truncated` rows were truncated.
    """

    lane: int
    epoch: int
    lo: int
    hi: int
    ids: Int64s
    tensors: dict[str, Tensor] | None = field(repr=False)
    num_left_out: int = 0
    num_truncated: int = 0
    unreadable: Mapping[int, str] = field(default_factory=dict)

    def pin_memory(self) -> LaneBatch:
        """Return a copy with pinned tensors, which a device can copy while it computes."""
        if self.tensors is None:
            return self
        return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})
