"""The gradient's grains where several columns hold some alike: each counts once, and all copies must be the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_train.core.arrays import Int64s
from elastic_train.core.mesh import Cell
from elastic_train.errors import WeightsDifferError
from elastic_train.job.cells.cut_model import Cut
from elastic_train.placement.holdings import Column

Float64s = npt.NDArray[np.float64]


class _Copy(NamedTuple):
    """A part's trained grains of a parameter that an earlier part holds, too."""

    name: str
    part: int
    first: int
    grains: Int64s
    of_first: Int64s


class CountedOnce:
    """Which of what columns measure counts, by the numbers of grains in the columns' rows, one row after the other."""

    def __init__(self, columns: Sequence[Column], cuts: Mapping[str, Cut], cell: Cell) -> None:
        rows = np.cumsum([0, *(column.layout.trained.size for column in columns)])
        ends = rows[:-1].tolist()
        counted: list[Int64s] = [np.empty(0, dtype=np.int64)]
        self._copies: list[_Copy] = []
        for tensors in zip(*(column.layout.tensors for column in columns), strict=True):
            name = tensors[0].names[0]
            if columns[0].layout.flats[tensors[0].flat].group is None:
                continue
            places: list[Int64s] = []
            for part, one in enumerate(tensors):
                places.append(np.arange(ends[part], ends[part] + len(one.grains)))
                ends[part] += len(one.grains)
                first = 0 if name not in cuts else cuts[name].first_with(part * cell.context)
                if first is not None and (of := cell.part_of(first)) != part:
                    self._copies.append(_Copy(name, part, of, places[part], places[of]))
                else:
                    counted.append(places[part])
        self._counted = np.concatenate(counted)

    def of(self, rows: Sequence[Float64s]) -> Float64s:
        """Return what counts of the squares of each column's trained grains.

        Raises WeightsDifferError if columns have measured other gradients of what they hold alike.
        """
        if len(rows) == 1:
            return rows[0]
        squares = np.concatenate(rows)
        for one in self._copies:
            if not np.array_equal(squares[one.grains], squares[one.of_first], equal_nan=True):
                raise WeightsDifferError(
                    f"ranks that hold part {one.part} of the model have other gradients of '{one.name}' than those of "
                    f"part {one.first}, which hold the same of it: memory or a connection is damaged, or a device "
                    "computes wrongly. The step is not applied: all ranks end, and the next start continues from the "
                    "last commit"
                )
        counts: Float64s = squares[self._counted]
        return counts
