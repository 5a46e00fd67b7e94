"""The leaves of a state that a place of a cell holds a part of: which they are, put together, and cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.job.cells.cut_model import Cut
from elastic_train.parallel.group import Group

T = TypeVar("T")
Cuts = Mapping[str, Cut]
"""How parameters are cut, by all of their names."""


def cut_at(path: StatePath, leaf: Tensor, cuts: Cuts, place: int | None = None) -> Cut | None:
    """Return how a leaf of a place's state is cut, or of one that is whole; None if it is not.

    Moments are as weights are; a count of updates is neither.
    """
    at = {"model": 1, "optimizer": 2}.get(str(path[0]))
    cut = cuts.get(str(path[at])) if at is not None and at < len(path) else None
    return cut if cut is not None and leaf.shape == _shape_of(cut, place) else None


def _shape_of(cut: Cut, place: int | None) -> torch.Size:
    return cut.shape if place is None else cut.part_shape(place)


def with_tensors(tree: T, change: Callable[[StatePath, Tensor], Tensor], at: StatePath = ()) -> T:
    """Return a nested state with other tensors, in containers of its own."""
    if isinstance(tree, Tensor):
        return change(at, tree)  # type: ignore[return-value]
    if isinstance(tree, dict):
        return {key: with_tensors(value, change, (*at, str(key))) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, list):
        return [with_tensors(value, change, (*at, index)) for index, value in enumerate(tree)]  # type: ignore[return-value]
    return tree


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
