"""Parts of tensors in commits: their position in the whole tensor, which ranks write them, and what ranks read."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import Pieces
from elastic_train.core.mesh import Cell
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.sharded.held_tree import filled_parts, in_whole
from elastic_train.job.state_shards import written_by_turns, written_spans
from elastic_train.parallel.devices.squares import in_memory_order
from elastic_train.placement.grains import cut_along

WHOLE = torch.arange(12.0).view(4, 3)
COLUMNS = Cut(0, WHOLE.shape, ((0, 2), (2, 4)), cut_along(WHOLE.shape, 0))
ROWS = Cut(1, WHOLE.shape, ((0, 1), (1, 3)), cut_along(WHOLE.shape, 1))
STAGED = Cut(0, WHOLE.shape, ((0, 0), (0, 4)))
TWICE = Cut(0, WHOLE.shape, ((0, 0), (0, 4), (0, 4)))
"""Held in full by two places, and not at all by the first."""


def in_order(cut: Cut | None) -> Tensor:
    """Return the whole tensor's elements in memory order."""
    return in_memory_order(WHOLE, None if cut is None else cut.whole)


def test_a_part_is_a_run_of_the_whole_in_memory_order() -> None:
    for cut, runs in ((COLUMNS, [(0, 6), (6, 12)]), (ROWS, [(0, 4), (4, 12)]), (STAGED, [(0, 0), (0, 12)])):
        for place, (lo, hi) in enumerate(runs):
            part = cut.part_of(WHOLE, place)
            found = in_whole(part, cut, place)
            assert cut.run(place) == (lo, hi) and found.shape == WHOLE.shape and found.cut == cut.whole
            assert torch.equal(found.memory((lo, hi)), in_order(cut)[lo:hi]) if lo < hi else not found.held
            assert torch.equal(cut.shaped(cut.in_memory(part), place), part)
            if lo < hi:
                found.memory((lo, hi)).zero_()
                assert not part.any(), "it is the part's own memory"


def test_spans_of_a_part_are_where_they_are_in_the_whole() -> None:
    for cut, start in ((COLUMNS, 6), (ROWS, 4)):
        memory = cut.in_memory(cut.part_of(WHOLE, 1))
        held = Pieces(WHOLE.dtype, cut.part_shape(1), {(1, 4): memory[1:4]}, (), cut.part(1).cut)
        found = in_whole(held, cut, 1, [[(start + 1, start + 4)]])
        assert list(found.held) == [(start + 1, start + 4)] and found.written == [[(start + 1, start + 4)]]
        assert torch.equal(found.memory((start + 1, start + 4)), in_order(cut)[start + 1 : start + 4])


def test_ranks_that_hold_the_same_part_write_tensors_by_turns() -> None:
    """In three cells all ranks but one can write; the place without a part writes nothing."""
    places = [0, 1, 0, 1, 0]
    for turn, chosen in enumerate((1, 3, 1)):
        expected = [[(0, 12)] if number == chosen else [] for number in range(5)]
        assert written_by_turns(STAGED, places, turn) == expected
    assert written_by_turns(COLUMNS, places, 1) == [[], [], [(0, 6)], [(6, 12)], []]
    assert written_by_turns(ROWS, places, 2) == [[], [(4, 12)], [], [], [(0, 4)]]


def test_each_element_is_written_once_by_a_rank_of_the_first_place_that_holds_it() -> None:
    """In two cells all ranks write, or all but one, whose opinion then does not count."""
    spans = [[[(0, 4)], [(4, 6)]], [[(0, 1)], [(1, 6)]]]
    assert written_spans(spans, COLUMNS, Cell(tensor=2), range(4)) == [[(0, 4)], [(6, 7)], [(4, 6)], [(7, 12)]]
    of_rows = [[[(0, 4)], []], [[(0, 1)], [(1, 8)]]]
    assert written_spans(of_rows, ROWS, Cell(tensor=2), range(4)) == [[(0, 4)], [(4, 5)], [], [(5, 12)]]
    alike = [[[(0, 12)], []], [[], [(0, 12)]]]
    assert written_spans(alike, None, Cell(tensor=2), [0, 1, 3]) == [[(0, 12)], [], []]
    staged = [[[], []], [[(0, 7)], [(7, 12)]], [[], [(0, 12)]]]
    assert written_spans(staged, TWICE, Cell(tensor=3), range(6)) == [[], [(0, 7)], [], [], [(7, 12)], []]
    of_tokens = [[[(0, 3)], [(3, 6)], [], [(6, 12)]]]
    assert written_spans(of_tokens, None, Cell(context=2), range(4)) == of_tokens[0]


def test_no_more_is_read_of_whole_tensors_than_is_held() -> None:
    """Weights: the entire part; moments: a span. Of columns, of rows, and of uncut tensors."""
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
        leaves = {**wanted["model"]}  # type: ignore[dict-item]
        leaves |= {f"moments of {name}": one["exp_avg"] for name, one in wanted["optimizer"]["state"].items()}  # type: ignore[index]
        for name, leaf in leaves.items():
            assert leaf.shape == WHOLE.shape
            if isinstance(leaf, Pieces):
                for (lo, hi), memory in leaf.held.items():
                    memory.copy_(in_order(tensors[name.rpartition(" ")[2]])[lo:hi])
            else:
                leaf.copy_(WHOLE)
        for one in wanted["optimizer"]["state"].values():  # type: ignore[index]
            one["step"] = torch.tensor(3.0)

    found = filled_parts(tree, fill, {name: cut for name, cut in tensors.items() if cut is not None}, 1)
    for name, part in parts.items():
        cut = tensors[name]
        memory = part.reshape(-1) if cut is None else cut.in_memory(part)
        assert torch.equal(weights[name], part)
        assert torch.equal(moments[name], memory[slice(*spans[name])])
        assert found["optimizer"]["state"][name]["step"] == 3.0  # type: ignore[index]
