"""Parts of tensors in commits: who writes them, and what of them is read."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.cells.state_parts import part_read, to_read, to_write

WHOLE = torch.arange(12.0).view(4, 3)
COLUMNS = Cut(0, WHOLE.shape, ((0, 2), (2, 4)))
ROWS = Cut(1, WHOLE.shape, ((0, 1), (1, 3)))
STAGED = Cut(0, WHOLE.shape, ((0, 0), (0, 4)))


def test_no_more_is_read_than_a_place_holds_where_that_is_one_run() -> None:
    for cut, sizes in ((COLUMNS, [6, 6]), (STAGED, [0, 12]), (ROWS, [12, 12])):
        for place, num_elements in enumerate(sizes):
            part = cut.part_of(WHOLE, place)
            wanted = to_read(part, cut, place)
            memories = [wanted] if isinstance(wanted, Tensor) else list(wanted.held.values())
            assert sum(one.numel() for one in memories) == num_elements
            if isinstance(wanted, Pieces):
                for (lo, hi), memory in wanted.held.items():
                    memory.copy_(WHOLE.view(-1)[lo:hi])
            else:
                wanted.copy_(WHOLE)
            assert torch.equal(part_read(wanted, cut, place), part)


def test_whoever_holds_all_of_a_tensor_writes_it_by_turns() -> None:
    """Of three cells' ranks all can write but one that holds it; the place without it writes nothing."""
    places = [0, 1, 0, 1, 0]
    for turn, chosen in enumerate((1, 3, 1)):
        found = to_write(STAGED.part_of(WHOLE, 1), STAGED, places, turn)
        assert found is not None and [list(spans) for spans in found.written] == [
            [(0, 12)] if number == chosen else [] for number in range(5)
        ]
        assert torch.equal(found.memory((0, 12)), WHOLE.view(-1))
    other = to_write(STAGED.part_of(WHOLE, 0), STAGED, places, 0)
    assert other is not None and not other.held and other.shape == WHOLE.shape
    assert to_write(STAGED.part_of(WHOLE, 0), STAGED, [0, 0], 0) is None, "no writer holds it"
    assert to_write(COLUMNS.part_of(WHOLE, 0), COLUMNS, places, 0) is None, "nobody holds all of it"


def test_some_columns_of_a_matrix_are_not_taken_for_all_of_it() -> None:
    """Of twice as many columns as rows the first of two places has as many as there are rows."""
    wide = Cut(1, torch.Size((3, 6)), ((0, 3), (3, 6)))
    part = wide.part_of(torch.arange(18.0).view(3, 6), 0)
    assert to_write(part, wide, [0, 1], 0) is None, "nobody holds all of it"
