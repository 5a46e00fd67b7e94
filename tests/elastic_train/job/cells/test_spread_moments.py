"""Moments of parts, of which ranks hold spans: where they are in whole tensors, who writes them, what is read."""

from __future__ import annotations

import torch

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.core.mesh import Cell
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.cells.spread_moments import filled_shares, in_whole, put_spans_together, written_in_whole
from elastic_train.parallel.group import Group

WHOLE = torch.arange(12.0).view(4, 3)
COLUMNS = Cut(0, WHOLE.shape, ((0, 2), (2, 4)))
ROWS = Cut(1, WHOLE.shape, ((0, 1), (1, 3)))
TWICE = Cut(0, WHOLE.shape, ((0, 0), (0, 4), (0, 4)))
"""Held alike by two places, and not at all by the first."""


def test_spans_of_a_part_are_where_they_are_in_the_whole() -> None:
    part = COLUMNS.part_of(WHOLE, 1).view(-1)
    held = Pieces(WHOLE.dtype, torch.Size((2, 3)), {(1, 4): part[1:4]}, ())
    found = in_whole(held, COLUMNS, 1, [[(7, 10)]])
    assert found.shape == WHOLE.shape and list(found.held) == [(7, 10)] and found.written == [[(7, 10)]]
    assert torch.equal(found.memory((7, 10)), WHOLE.view(-1)[7:10])
    uncut = Pieces(WHOLE.dtype, WHOLE.shape, {(1, 4): WHOLE.view(-1)[1:4]}, ())
    assert list(in_whole(uncut, None, 1).held) == [(1, 4)]


def test_each_element_is_written_once_by_a_rank_of_the_first_place_that_holds_it() -> None:
    """Of two cells, whose ranks all write, or all but one, that speaks for nothing."""
    cuts = [[[(0, 4)], [(4, 6)]], [[(0, 1)], [(1, 6)]]]
    assert written_in_whole(cuts, COLUMNS, Cell(tensor=2), range(4)) == [[(0, 4)], [(6, 7)], [(4, 6)], [(7, 12)]]
    alike = [[[(0, 12)], []], [[], [(0, 12)]]]
    assert written_in_whole(alike, None, Cell(tensor=2), [0, 1, 3]) == [[(0, 12)], [], []]
    staged = [[[], []], [[(0, 7)], [(7, 12)]], [[], [(0, 12)]]]
    assert written_in_whole(staged, TWICE, Cell(tensor=3), range(6)) == [[], [(0, 7)], [], [], [(7, 12)], []]
    of_tokens = [[[(0, 3)], [(3, 6)], [], [(6, 12)]]]
    assert written_in_whole(of_tokens, None, Cell(context=2), range(4)) == of_tokens[0]


def test_a_rank_alone_has_all_of_what_it_puts_together() -> None:
    part = ROWS.part_of(WHOLE, 1)
    spans = [(0, 3), (3, 8)]
    pieces = Pieces(part.dtype, part.shape, {span: part.view(-1)[slice(*span)] for span in spans}, ())
    [found] = put_spans_together(Group(0, 1, None, 1.0), [(0, pieces, [spans])])
    assert found is not None and torch.equal(found, part)


def test_what_is_read_of_whole_tensors_is_what_is_held() -> None:
    """Of weights all of the part, of moments a span: of columns, of rows, and of what is not cut."""
    tensors = {"columns": COLUMNS, "rows": ROWS, "other": None, "elsewhere": Cut(0, WHOLE.shape, ((0, 4), (0, 0)))}
    parts = {name: WHOLE.clone() if cut is None else cut.part_of(WHOLE, 1) for name, cut in tensors.items()}
    weights = {name: torch.zeros_like(part) for name, part in parts.items()}
    spans = {name: (1, 4) if part.numel() else (0, 0) for name, part in parts.items()}
    moments = {name: torch.zeros(hi - lo) for name, (lo, hi) in spans.items()}
    pieces = {
        name: Pieces(WHOLE.dtype, part.shape, {spans[name]: moments[name]} if part.numel() else {}, ())
        for name, part in parts.items()
    }
    tree: State = {
        "model": weights,
        "optimizer": {"state": {name: {"step": torch.zeros(()), "exp_avg": one} for name, one in pieces.items()}},
    }

    def fill(wanted: State) -> None:
        leaves = [*wanted["model"].values()]  # type: ignore[attr-defined]
        leaves += [one["exp_avg"] for one in wanted["optimizer"]["state"].values()]  # type: ignore[index]
        for leaf in leaves:
            assert leaf.shape == WHOLE.shape
            for (lo, hi), memory in leaf.held.items() if isinstance(leaf, Pieces) else ():
                memory.copy_(WHOLE.view(-1)[lo:hi])
            if not isinstance(leaf, Pieces):
                leaf.copy_(WHOLE)
        for one in wanted["optimizer"]["state"].values():  # type: ignore[index]
            one["step"] = torch.tensor(3.0)

    filled_shares(tree, fill, {name: cut for name, cut in tensors.items() if cut is not None}, 1)
    for name, part in parts.items():
        assert torch.equal(weights[name], part)
        assert torch.equal(moments[name], part.view(-1)[slice(*spans[name])])
        assert tree["optimizer"]["state"][name]["step"] == 3.0  # type: ignore[index]
