"""Convert between a place's parts of state tensors and the whole tensors that a commit has.

A part is one run of the whole tensor's elements in memory order, so it is read and written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.mesh import Cell
from elastic_train.job.cells.cut_model import Cut

T = TypeVar("T")
Cuts = Mapping[str, Cut]
"""Cuts of parameters, by each of their names."""


def cut_at(path: StatePath, leaf: Tensor | Pieces, cuts: Cuts, place: int) -> Cut | None:
    """Return how a leaf of a place's state is cut; None if it is not.

    Moments are cut as their weights are; an update count is not cut.
    """
    cut = cuts.get(weight_of(path) or "")
    return cut if cut is not None and leaf.shape == cut.part_shape(place) else None


def with_tensors(tree: T, change: Callable[[StatePath, Any], object], at: StatePath = ()) -> T:
    """Return a copy of a nested state with its tensors, also those in pieces, replaced by `change`."""
    if isinstance(tree, Tensor | Pieces):
        return change(at, tree)  # type: ignore[return-value]
    if isinstance(tree, dict):
        return {key: with_tensors(value, change, (*at, str(key))) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, list):
        return [with_tensors(value, change, (*at, index)) for index, value in enumerate(tree)]  # type: ignore[return-value]
    return tree


def in_whole(part: Tensor | Pieces, cut: Cut, place: int, written: Sequence[Sequence[Span]] = ()) -> Pieces:
    """Return a place's part, a tensor or pieces, as pieces of the whole tensor."""
    start, end = cut.run(place)
    if isinstance(part, Pieces):
        held = {(lo + start, hi + start): memory for (lo, hi), memory in part.held.items()}
    else:
        held = {(start, end): cut.in_memory(part)} if start < end else {}
    return Pieces(part.dtype, cut.shape, held, written, cut.whole)


def written_by_turns(cut: Cut, places: Sequence[int], turn: int) -> list[list[Span]]:
    """Return the run of a tensor that each writer writes, if places hold their parts unsharded.

    `places` are the writers' places. Writers with equal parts take turns: `turn` is the tensor's number.
    """
    written: list[list[Span]] = [[] for _ in places]
    for giver in cut.givers:
        able = [number for number, place in enumerate(places) if cut.first_with(place) == giver]
        written[able[turn % len(able)]].append(cut.run(giver))
    return written


def written_spans(
    spans: Sequence[Sequence[Sequence[Span]]], cut: Cut | None, cell: Cell, writers: Sequence[int]
) -> list[list[Span]]:
    """Return the spans of a whole tensor that each writer writes, from the spans that each rank of every column owns.

    `spans` is indexed by model part, then by rank in its column; `writers` are ranks of the world. If several columns
    hold the same part of the tensor, the first column's ranks write it.
    """
    starts = {0: 0} if cut is None else {cell.part_of(place): cut.run(place)[0] for place in cut.givers}

    def of_writer(part: int, number: int) -> Iterator[Span]:
        if part in starts:
            yield from ((lo + starts[part], hi + starts[part]) for lo, hi in spans[part][number])

    return [list(of_writer(*cell.holder_of(rank))) for rank in writers]


def filled_parts(tree: State, fill: Callable[[State], None], cuts: Cuts, place: int) -> State:
    """Fill a place's state, tensors or pieces, from a commit through `fill`, and return it."""

    def wanted(path: StatePath, leaf: Tensor | Pieces) -> Tensor | Pieces:
        cut = cut_at(path, leaf, cuts, place)
        return leaf if cut is None else in_whole(leaf, cut, place)

    found = with_tensors(tree, wanted)
    fill(found)
    return found
