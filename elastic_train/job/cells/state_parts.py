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


def cut_at(path: StatePath, leaf: Tensor, cuts: Cuts, *, is_whole: bool) -> Cut | None:
    """Return how a leaf of a state that is whole, or is a part, is cut; None if it is not. Moments are as weights are.

    A count of updates is neither.
    """
    place = {"model": 1, "optimizer": 2}.get(str(path[0]))
    cut = cuts.get(str(path[place])) if place is not None and place < len(path) else None
    return cut if cut is not None and leaf.shape == (cut.shape if is_whole else cut.part_shape) else None


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
        group.exchange([(place, mine)], [])
        return None
    parts = [mine if other == place else torch.empty_like(mine) for other in range(group.size)]
    group.exchange([], [(other, parts[other]) for other in range(group.size) if other != place])
    return torch.cat(parts, cut.dim)
