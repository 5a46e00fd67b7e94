"""The nested state of a sharded rank, as a commit has it: the same paths and shapes as where states are whole.

So a commit made by either is continued by the other. Weights, buffers and plain values are whole; the moments of every
parameter are `Pieces`: this rank's live memory, and who writes what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.core.arrays import Int64s
from elastic_train.errors import ConfigError
from elastic_train.shards.arcs import Arc
from elastic_train.shards.grains import Layout
from elastic_train.shards.grains import Tensor as Place
from elastic_train.shards.holdings import Run

Moments = Mapping[str, Tensor]
"""An optimizer's tensors of one shard that have an element for each of its own, by torch's names; 1-D."""


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of a flat vector that this rank holds, and its moments."""

    run: Run
    moments: Moments

    def cut(self, run: Run) -> dict[str, Tensor]:
        """Return the moments of a run within this one."""
        lo = run.lo - self.run.lo
        return {name: moment[lo : lo + run.hi - run.lo] for name, moment in self.moments.items()}


@dataclass(frozen=True, slots=True)
class Spare:
    """What a rank holds beside its seat, as arcs of the circle, and the moments of it that its seat has not."""

    arcs: tuple[Arc, ...] = ()
    runs: tuple[HeldRun, ...] = ()


def spans_of(layout: Layout, place: Place, grains: Int64s) -> list[Span]:
    """Return which elements of a tensor grains have, as the fewest half-open spans; `grains` ascend."""
    first = int(np.searchsorted(grains, place.grains.start))
    spans: list[Span] = []
    for number in grains[first : int(np.searchsorted(grains, place.grains.stop))].tolist():
        lo, hi = int(layout.lo[number]), int(layout.hi[number])
        if spans and spans[-1][1] == lo:
            lo = spans.pop()[0]
        spans.append((lo, hi))
    return spans


def moment_pieces(
    layout: Layout, place: Place, names: Sequence[str], held: Int64s, runs: Sequence[HeldRun], written: Sequence[Int64s]
) -> dict[str, Pieces]:
    """Return one tensor's moments by name; `written` are the grains that each writer writes."""
    dtype = getattr(torch, layout.flats[place.flat].dtype.removeprefix("torch."))
    cuts = tuple(tuple(spans_of(layout, place, grains)) for grains in written)
    parts = {span: _moments_at(runs, place, span) for span in spans_of(layout, place, held)}
    return {
        name: Pieces(dtype, torch.Size(place.shape), {span: part[name] for span, part in parts.items()}, cuts)
        for name in names
    }


def _moments_at(runs: Sequence[HeldRun], place: Place, span: Span) -> dict[str, Tensor]:
    run = Run(place.flat, place.start + span[0], place.start + span[1])
    return run_around(runs, run).cut(run)


def run_around(runs: Sequence[HeldRun], run: Run) -> HeldRun:
    """Return the held run that another run lies in."""
    return next(one for one in runs if one.run.flat == run.flat and one.run.lo <= run.lo and run.hi <= one.run.hi)


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of each parameter group's parameters, as torch's state dicts have them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def count_of(steps: Sequence[object]) -> float:
    """Return how many updates the parameters of one group have had."""
    counts = {float(step) for step in steps}  # type: ignore[arg-type]
    if len(counts) > 1:
        raise ConfigError(
            f"the commit's parameters have had {sorted(counts)} updates within one parameter group, because some were "
            "not trained before: continue once with parallel.shards: none, and commit"
        )
    return counts.pop() if counts else 0.0
