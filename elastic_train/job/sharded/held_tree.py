"""The nested state of a rank, with the same paths and shapes in commits whatever the rank holds of it.

A rank of a cell has a part of a tensor: one run of the whole tensor's elements in memory order, so it is read and
written in place. A sharded rank has runs of its part. So each can continue the other's commits. Buffers and plain
values are whole. A sharded rank's moments of every parameter are `Pieces`, views of its live memory; so are the weights
under ZeRO-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.state_tree import Pieces, Span, StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.errors import ConfigError
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.sharded.elementwise import Shape
from elastic_train.job.sharded.moment_positions import ELEMENTWISE, Positions
from elastic_train.placement.arcs import Arc
from elastic_train.placement.grains import Layout, strides_of
from elastic_train.placement.grains import Tensor as Place
from elastic_train.placement.holdings import Run, stretches

Moments = Mapping[str, Tensor]
"""An optimizer's tensors of one shard, by torch's names; 1-D."""


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of a flat vector that this rank holds: its weights, and its moments, empty if it is not trained.

    `positions` are those of the flat vector's moments.
    """

    run: Run
    weights: Tensor
    moments: Moments
    positions: Positions = ELEMENTWISE

    def cut(self, run: Run) -> HeldRun:
        """Return the part of this run that lies in `run`."""
        part = slice(run.lo - self.run.lo, run.hi - self.run.lo)
        moments = {name: one[self.positions.part(name, run, self.run)] for name, one in self.moments.items()}
        return HeldRun(run, self.weights[part], moments, self.positions)


@dataclass(frozen=True, slots=True)
class Retained:
    """Arcs of the circle that a rank holds besides its seat, and their runs outside of it."""

    arcs: tuple[Arc, ...] = ()
    runs: tuple[HeldRun, ...] = ()


class Held(NamedTuple):
    """Grains that a rank holds, ascending, and the sections of all grains, at whose ends its memory is cut."""

    grains: Int64s
    sections: Int64s


Written = Sequence[Sequence[Sequence[Span]]]
"""By tensor of a layout and by writer: the spans that it writes."""


def spans_of(layout: Layout, held: Held) -> dict[int, list[Span]]:
    """Return the held elements of each tensor with any, as the fewest spans of contiguous memory.

    Tensors are given by their numbers in the layout.
    """
    spans: dict[int, list[Span]] = {}
    for _, tensor, span in _spans(layout, [held]):
        spans.setdefault(tensor, []).append(span)
    return spans


def written_of(layout: Layout, written: Sequence[Held]) -> Written:
    """Return the spans of every tensor that each writer writes into commits, from its grains."""
    spans: list[list[tuple[Span, ...]]] = [[()] * len(written) for _ in layout.tensors]
    for writer, tensor, span in _spans(layout, written):
        spans[tensor][writer] += (span,)
    return spans


def _spans(layout: Layout, written: Sequence[Held]) -> Iterator[tuple[int, int, Span]]:
    """Yield each writer's spans: its number, the tensor's, and the span; by writer and tensor, ascending."""
    numbers = np.repeat(np.arange(len(written)), [one.grains.size for one in written])
    grains = np.concatenate([layout.tensor_of[:0], *(one.grains for one in written)])
    sections = np.concatenate([grains[:0], *(one.sections[one.grains] for one in written)])
    tensors, los, his = (of[grains] for of in (layout.tensor_of, layout.lo, layout.hi))
    first, end = stretches(los, his, numbers, tensors, sections)
    spans = zip(los[first].tolist(), his[end - 1].tolist(), strict=True)
    return zip(numbers[first].tolist(), tensors[first].tolist(), spans, strict=True)


T = TypeVar("T")
Cuts = Mapping[str, Cut]
"""Cuts of parameters, by each of their names."""


def cut_at(path: StatePath, leaf: Tensor | Pieces, cuts: Cuts, place: int) -> Cut | None:
    """Return how a leaf of a place's state is cut; None if it is not.

    Moments are cut as their weights are; an update count, and what is whole or absent, is not cut.
    """
    cut = None if isinstance(leaf, Pieces) and leaf.is_whole else cuts.get(weight_of(path) or "")
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


def filled_parts(tree: State, fill: Callable[[State], None], cuts: Cuts, place: int) -> State:
    """Fill a place's state, tensors or pieces, from a commit through `fill`, and return it."""

    def wanted(path: StatePath, leaf: Tensor | Pieces) -> Tensor | Pieces:
        cut = cut_at(path, leaf, cuts, place)
        return leaf if cut is None else in_whole(leaf, cut, place)

    found = with_tensors(tree, wanted)
    fill(found)
    return found


class TensorPieces(NamedTuple):
    """One tensor's weights and its moments, by torch's names."""

    weights: Pieces
    moments: Mapping[str, Pieces]


def pieces_of(
    layout: Layout,
    place: Place,
    whole: Place,
    names: Sequence[str],
    others: Mapping[str, Shape],
    spans: Sequence[Span],
    runs: Sequence[HeldRun],
) -> TensorPieces:
    """Return the pieces of one tensor, or of a place's part of the `whole`; `spans` must be held.

    `names` are the moments with one number per element; `others` has the shapes of the other ones.
    """
    dtype = getattr(torch, layout.flats[place.flat].dtype.removeprefix("torch."))
    parts = {span: _held_at(runs, place, span) for span in spans}

    def pieces(memory: Callable[[HeldRun], Tensor]) -> Pieces:
        held = {span: memory(part) for span, part in parts.items()}
        return Pieces(dtype, torch.Size(place.shape), held, (), place.cut)

    def own(name: str, shape: Shape) -> Pieces:
        size, memory = math.prod(shape), [part.moments[name] for part in parts.values()]
        held, cut = {(0, size): memory[0][:size]} if memory else {}, whole.cut if shape == whole.shape else None
        return Pieces(dtype, torch.Size(shape), held, (), cut, is_whole=True)

    moments = {name: pieces(partial(_moment, name)) for name in names}
    moments |= {name: own(name, shape) for name, shape in others.items()}
    return TensorPieces(pieces(lambda part: part.weights), moments)


def _moment(name: str, part: HeldRun) -> Tensor:
    return part.moments[name]


def _held_at(runs: Sequence[HeldRun], place: Place, span: Span) -> HeldRun:
    run = Run(place.flat, place.start + span[0], place.start + span[1])
    return run_around(runs, run).cut(run)


def run_around(runs: Sequence[HeldRun], run: Run) -> HeldRun:
    """Return the held run that contains `run`."""
    return next(one for one in runs if one.run.flat == run.flat and one.run.lo <= run.lo and run.hi <= one.run.hi)


def is_within(run: Run, others: Sequence[HeldRun]) -> bool:
    """Return True if one held run contains `run`."""
    return any(one.run.flat == run.flat and one.run.lo <= run.lo and run.hi <= one.run.hi for one in others)


def keep(new: HeldRun, old: Sequence[HeldRun]) -> None:
    """Copy the overlap of old runs into a new run; whole weights are already in place."""
    for one in old:
        if one is new:
            return  # unchanged: the old run is reused
        lo, hi = max(new.run.lo, one.run.lo), min(new.run.hi, one.run.hi)
        if one.run.flat == new.run.flat and lo < hi:
            here, there = (run.cut(Run(new.run.flat, lo, hi)) for run in (new, one))
            if here.weights.data_ptr() != there.weights.data_ptr():
                here.weights.copy_(there.weights)
            for name, moment in here.moments.items():
                moment.copy_(there.moments[name])


def shaped(memory: Tensor, whole: Place | None, shape: Shape | None = None) -> Tensor:
    """Return a whole tensor's elements, in memory order, in its shape; other memory unchanged.

    `shape` is that of the memory's contents if these are a moment.
    """
    if whole is None:
        return memory
    if shape in (None, whole.shape):
        return memory.as_strided(whole.shape, strides_of(whole.shape, whole.cut))
    return memory[: math.prod(shape)].view(shape)


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of each parameter group's parameters, as in torch's state dicts."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def tree_to_fill(held: State, leaving_out: str = "") -> State:
    """Return the tree for a commit to fill: the held state without settings, and without one moment if given."""
    kept: Mapping[str, Mapping[str, object]] = held["optimizer"]["state"]  # type: ignore[index]
    moments = {name: {key: one[key] for key in one if key != leaving_out} for name, one in kept.items()}
    return {"model": held["model"], "optimizer": {"state": moments}, "scheduler": {}, "scaler": {}}


def count_of(steps: Sequence[object]) -> float:
    """Return the number of updates of one group's parameters; raise ConfigError if they differ."""
    counts = {float(step) for step in steps}  # type: ignore[arg-type]
    if len(counts) > 1:
        raise ConfigError(
            f"the commit's parameters have had {sorted(counts)} updates within one parameter group, because some were "
            "not trained before: continue once with parallel.shards: none, and commit"
        )
    return counts.pop() if counts else 0.0
