"""Read ahead: threads decode the blocks needed next, and one thread builds micro-batches.

The order is known, so nothing is guessed. Rows are taken for a chunk of steps at once, then cut into micro-batches: no
Python runs per row. Little more is built ahead than was taken, since a new world's first steps need the processor, and
what a world has not taken at its end is built again. The thread that asks for steps builds the first one and does all
bookkeeping; pool tasks only compute, and end by themselves.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch

from elastic_train.core.arrays import Int64s
from elastic_train.core.mixture import RunOrder
from elastic_train.core.order import Cursor, NeededBlock, Samples
from elastic_train.data.arrow.columns import Joined, Rows
from elastic_train.data.dataset.row_groups import num_decoders
from elastic_train.data.loading.lane_batch import (
    AS_THEY_ARE,
    Collate,
    Decoder,
    LaneBatch,
    SampleRules,
    SkippingHoles,
    builder_of,
)
from elastic_train.data.loading.reader import RowSource

PREFETCH_BYTES = 128 << 20
CHUNK_BYTES, CHUNK_ROWS, CHUNKS_AHEAD = 4 << 20, 512, 4
IDS_AT_ONCE = 4096
REMOTE_READERS = 32
GROUPS_AHEAD, REMOTE_GROUPS_AHEAD = 32, 128
"""Most row groups decoded in advance, if the bytes allow. Over a network this, the bytes and the readers bound the data
in flight: at the speed of local files, with row groups of half a MB, 50 ms need 25."""

Step = list[LaneBatch]


class ReadAhead:
    """Yields the steps of some lanes; `prefetch_bytes` bounds decoded rows that no step needs yet."""

    def __init__(
        self,
        reader: RowSource,
        order: RunOrder,
        collate: Collate,
        *,
        lanes: range,
        micro_batch: int,
        prefetch_bytes: int = PREFETCH_BYTES,
        rules: SampleRules = AS_THEY_ARE,
    ) -> None:
        self._reader, self._order, self._rules = reader, order, rules
        self._builder = builder_of(reader, order, collate, micro_batch, rules)
        self._lanes, self._micro_batch, self._prefetch_bytes = lanes, micro_batch, prefetch_bytes
        self._is_pinned = torch.cuda.is_available()
        self._samples = {lane: _LaneSamples(order, lane) for lane in lanes}
        self._beside = {lane: SideBySide() for lane in lanes}

    def steps(self, cursor: Cursor, num_steps: int) -> Generator[Step, None, None]:
        """Yield one list per step: a micro-batch for every lane."""
        next_ = first = self._order.step_of(cursor, self._micro_batch)
        end = first + num_steps
        decoder = SkippingHoles(self._reader, self._rules, first)
        schedule = BlockSchedule(decoder, self._order, self._lanes, self._micro_batch, range(first, end))
        decoders = ThreadPoolExecutor(_num_decoders(self._reader), "decode")
        assembler = ThreadPoolExecutor(1, "assemble")
        chunks: deque[tuple[int, int, SimpleQueue[Step | BaseException]]] = deque()
        try:
            if next_ < end:  # the waiting thread builds the first step, so no other has to wake up
                yield from self._assemble(next_, next_ + 1, schedule.require(next_, next_ + 1, decoders))
                next_ += 1
            while next_ < end or chunks:
                while next_ < end and len(chunks) <= CHUNKS_AHEAD:
                    num_taken = (chunks[0][0] if chunks else next_) - first
                    most = next_ + max(1, num_taken // CHUNKS_AHEAD)
                    hi = min(end, most, self._chunk_end(next_, schedule.row_bytes))
                    blocks = schedule.require(next_, hi, decoders)
                    made: SimpleQueue[Step | BaseException] = SimpleQueue()
                    assembler.submit(self._assemble_into, made, next_, hi, blocks)
                    chunks.append((next_, hi, made))
                    next_ = hi
                lo, hi, made = chunks.popleft()
                schedule.release(lo)
                schedule.prefetch(lo, self._prefetch_bytes, _groups_ahead(self._reader), decoders)
                for _ in range(lo, hi):
                    step = made.get()
                    if isinstance(step, BaseException):
                        raise step
                    yield step
        finally:
            assembler.shutdown(wait=False, cancel_futures=True)
            decoders.shutdown(wait=False, cancel_futures=True)

    def _chunk_end(self, step: int, row_bytes: float | None) -> int:
        """Return the end of a chunk that begins at a step: within the epoch, and early if rows are unreadable."""
        if row_bytes is None:
            return step + 1
        num_steps = self._order.num_steps(self._micro_batch)
        rows = min(CHUNK_ROWS, CHUNK_BYTES // max(1, int(row_bytes)))
        return step + max(1, min(num_steps - step % num_steps, rows // (self._micro_batch * len(self._lanes))))

    def _assemble_into(
        self,
        made: SimpleQueue[Step | BaseException],
        lo: int,
        hi: int,
        blocks: Sequence[Sequence[DecodedBlock]],
    ) -> None:
        """Hand each step over once built: if building is slow, none waits for a whole chunk."""
        try:
            for step in self._assemble(lo, hi, blocks):
                made.put(step)
        except BaseException as error:  # noqa: BLE001 - raised where the step is waited for
            made.put(error)

    def _assemble(self, lo: int, hi: int, blocks: Sequence[Sequence[DecodedBlock]]) -> Iterator[Step]:
        """Build the micro-batches of the steps [lo, hi), all in one epoch."""
        cursor = self._order.cursor_at(lo, self._micro_batch)
        lanes = []
        for lane, of_lane in zip(self._lanes, blocks, strict=True):
            samples = self._samples[lane].after(cursor, (hi - lo) * self._micro_batch)
            rows_of = {group: rows for block in of_lane for group, rows in block.rows.items()}
            joined = self._beside[lane].joined(of_lane, self._reader.first_id)
            taken = self._builder.take(lane, cursor, lo, samples, lambda group, of=rows_of: of[group].result(), joined)  # type: ignore[misc]
            lanes.append(taken)
        for number in range(hi - lo):
            yield [self._pinned(self._builder.batch(taken, number)) for taken in lanes]

    def _pinned(self, batch: LaneBatch) -> LaneBatch:
        return batch.pin_memory() if self._is_pinned else batch


class _LaneSamples:
    """A lane's samples, computed many at a time, since a call costs as much as hundreds of them; few at first."""

    def __init__(self, order: RunOrder, lane: int) -> None:
        self._order, self._lane = order, lane
        self._cursor, self._made = Cursor(), Samples(np.zeros(0, dtype=np.int64), 0)

    def after(self, cursor: Cursor, num: int) -> Samples:
        """Return the next samples after a cursor, fewer at the end of the epoch."""
        lo = cursor.offset - self._cursor.offset
        if cursor.epoch != self._cursor.epoch or lo < 0 or lo + num > len(self._made.ids):
            at_once = max(num, min(IDS_AT_ONCE, 4 * len(self._made.ids)))
            self._cursor, self._made, lo = cursor, self._order.samples(cursor, self._lane, at_once), 0
        ids, epochs = self._made.ids, self._made.epochs
        return Samples(ids[lo : lo + num], epochs if isinstance(epochs, int) else epochs[lo : lo + num])


def _num_decoders(reader: RowSource) -> int:
    """Return the number of reader threads: one per decoder, or more if they mostly wait."""
    return REMOTE_READERS if reader.is_remote else num_decoders()


def _groups_ahead(reader: RowSource) -> int:
    """Return how many row groups to read ahead: more for remote data."""
    return REMOTE_GROUPS_AHEAD if reader.is_remote else GROUPS_AHEAD


BLOCKS_AHEAD = 4


class DecodedBlock:
    """A lane's block: the steps [first, end) that need it, and its row groups, pending or decoded."""

    def __init__(self, block: NeededBlock) -> None:
        self.groups, self.first, self.end, self.num_rows = block.groups, block.first, block.end, block.num_rows
        self.rows: dict[int, Future[Rows]] = {}
        self._row_bytes: float | None = None
        self._joined: Joined | None = None

    def decode(self, decoder: Decoder, pool: Executor) -> None:
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
    """Decodes blocks for the steps [first, end) of some lanes, from any cursor on.

    A block is in use from the first step that needs a row of it to the last; blocks decoded in advance are bounded
    in bytes. The schedule belongs to the thread that asks for steps.
    """

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
