"""Moments of a place's part of a tensor, of which each rank of a column holds spans: in terms of the whole tensor.

A part that is a run of the whole's elements is written and read span by span, where it is held. Columns of a matrix
are not: their moments are put together by the rank that writes them, and read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.mesh import Cell
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.cells.state_parts import Cuts, cut_at, with_tensors
from elastic_train.parallel.group import Group


def is_run(cut: Cut | None) -> bool:
    """Say whether a part is a run of the whole tensor's elements."""
    return cut is None or cut.dim == 0


def in_whole(part: Pieces, cut: Cut | None, place: int, written: Sequence[Sequence[Span]] = ()) -> Pieces:
    """Return pieces of a place's part as pieces of the whole tensor, which the part is a run of."""
    held = {_moved(span, cut, place): memory for span, memory in part.held.items()}
    return Pieces(part.dtype, part.shape if cut is None else cut.shape, held, written)


def written_in_whole(
    cuts: Sequence[Sequence[Sequence[Span]]], cut: Cut | None, cell: Cell, writers: Sequence[int]
) -> list[list[Span]]:
    """Return which spans of a whole tensor each writer writes, by what each rank of every column speaks for.

    `cuts` has the spans of each part, by part and by the ranks of its column; `writers` are ranks of a world of such
    cells. Of a tensor's part that several columns hold alike the first one's ranks write it.
    """
    giver_of = {0: 0} if cut is None else {cell.part_of(place): place for place in cut.givers}
    return [
        [_moved(span, cut, giver_of[part]) for span in cuts[part][number]] if part in giver_of else []
        for part, number in map(cell.holder_of, writers)
    ]


def _moved(span: Span, cut: Cut | None, place: int) -> Span:
    """Return a span of a part as one of the whole."""
    start = 0 if cut is None else cut.spans[place][0] * cut.row
    return span[0] + start, span[1] + start


def put_spans_together(
    column: Group, wanted: Sequence[tuple[int, Pieces, Sequence[Sequence[Span]]]]
) -> list[Tensor | None]:
    """Return the parts of which this rank of a column is the taker, None for others; all of the column call it.

    Each is wanted by a taker, is held in pieces, and given by the ranks of the column as the spans say, by rank.
    """
    sends, receives, found = list[tuple[int, Tensor]](), list[tuple[int, Tensor]](), list[Tensor | None]()
    for taker, pieces, spans_of in wanted:
        if taker != column.rank:
            sends += [(taker, pieces.memory(span)) for span in spans_of[column.rank]]
            found.append(None)
            continue
        part = torch.empty(pieces.shape.numel(), dtype=pieces.dtype)
        for rank, spans in enumerate(spans_of):
            for lo, hi in spans:
                if rank == column.rank:
                    part[lo:hi].copy_(pieces.memory((lo, hi)))
                else:
                    receives.append((rank, part[lo:hi]))
        found.append(part.view(pieces.shape))
    if sends or receives:
        column.exchange(sends, receives)
    return found


def filled_shares(tree: State, fill: Callable[[State], None], cuts: Cuts, place: int) -> None:
    """Fill a tree of a place's weights, and of shares of their moments, from a commit's whole tensors."""
    matrices: list[tuple[Tensor | Pieces, Cut, Tensor]] = []

    def wanted(path: StatePath, leaf: Tensor | Pieces) -> Tensor | Pieces:
        cut = cut_at(path, leaf, cuts, place)
        if cut is not None and cut.first_with(place) is None:
            return Pieces(leaf.dtype, cut.shape, {}, ())
        if cut is not None and not is_run(cut):
            matrices.append((leaf, cut, torch.empty(cut.shape, dtype=leaf.dtype)))
            return matrices[-1][2]
        if isinstance(leaf, Pieces):
            return in_whole(leaf, cut, place)
        return leaf if cut is None else in_whole(_as_pieces(leaf), cut, place)

    found = with_tensors(tree, wanted)
    fill(found)
    for leaf, cut, whole in matrices:
        part = cut.part_of(whole, place).view(-1)
        for (lo, hi), memory in (leaf if isinstance(leaf, Pieces) else _as_pieces(leaf)).held.items():
            memory.copy_(part[lo:hi])
    tree.update(found)


def _as_pieces(part: Tensor) -> Pieces:
    """Return a part that is held as a whole, in contiguous memory, as one piece."""
    flat = part.detach().view(-1)
    return Pieces(part.dtype, part.shape, {(0, flat.numel()): flat} if flat.numel() else {}, ())
