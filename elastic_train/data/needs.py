"""When each row group is needed next: the order tells the future, for every lane, whoever owns it.

Invariant: a row group is needed from the first step that may take a sample of a block it lies in until the last one,
and then not before such a block of the next epoch. With an arrangement these are all steps of the block's windows.
"""

from __future__ import annotations

import numpy as np

from elastic_train.core.keyed_random import Int64s
from elastic_train.core.order import EpochOrder, Order

Uses = tuple[Int64s, Int64s, Int64s]


class Needs:
    """The steps at which the row groups of a run are needed; an epoch's are worked out once."""

    def __init__(self, order: Order, micro_batch: int) -> None:
        self._order, self._micro_batch = order, micro_batch
        self._uses: dict[int, Uses] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_uses": {}}

    def after(self, step: int) -> Int64s:
        """Return the first step from `step` on that needs each row group; shape (row groups,).

        It is `step` itself while a row group is in use.
        """
        num_steps = self._order.num_steps(self._micro_batch)
        epoch, within = divmod(step, num_steps)
        self._uses = {number: self._uses.get(number) or self._uses_in(number) for number in (epoch, epoch + 1)}
        needs = np.full(self._order.group_rows.size, np.iinfo(np.int64).max)
        groups, firsts, _ = self._uses[epoch + 1]
        np.minimum.at(needs, groups, (epoch + 1) * num_steps + firsts)
        groups, firsts, ends = self._uses[epoch]
        is_left = ends > within
        np.minimum.at(needs, groups[is_left], epoch * num_steps + np.maximum(firsts[is_left], within))
        return needs

    def _uses_in(self, number: int) -> Uses:
        """Return row groups, and the steps [first, end) of an epoch that use each, for all blocks of all lanes."""
        epoch, order = EpochOrder(self._order, number), self._order
        uses: list[tuple[int, int, int]] = []
        for lane in range(order.num_lanes):
            lo, hi = order.lane_bounds(lane)
            offset = 0
            while offset < hi - lo:
                block = epoch.block_at(lane, offset)
                first, end = order.steps_of(lane, block.lo, block.hi, self._micro_batch)
                uses.extend((group, first, end) for group in block.groups.tolist())
                offset = block.hi
        groups, firsts, ends = np.array(uses, dtype=np.int64).T
        return groups, firsts, ends
