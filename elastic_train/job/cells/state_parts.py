"""The leaves of a state that a place of a cell holds a part of: which they are, put together, and cut.

A part that is one run of a tensor's elements, as all of a stage's are, is read and written where it is held. Columns
and rows that a commit has as a whole are read and put together as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from elastic_train.checkpoint.format.pieces import Pieces
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.job.cells.cut_model import Cut
from elastic_train.parallel.group import Group

T = TypeVar("T")
Cuts = Mapping[str, Cut]
"""How parameters are cut, by all of their names."""


def cut_at(path: StatePath, leaf: Tensor | Pieces, cuts: Cuts, place: int | None = None) -> Cut | None:
    """Return how a leaf of a place's state is cut, or of one that is whole; None if it is not.

    Moments are as weights are; a count of updates is neither.
    """
    at = {"model": 1, "optimizer": 2}.get(str(path[0]))
    cut = cuts.get(str(path[at])) if at is not None and at < len(path) else None
    return cut if cut is not None and leaf.shape == _shape_of(cut, place) else None


def _shape_of(cut: Cut, place: int | None) -> torch.Size:
    return cut.shape if place is None else cut.part_shape(place)


def with_tensors(tree: T, change: Callable[[StatePath, Any], object], at: StatePath = ()) -> T:
    """Return a nested state with something else for its tensors, also those in pieces, in containers of its own."""
    if isinstance(tree, Tensor | Pieces):
        return change(at, tree)  # type: ignore[return-value]
    if isinstance(tree, dict):
        return {key: with_tensors(value, change, (*at, str(key))) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, list):
        return [with_tensors(value, change, (*at, index)) for index, value in enumerate(tree)]  # type: ignore[return-value]
    return tree


def to_read(leaf: Tensor, cut: Cut, place: int) -> Pieces | Tensor:
    """Return what is to be read of a tensor of which a place may have a part: that, or all where it is in many runs."""
    if cut.dim != 0 and cut.first_with(place) is not None:
        return leaf.new_empty(cut.shape)
    lo, hi = (end * cut.row for end in cut.spans[place])
    return Pieces(leaf.dtype, cut.shape, {(lo, hi): leaf.new_empty(hi - lo)} if lo < hi else {}, ())


def part_read(leaf: Pieces | Tensor, cut: Cut, place: int) -> Tensor:
    """Return a place's part of what `to_read` has said, once it is read."""
    if isinstance(leaf, Tensor):
        return cut.part_of(leaf, place)
    [*memory] = leaf.held.values()
    return (memory[0] if memory else torch.empty(0, dtype=leaf.dtype)).view(cut.part_shape(place))


def to_write(leaf: Tensor, cut: Cut, places: Sequence[int], turn: int) -> Pieces | None:
    """Return how a tensor is written by a place that holds all of it; None if no writer does.

    `places` are those of the writers. The `turn`-th of such tensors goes to a writer by turns.
    """
    whole = (0, cut.shape[cut.dim])
    able = [number for number, place in enumerate(places) if cut.spans[place] == whole] if whole in cut.spans else []
    if not able or not cut.shape.numel():
        return None
    span = (0, cut.shape.numel())
    held = {span: leaf.detach().view(-1)} if leaf.shape == cut.shape else {}
    chosen = able[turn % len(able)]
    return Pieces(leaf.dtype, cut.shape, held, [[span] if one == chosen else [] for one in range(len(places))])


def put_together_at(place: int, part: Tensor, cut: Cut, group: Group) -> Tensor | None:
    """Return the whole of a tensor at one place of a cell, None at the others; all of them call it with their parts."""
    mine = part.detach().contiguous()
    if group.rank != place:
        group.exchange([(place, mine)] if group.rank in cut.givers else [], [])
        return None
    parts = [mine if other == place else mine.new_empty(cut.part_shape(other)) for other in cut.givers]
    pairs = zip(cut.givers, parts, strict=True)
    group.exchange([], [(other, memory) for other, memory in pairs if other != place])
    return torch.cat(parts, cut.dim)
