"""Moments of a size of their own lie in the order of their tensors, whatever run is cut out."""

from __future__ import annotations

import torch

from elastic_train.job.sharded.elementwise import Slots
from elastic_train.job.sharded.held_tree import HeldRun
from elastic_train.job.sharded.moment_positions import positions_of
from elastic_train.placement.grains import Listed, lay_out
from elastic_train.placement.holdings import Run

SHAPES = ((70, 3), (5,), (2, 90))
ROWS = Slots((), is_atomic=True, others={1: {"all": (0,)}, 2: {"rows": (0, None)}})


def test_a_moment_goes_with_its_tensors_first_element() -> None:
    """Tensors are cut out with all of their moment, at a multiple of the alignment; the rest of a tensor has none."""
    layout = lay_out([Listed(str(number), shape, "float32", is_atomic=True) for number, shape in enumerate(SHAPES)])
    [positions] = positions_of(layout, [ROWS])
    run = Run(0, 0, layout.flats[0].numel)
    moments = {name: torch.arange(positions.size(name, run)) for name in ("rows", "all")}
    held = HeldRun(run, torch.zeros(run.hi), moments, positions)
    assert {name: moment.numel() for name, moment in moments.items()} == {"rows": 128 + 64, "all": 64}
    first, vector, last = (Run(0, one.start, one.start + one.numel) for one in layout.tensors)
    seen = [
        [[*one[:1].tolist(), one.numel()] for one in held.cut(part).moments.values()]
        for part in (first, vector, last, Run(0, last.lo + 1, last.hi))
    ]
    assert seen == [[[0, 128], [0]], [[0], [0, 64]], [[128, 64], [0]], [[0], [0]]]
    across = held.cut(Run(0, first.lo + 1, last.hi)).cut(last)
    assert torch.equal(across.moments["rows"], held.cut(last).moments["rows"])
