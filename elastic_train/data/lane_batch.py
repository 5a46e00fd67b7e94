"""What a loader hands out: one lane's micro-batch of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from elastic_train.mixing import Int64s

Collate = Callable[[pa.Table, npt.NDArray[np.int64]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LaneBatch:
    """One lane's micro-batch; `ids` are those actually read, `tensors` is None where the lane has no sample left."""

    lane: int
    epoch: int
    lo: int
    hi: int
    ids: Int64s
    tensors: dict[str, Tensor] | None = field(repr=False)

    def pin_memory(self) -> LaneBatch:
        """Return the same with tensors that a device can copy while it computes."""
        if self.tensors is None:
            return self
        return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})
