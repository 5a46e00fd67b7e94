"""Windows: how the samples of a stretch of a lane are dealt into micro-batches, so that those of one step are alike.

A window is a number of steps of a lane. Its samples are those that the shuffled order has there; an arrangement gives
them another order within the window, by a rule that is the same for all lanes. So the order of an epoch stays a pure
function of the cursor, every sample stays in its window, and what is lost in mixing is bounded by the window.

`LengthBuckets` sorts a window by length, cuts it into micro-batches, and shuffles these by a key that all lanes share:
in one step every lane takes the micro-batch of the same rank by length. An arrangement only permutes: packing samples
into sequences of one size, which changes how many of them a micro-batch has, needs more than another arrangement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import permute

WINDOW_STEPS = 64


class Arrangement(Protocol):
    """How the samples of a window become micro-batches."""

    @property
    def size(self) -> int:
        """How many places of a lane a window has: a multiple of the micro-batch."""

    @property
    def fingerprint(self) -> int:
        """What identifies this arrangement, not 0: a run cannot continue with another."""

    def arrange(self, ids: Int64s, shortest: int, key: int) -> Int64s:
        """Return a window's ids in another order; `shortest` of its places are in every lane, and `key` is for all."""


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
        # Micro-batches that not every lane has whole stay at the end, the epoch's, where they are short anyway.
        num_shared = shortest // self._micro_batch
        if num_shared < 2:
            return by_length
        until = num_shared * self._micro_batch
        order = permute(np.arange(num_shared, dtype=np.int64), num_shared, key)
        shared = by_length[:until].reshape(num_shared, self._micro_batch)[order]
        return np.concatenate([shared.reshape(-1), by_length[until:]])
