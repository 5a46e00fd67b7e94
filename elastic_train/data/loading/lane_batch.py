"""A loader's output, one lane's micro-batch of one step, and how it is built from rows, for every run.

Samples in a hole are left out of their micro-batch, which is otherwise unchanged. An unreadable row group is not a hole
yet: its micro-batch has no tensors and names it, and the trainer decides, on all ranks alike, from which step on it is
one. Rows longer than a task accepts are rejected, or truncated and counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.core.mixture import RunOrder
from elastic_train.core.order import Cursor, Samples
from elastic_train.data.arrow.columns import Joined, Rows, groups_of
from elastic_train.data.arrow.numbers import lengths_of, truncate_lists
from elastic_train.data.loading.reader import RowSource
from elastic_train.errors import AwayError, DataError, RowError, UnreadableError


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


PlainCollate = Callable[[pa.Table, npt.NDArray[np.int64]], "dict[str, Tensor]"]
DrawingCollate = Callable[[pa.Table, npt.NDArray[np.int64], SampleRandom], "dict[str, Tensor]"]
Collate = PlainCollate | DrawingCollate

EXPECTED = "collate(rows, ids), or collate(rows, ids, draw) to draw random numbers"

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes_draw(collate: Collate) -> bool:
    """Return True if a function takes random numbers: its third parameter is required, or named `draw`.

    A third parameter with a default and another name is left alone. Raise TypeError if the function accepts neither two
    nor three arguments.
    """
    signature = inspect.signature(collate)
    positional = [each for each in signature.parameters.values() if each.kind in _POSITIONAL]
    third = positional[2] if len(positional) > 2 else None
    is_drawing = third is not None and (third.name == "draw" or third.default is inspect.Parameter.empty)
    try:
        signature.bind(*[None] * (3 if is_drawing else 2))
    except TypeError as error:
        name = getattr(collate, "__qualname__", repr(collate))
        raise TypeError(f"{name}{signature} cannot be called ({error}); expected {EXPECTED}") from error
    return is_drawing


class Collator:
    """Calls a function of either kind; picklable if the function is. `is_training` is passed on with random numbers."""

    def __init__(self, collate: Collate, *, is_training: bool = True) -> None:
        self._collate, self._takes_draw, self._is_training = collate, takes_draw(collate), is_training

    def __call__(
        self, rows: pa.Table, ids: npt.NDArray[np.int64], seed: int, epochs: npt.NDArray[np.int64] | int
    ) -> dict[str, Tensor]:
        """Turn rows into tensors; random numbers, if used, depend on seed, epochs and ids only."""
        if self._takes_draw:
            draw = SampleRandom(seed, epochs, ids, self._is_training)
            return cast(DrawingCollate, self._collate)(rows, ids, draw)
        return cast(PlainCollate, self._collate)(rows, ids)


@dataclass(frozen=True, slots=True)
class SampleRules:
    """Rules for samples that cannot be used as they are.

    `holes` are row groups by number, each with its first step without them; `left_out` are id ranges [lo, hi), each
    with its first step. With `quarantines` an unreadable row group is named in its micro-batch instead of raising.
    `longest` bounds the values of list columns; longer rows are truncated if `truncates`, else they raise.
    """

    holes: tuple[tuple[int, int], ...] = ()
    left_out: tuple[tuple[int, int, int], ...] = ()
    quarantines: bool = False
    longest: Mapping[str, int] = field(default_factory=dict)
    truncates: bool = False


AS_THEY_ARE = SampleRules()


class Decoder(Protocol):
    """Decodes row groups; thread-safe."""

    def decode(self, group: int) -> Rows:
        """Return the rows of a row group, or raise UnreadableError."""


class SkippingHoles:
    """A decoder that does not read holes in effect at a step."""

    def __init__(self, decoder: Decoder, rules: SampleRules, step: int) -> None:
        self._decoder = decoder
        self._left_out = frozenset(group for group, since in rules.holes if since <= step)

    def decode(self, group: int) -> Rows:
        if group in self._left_out:
            raise UnreadableError(f"row group {group} is in a hole")
        return self._decoder.decode(group)


@dataclass(frozen=True, slots=True)
class TakenRows:
    """Rows of consecutive steps of one lane: step m, from the first, has [bounds[m], bounds[m + 1]).

    `fit` is True if no row is too long.
    """

    lane: int
    cursor: Cursor
    rows: pa.Table | None
    fit: bool
    ids: Int64s
    epochs: Int64s | int
    bounds: Sequence[int]
    num_places: Sequence[int]
    num_left_out: Sequence[int]
    unreadable: Mapping[int, Mapping[int, str]]


class BatchBuilder:
    """Takes rows for a lane's steps and builds micro-batches by some rules; picklable if `collate` is.

    `seed`, epoch and sample id determine the random numbers of `collate`, whose `is_training` is set to this one's.
    """

    def __init__(
        self,
        first_id: Int64s,
        micro_batch: int,
        collate: Collate,
        rules: SampleRules,
        *,
        seed: int,
        is_training: bool = True,
        place_of: Callable[[int], str] = "sample {}".format,
    ) -> None:
        self._first_id, self._micro_batch, self._rules = first_id, micro_batch, rules
        self._collate, self._seed, self._place_of = Collator(collate, is_training=is_training), seed, place_of

    def take(
        self,
        lane: int,
        cursor: Cursor,
        step: int,
        samples: Samples,
        rows_of: Callable[[int], Rows],
        joined: Joined | None = None,
    ) -> TakenRows:
        """Take the rows of consecutive steps, starting with `step` at the cursor.

        `rows_of` returns a row group's rows by number, or raises UnreadableError; `joined`, if given, holds all the row
        groups of the ids.
        """
        ids, epochs = samples.ids, samples.epochs
        bounds = [*range(0, len(ids), self._micro_batch), len(ids)]
        num_places, none_left_out = np.diff(bounds).tolist(), [0] * (len(bounds) - 1)
        if joined is not None and len(ids) and not self._rules.holes and not self._rules.left_out:
            table, read_ids = joined.take(ids)
            return TakenRows(
                lane, cursor, table, self._fits(table), read_ids, epochs, bounds, num_places, none_left_out, {}
            )
        steps = np.arange(len(ids)) // self._micro_batch
        is_kept = self._is_kept(ids, step + steps)
        num_left_out = np.bincount(steps[~is_kept], minlength=len(num_places)).tolist()
        rows, wrong = self._read(groups_of(self._first_id, ids[is_kept]), rows_of)
        unreadable = _leave_out(wrong, group_of(self._first_id, ids), steps, is_kept)
        if rows:
            table, read_ids = Joined(self._first_id, rows).take(ids[is_kept])
        else:
            table, read_ids = None, ids[:0]
        num_kept = np.bincount(steps[is_kept], minlength=len(num_places))
        return TakenRows(
            lane,
            cursor,
            table,
            table is None or self._fits(table),
            read_ids,
            epochs if isinstance(epochs, int) else epochs[is_kept],
            np.concatenate(([0], np.cumsum(num_kept))).tolist(),
            num_places,
            num_left_out,
            unreadable,
        )

    def batch(self, taken: TakenRows, number: int) -> LaneBatch:
        """Build the micro-batch of one of the steps, counted from the first taken."""
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
            epochs = taken.epochs if isinstance(taken.epochs, int) else taken.epochs[first:end]
            try:
                tensors = self._collate(rows, ids, self._seed, epochs)
            except UnreadableError:
                raise
            except DataError as error:
                raise self._located(error, rows, ids, epochs) from error
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
        """Return a mask of samples that are in no hole in effect at their steps; shape of `ids`."""
        is_kept = np.ones(len(ids), dtype=bool)
        if self._rules.holes:
            groups = group_of(self._first_id, ids)
            for hole, since in self._rules.holes:
                is_kept &= (groups != hole) | (steps < since)
        for lo, hi, since in self._rules.left_out:
            is_kept &= (ids < lo) | (ids >= hi) | (steps < since)
        return is_kept

    def _read(self, groups: Sequence[int], rows_of: Callable[[int], Rows]) -> tuple[dict[int, Rows], dict[int, str]]:
        """Return the row groups that can be read, and the reasons for the others."""
        rows, wrong = {}, {}
        for group in groups:
            try:
                rows[group] = rows_of(group)
            except AwayError:
                raise
            except UnreadableError as error:
                if not self._rules.quarantines:
                    raise
                wrong[group] = str(error)
        return rows, wrong

    def _fits(self, rows: pa.Table) -> bool:
        return all(lengths_of(rows.column(name)).max() <= longest for name, longest in self._rules.longest.items())

    def _fit(self, rows: pa.Table, ids: Int64s) -> tuple[pa.Table, int]:
        """Truncate or reject rows that are too long; return the rows, and the number truncated."""
        is_long = np.zeros(len(ids), dtype=bool)
        for name, longest in self._rules.longest.items():
            lengths = lengths_of(rows.column(name))
            if lengths.max(initial=0) <= longest:
                continue
            is_long |= lengths > longest
            if not self._rules.truncates:
                worst = int(lengths.argmax())
                raise RowError(f"{self._place_of(int(ids[worst]))}: {too_long(int(lengths[worst]), name, longest)}")
            rows = truncate_lists(rows, name, longest)
        return rows, int(is_long.sum())

    def _located(self, error: DataError, rows: pa.Table, ids: Int64s, epochs: Int64s | int) -> RowError:
        """Return a micro-batch's error as that of its first row that cannot be collated alone."""
        for row in range(len(ids)):
            of_row = slice(row, row + 1)
            try:
                self._collate(
                    rows.slice(row, 1), ids[of_row], self._seed, epochs if isinstance(epochs, int) else epochs[of_row]
                )
            except DataError as found:
                sample = int(ids[row])
                return RowError(f"{self._place_of(sample)}: {str(found).removeprefix(f'sample {sample}: ')}")
        return RowError(f"{self._place_of(int(ids[0]))}, or one of the next {len(ids) - 1} of its lane: {error}")


def too_long(length: int, column: str, longest: int) -> str:
    """Return the message for a row with more values than the task accepts."""
    return (
        f"it has {length} values in column '{column}', the task takes {longest}: let the task take more, or set "
        "`data.too_long: truncate` to cut such rows"
    )


def builder_of(
    reader: RowSource, order: RunOrder, collate: Collate, micro_batch: int, rules: SampleRules
) -> BatchBuilder:
    """Return the builder of an order's micro-batches, from a reader's rows."""
    return BatchBuilder(
        reader.first_id,
        micro_batch,
        collate,
        rules,
        seed=order.seed,
        is_training=order.is_shuffled,
        place_of=reader.place_of,
    )


def _leave_out(
    wrong: Mapping[int, str], groups: Int64s, steps: Int64s, is_kept: npt.NDArray[np.bool_]
) -> dict[int, dict[int, str]]:
    """Remove samples of unreadable row groups from `is_kept`; return these groups, with reasons, by step."""
    unreadable: dict[int, dict[int, str]] = {}
    for group, why in wrong.items():
        for number in np.unique(steps[is_kept & (groups == group)]).tolist():
            unreadable.setdefault(number, {})[group] = why
        is_kept &= groups != group
    return unreadable
