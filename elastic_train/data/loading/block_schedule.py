"""Blocks that a loader's lanes need, in step order, decoded by a thread pool.

A block is in use from the first step that needs a row of it to the last; blocks decoded in advance are bounded in
bytes. The schedule belongs to the thread that asks for steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future

from elastic_train.core.arrays import Int64s
from elastic_train.core.mixture.dealing import RunOrder
from elastic_train.core.order import NeededBlock
from elastic_train.data.arrow.rows import Joined, Rows
from elastic_train.data.loading.sample_rules import Decoder

BLOCKS_AHEAD = 4


class DecodedBlock:
    """A lane's block: the steps [first, end) that need it, and its row groups, pending or decoded."""

    def __init__(self, block: NeededBlock) -> None:
        self.groups, self.first, self.end, self.num_rows = block.groups, block.first, block.end, block.num_rows
        self.rows: dict[int, Future[Rows]] = {}
        self._row_bytes: float | None = None
        self._joined: Joined | None = None

    def decode(self, decoder: Decoder, pool: Executor) -> None:
        """Start to decode the row groups."""
        self.rows = {group: pool.submit(decoder.decode, group) for group in self.groups.tolist()}

    @property
    def row_bytes(self) -> float | None:
        """Mean bytes of a decoded row; None before decoding is done."""
        if self._row_bytes is None and self.rows and all(rows.done() for rows in self.rows.values()):
            num_bytes = sum(rows.result().nbytes for rows in self.rows.values() if not rows.exception())
            self._row_bytes = num_bytes / self.num_rows if num_bytes else None
        return self._row_bytes

    def joined(self, first_id: Int64s) -> Joined | None:
        """Return the concatenated row groups, cached; None unless all of them are decoded without error."""
        if self._joined is None and all(rows.done() and not rows.exception() for rows in self.rows.values()):
            self._joined = Joined(first_id, {group: rows.result() for group, rows in self.rows.items()})
        return self._joined


class SideBySide:
    """Concatenates a lane's blocks; combinations reused by consecutive chunks, as in mixtures, are joined once."""

    def __init__(self) -> None:
        self._blocks: tuple[DecodedBlock, ...] = ()
        self._joined: Joined | None = None

    def joined(self, blocks: Sequence[DecodedBlock], first_id: Int64s) -> Joined | None:
        """Return the blocks' concatenated row groups; None unless all are decoded without error and worth joining."""
        if len(blocks) == 1:
            return blocks[0].joined(first_id)
        if not blocks or tuple(blocks) != self._blocks:
            self._blocks, self._joined = tuple(blocks), None
            return None
        if self._joined is None:
            rows = [each for block in blocks for each in block.rows.items()]
            if all(one.done() and not one.exception() for _, one in rows):
                self._joined = Joined(first_id, {group: one.result() for group, one in rows})
        return self._joined


class BlockSchedule:
    """Decodes blocks for the steps [first, end) of some lanes, from any cursor on."""

    def __init__(self, decoder: Decoder, order: RunOrder, lanes: range, micro_batch: int, steps: range) -> None:
        self._decoder, self._block_row_groups = decoder, order.block_row_groups
        self._held: dict[int, list[DecodedBlock]] = {lane: [] for lane in lanes}
        self._needed: dict[int, Iterator[NeededBlock]] = {
            lane: order.blocks(lane, steps, micro_batch) for lane in lanes
        }
        self._next: list[tuple[int, int, DecodedBlock]] = []
        for lane in lanes:
            self._plan(lane)

    @property
    def row_bytes(self) -> float | None:
        """Mean bytes of a decoded row, over decoded blocks; None while there is none."""
        known = [block.row_bytes for blocks in self._held.values() for block in blocks]
        return max((row_bytes for row_bytes in known if row_bytes is not None), default=None)

    def require(self, lo: int, hi: int, pool: Executor) -> list[Sequence[DecodedBlock]]:
        """Return each lane's blocks of the steps [lo, hi), starting to decode those not yet begun."""
        while self._next and self._next[0][0] < hi:
            self._admit(pool)
        return [[block for block in blocks if block.first < hi and block.end > lo] for blocks in self._held.values()]

    def prefetch(self, step: int, max_bytes: int, max_groups: int, pool: Executor) -> None:
        """Decode the blocks needed first after `step`, up to `max_bytes`.

        At most a few blocks per lane, or `max_groups` row groups in total: small rows never fill the bytes.
        """
        row_bytes = self.row_bytes
        if row_bytes is None:
            return
        ahead = [block.num_rows for blocks in self._held.values() for block in blocks if block.first > step]
        most = max(BLOCKS_AHEAD * len(self._held), max_groups // self._block_row_groups)
        rows, num_left = sum(ahead), most - len(ahead)
        while self._next and num_left > 0 and (rows + self._next[0][2].num_rows) * row_bytes <= max_bytes:
            rows, num_left = rows + self._next[0][2].num_rows, num_left - 1
            self._admit(pool)

    def release(self, step: int) -> None:
        """Drop the blocks that no step from `step` on needs."""
        for lane, blocks in self._held.items():
            self._held[lane] = [block for block in blocks if block.end > step]

    def _admit(self, pool: Executor) -> None:
        """Start to decode the next block, and plan its lane's next."""
        _, lane, block = heapq.heappop(self._next)
        block.decode(self._decoder, pool)
        self._held[lane].append(block)
        self._plan(lane)

    def _plan(self, lane: int) -> None:
        """Queue the block that a lane needs next, if the steps reach it."""
        if (block := next(self._needed[lane], None)) is not None:
            heapq.heappush(self._next, (block.first, lane, DecodedBlock(block)))
