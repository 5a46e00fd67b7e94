"""Positions of an optimizer's moments along a flat vector.

Most moments have one number per element, at the element's position. Those of parameters that are updated as a whole may
have other sizes, such as Adafactor's one number per row and per column: a run then has those of its tensors one after
the other, each at a multiple of ALIGN, as on a device the order of a sum depends on the alignment. The moment of a
tensor goes with the tensor's first element, so any run of elements has a run of each moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from elastic_train.job.sharded.elementwise import Slots
from elastic_train.placement.grains import ALIGN, Layout
from elastic_train.placement.holdings import Run


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of the moments of one flat vector.

    `starts` has the first element of each tensor, and `ends`, for each moment that is not elementwise, its position
    before each tensor and after the last.
    """

    starts: Sequence[int] = ()
    ends: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def at(self, name: str, element: int) -> int:
        """Return the position in a moment of what belongs to the elements from `element` on."""
        return self.ends[name][bisect_left(self.starts, element)] if name in self.ends else element

    def size(self, name: str, run: Run) -> int:
        """Return the length of a run's moment."""
        return self.at(name, run.hi) - self.at(name, run.lo)

    def part(self, name: str, run: Run, within: Run) -> slice:
        """Return the part that a run has of the moment of a run around it."""
        start = self.at(name, within.lo)
        return slice(self.at(name, run.lo) - start, self.at(name, run.hi) - start)


ELEMENTWISE = Positions()


def positions_of(layout: Layout, slots: Sequence[Slots]) -> list[Positions]:
    """Return the positions of the moments of each flat vector; `slots` has those of each parameter group."""
    return [_of_flat(layout, number, slots) for number in range(len(layout.flats))]


def _of_flat(layout: Layout, number: int, slots: Sequence[Slots]) -> Positions:
    group = layout.flats[number].group
    if group is None or not slots[group].others:
        return ELEMENTWISE
    tensors = [one for one in layout.tensors if one.flat == number and one.numel]
    shapes = [slots[group].others_of(one.shape) for one in tensors]
    sizes = {
        name: [-(-math.prod(of[name]) // ALIGN) * ALIGN if name in of else 0 for of in shapes]
        for name in dict.fromkeys(name for of in shapes for name in of)
    }
    return Positions(
        [one.start for one in tensors], {name: [*accumulate(each, initial=0)] for name, each in sizes.items()}
    )
