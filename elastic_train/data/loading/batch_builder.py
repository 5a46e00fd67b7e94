"""Samples that cannot be used as they are: those of holes, those that cannot be read, and rows that are too long.

Samples of a hole are left out of their micro-batch, and nothing else about it changes. A row group that cannot be read
is no hole yet: its micro-batch comes without tensors and names it, and whoever trains decides, on all ranks alike, from
which step on it is one. Rows that are longer than a task takes are refused, or cut and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.keyed_random import Int64s
from elastic_train.core.order import Cursor
from elastic_train.data.arrow.numbers import numbers_of, whole
from elastic_train.data.arrow.rows import Joined, Rows, groups_of
from elastic_train.data.loading.lane_batch import Collate, LaneBatch
from elastic_train.errors import DataError, UnreadableError


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do with samples that cannot be used as they are.

    `holes` are row groups, by number, and the first step without each. With `quarantines` a row group that cannot be
    read is named in its micro-batch in place of raising. `longest` bounds the values of list columns; rows that have
    more are cut if `truncates`, else they raise.
    """

    holes: tuple[tuple[int, int], ...] = ()
    quarantines: bool = False
    longest: Mapping[str, int] = field(default_factory=dict)
    truncates: bool = False


AS_THEY_ARE = Rules()


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows of some steps of one lane: those of step m, from the first on, are [bounds[m], bounds[m + 1]).

    `fit` says that no row is too long.
    """

    lane: int
    cursor: Cursor
    rows: pa.Table | None
    fit: bool
    ids: Int64s
    bounds: Sequence[int]
    num_places: Sequence[int]
    num_left_out: Sequence[int]
    unreadable: Mapping[int, Mapping[int, str]]


class Sifter:
    """Takes rows for a lane's steps, and makes micro-batches of them, by some rules."""

    def __init__(self, first_id: Int64s, micro_batch: int, collate: Collate, rules: Rules) -> None:
        self._first_id, self._micro_batch, self._collate, self._rules = first_id, micro_batch, collate, rules

    def take(
        self,
        lane: int,
        cursor: Cursor,
        step: int,
        ids: Int64s,
        rows_of: Callable[[int], Rows],
        joined: Joined | None = None,
    ) -> Taken:
        """Take the rows of the ids of consecutive steps, from `step` on, which lies at the cursor.

        `rows_of` returns the rows of a row group by its number, or raises UnreadableError; `joined`, if they are known
        to be there, are all row groups that the ids lie in.
        """
        bounds = [*range(0, len(ids), self._micro_batch), len(ids)]
        num_places, none_left_out = np.diff(bounds).tolist(), [0] * (len(bounds) - 1)
        if joined is not None and len(ids) and not self._rules.holes:
            table, read_ids = joined.take(ids)
            return Taken(lane, cursor, table, self._fits(table), read_ids, bounds, num_places, none_left_out, {})
        steps = np.arange(len(ids)) // self._micro_batch
        is_kept = self._is_kept(ids, step + steps)
        num_left_out = np.bincount(steps[~is_kept], minlength=len(num_places)).tolist()
        rows, wrong = self._read(groups_of(self._first_id, ids[is_kept]), rows_of)
        unreadable: dict[int, dict[int, str]] = {}
        groups = self._groups_of(ids)
        for group, why in wrong.items():
            for number in np.unique(steps[is_kept & (groups == group)]).tolist():
                unreadable.setdefault(number, {})[group] = why
            is_kept &= groups != group
        if rows:
            table, read_ids = Joined(self._first_id, rows).take(ids[is_kept])
        else:
            table, read_ids = None, ids[:0]
        num_kept = np.bincount(steps[is_kept], minlength=len(num_places))
        return Taken(
            lane,
            cursor,
            table,
            table is None or self._fits(table),
            read_ids,
            np.concatenate(([0], np.cumsum(num_kept))).tolist(),
            num_places,
            num_left_out,
            unreadable,
        )

    def batch(self, taken: Taken, number: int) -> LaneBatch:
        """Make the micro-batch of one of the steps, counted from the first that was taken."""
        lo = taken.cursor.offset + number * self._micro_batch
        if number >= len(taken.num_places):
            return LaneBatch(taken.lane, taken.cursor.epoch, lo, lo, taken.ids[:0], None)
        first, end = taken.bounds[number], taken.bounds[number + 1]
        ids, unreadable = taken.ids[first:end], taken.unreadable.get(number, {})
        tensors, num_truncated = None, 0
        if len(ids) and not unreadable:
            assert taken.rows is not None, "ids come with their rows"
            rows = taken.rows.slice(first, end - first)
            if not taken.fit:
                rows, num_truncated = self._fit(rows, ids)
            tensors = self._collate(rows, ids)
        return LaneBatch(
            taken.lane,
            taken.cursor.epoch,
            lo,
            lo + taken.num_places[number],
            ids,
            tensors,
            taken.num_left_out[number],
            num_truncated,
            unreadable,
        )

    def _is_kept(self, ids: Int64s, steps: Int64s) -> npt.NDArray[np.bool_]:
        """Say which samples do not lie in a hole, in their steps."""
        is_kept = np.ones(len(ids), dtype=bool)
        if self._rules.holes:
            groups = self._groups_of(ids)
            for hole, since in self._rules.holes:
                is_kept &= (groups != hole) | (steps < since)
        return is_kept

    def _groups_of(self, ids: Int64s) -> Int64s:
        return np.searchsorted(self._first_id, ids, side="right") - 1

    def _read(self, groups: Sequence[int], rows_of: Callable[[int], Rows]) -> tuple[dict[int, Rows], dict[int, str]]:
        """Return the row groups, and why others cannot be read."""
        rows, wrong = {}, {}
        for group in groups:
            try:
                rows[group] = rows_of(group)
            except UnreadableError as error:
                if not self._rules.quarantines:
                    raise
                wrong[group] = str(error)
        return rows, wrong

    def _fits(self, rows: pa.Table) -> bool:
        """Say whether no row is too long."""
        return all(lengths_of(rows.column(name)).max() <= longest for name, longest in self._rules.longest.items())

    def _fit(self, rows: pa.Table, ids: Int64s) -> tuple[pa.Table, int]:
        """Cut rows that are too long, or refuse them; return the rows, and how many were cut."""
        is_long = np.zeros(len(ids), dtype=bool)
        for name, longest in self._rules.longest.items():
            lengths = lengths_of(rows.column(name))
            if lengths.max(initial=0) <= longest:
                continue
            is_long |= lengths > longest
            if not self._rules.truncates:
                worst = int(lengths.argmax())
                raise DataError(
                    f"sample {ids[worst]} has {lengths[worst]} values in column '{name}', the task takes {longest}: "
                    "let it take more, or set `data.too_long: truncate` to cut such rows there"
                )
            rows = _cut(rows, name, longest)
        return rows, int(is_long.sum())


class Decoder(Protocol):
    """What decodes row groups, from any thread."""

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group, or raise UnreadableError."""

    def at_hand(self, group: int) -> Rows | None:
        """Return the rows of a row group if that takes no time, else None."""


class Beyond:
    """A decoder that reads nothing of holes that begin at or before a step."""

    def __init__(self, decoder: Decoder, rules: Rules, step: int) -> None:
        self._decoder = decoder
        self._left_out = frozenset(group for group, since in rules.holes if since <= step)

    def decode(self, group: int) -> Rows:
        if group in self._left_out:
            raise UnreadableError(f"row group {group} is in a hole")
        return self._decoder.decode(group)

    def at_hand(self, group: int) -> Rows | None:
        return None if group in self._left_out else self._decoder.at_hand(group)


def lengths_of(column: pa.ChunkedArray) -> Int64s:
    """Return how many values the rows of a list column have."""
    return np.diff(numbers_of(whole(column).offsets)).astype(np.int64)


def _cut(rows: pa.Table, name: str, longest: int) -> pa.Table:
    import pyarrow.compute as pc  # takes long to import, and few runs need it

    place = rows.column_names.index(name)
    cut: Sequence[pa.Array] = [pc.list_slice(chunk, 0, longest) for chunk in rows.column(name).chunks]
    return rows.set_column(place, rows.schema.field(name), pa.chunked_array(cut).cast(rows.schema.field(name).type))
