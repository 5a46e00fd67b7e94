"""Windows: arrange the samples of a stretch of a lane into micro-batches, so that those of one step are similar.

A window is a number of steps of a lane. Its samples are those of the shuffled order; an arrangement reorders them
within the window, by a rule common to all lanes. So an epoch's order stays a pure function of the cursor, every sample
stays in its window, and the loss of mixing is bounded by the window.

`LengthBuckets` sorts a window by length, cuts it into micro-batches, and shuffles these by a key shared by all lanes:
in one step every lane takes the micro-batch of the same length rank. An arrangement only permutes: packing samples into
sequences of one size changes the number of samples in a micro-batch, and needs more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import permute

WINDOW_STEPS = 64


class Arrangement(Protocol):
    """The rule that turns a window's samples into micro-batches."""

    @property
    def size(self) -> int:
        """Positions of a lane in a window: a multiple of the micro-batch."""

    @property
    def fingerprint(self) -> int:
        """Identifies this arrangement, not 0: a run cannot continue with another."""

    def arrange(self, ids: Int64s, shortest: int, key: int) -> Int64s:
        """Return a window's ids reordered; every lane has its first `shortest` positions, and all share `key`."""


class LengthBuckets:
    """Puts samples of similar length into a micro-batch; `lengths` returns those of ids, and has a fingerprint."""

    def __init__(
        self,
        lengths: Callable[[Int64s], Int64s],
        micro_batch: int,
        *,
        fingerprint: int = 1,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        self._lengths, self._micro_batch = lengths, micro_batch
        self._size, self._fingerprint = micro_batch * window_steps, fingerprint

    @property
    def size(self) -> int:
        return self._size

    @property
    def fingerprint(self) -> int:
        return self._fingerprint

    def arrange(self, ids: Int64s, shortest: int, key: int) -> Int64s:
        by_length = ids[np.argsort(self._lengths(ids), kind="stable")]
        # Micro-batches that some lane has incomplete stay at the end of the epoch, where they are short anyway.
        num_shared = shortest // self._micro_batch
        if num_shared < 2:
            return by_length
        until = num_shared * self._micro_batch
        order = permute(np.arange(num_shared, dtype=np.int64), num_shared, key)
        shared = by_length[:until].reshape(num_shared, self._micro_batch)[order]
        return np.concatenate([shared.reshape(-1), by_length[until:]])
