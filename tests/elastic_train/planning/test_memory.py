"""The memory computed from a program equals the memory that its execution holds, for all small shapes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from elastic_train.core.lanes import Lanes
from elastic_train.parallel.buckets import FlatGradient, Leaves
from elastic_train.parallel.cells.pipeline import Links, Passes, run_program
from elastic_train.parallel.reduce_scatter_sum import ReduceScatterSum, ReduceScatterTree
from elastic_train.parallel.unit_weights import UnitFlats, UnitWeights
from elastic_train.placement.grains import Listed, lay_out
from elastic_train.placement.holdings import circle_of
from elastic_train.placement.seating import Seating
from elastic_train.placement.seats import seats_of
from elastic_train.planning.arithmetic.memory import RankProgram, UnitBytes, peak_of
from elastic_train.program.schedules import Close, Kind, Open, Pass, Pipeline, step_program

pytestmark = pytest.mark.heavy
Gathers = Literal["never", "turn", "step"]
Reduces = Literal["never", "beside", "after"]
KINDS: tuple[Kind, ...] = ("gpipe", "1f1b")
PIPELINES = [
    *(Pipeline("1f1b", 1, lanes) for lanes in (1, 3)),
    *(Pipeline(kind, stages, lanes) for kind in KINDS for stages in (2, 3) for lanes in (1, 2, 5)),
    *(Pipeline("interleaved", 2, lanes, 2) for lanes in (1, 4, 5)),
]
UNITS = [
    [UnitBytes(size, size, kept) for size, kept in zip((512,) * 4, (0, 4096, 4096, 4096), strict=True)],
    [UnitBytes(size, size, kept) for size, kept in zip((2048, 256, 512, 1024), (1024, 128, 3000, 700), strict=True)],
    [UnitBytes(256, 256, 64), UnitBytes(1024, 1024, 0, 512), UnitBytes(1024, 1024, 0, 2048)],
    [UnitBytes(256, 256, 64)],
    [UnitBytes(512, 512, 8)] * 4,
]
"""The rest of a chunk and its blocks: equal sizes, unequal sizes, some recomputed, none, and little kept for a pass."""


class Meter:
    """The bytes of the watched memory, and their peak."""

    def __init__(self) -> None:
        self._watched = list[tuple[Any, int]]()
        self.weights = list[Tensor]()
        self.most = 0

    def watch(self, made: Tensor) -> Tensor:
        storage = made.untyped_storage()
        self._watched.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
        self.look()
        return made

    def look(self) -> None:
        self._watched = [one for one in self._watched if not one[0].expired()]
        weights = sum(one.untyped_storage().nbytes() for one in self.weights)
        self.most = max(self.most, weights + sum(size for _, size in self._watched))


class Layer(torch.autograd.Function):
    """Keeps a given number of bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: int, meter: Meter) -> Tensor:
        ctx.save_for_backward(meter.watch(torch.empty(kept, dtype=torch.uint8)))
        ctx.weight, ctx.meter = weight, meter
        return x + 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        ctx.meter.look()
        made = ctx.meter.watch(torch.zeros(ctx.weight.shape)) if ctx.needs_input_grad[1] else None
        del kept
        return gradients[0], made, None, None


class Unit(nn.Module):
    """A unit that keeps bytes for its backward pass, or recomputes them in it."""

    def __init__(self, flat: Tensor, unit: UnitBytes, meter: Meter, *, trains: bool) -> None:
        super().__init__()
        self.weight, self._unit, self._meter = nn.Parameter(flat, requires_grad=trains), unit, meter

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self._run, x, use_reentrant=False) if self._unit.again else self._run(x)
        return made

    def _run(self, x: Tensor) -> Tensor:
        kept = int(self._unit.again or self._unit.kept)
        made: Tensor = Layer.apply(x, self.weight, kept, self._meter)  # type: ignore[no-untyped-call]
        return made


class Alone:
    """One of two ranks; every exchange completes at once."""

    rank, size, beside_s = 0, 2, 0.0

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def begin_exchange(self, sends: object, receives: object) -> tuple[list[None], list[None]]:
        self._meter.look()
        return [], []

    def wait(self, works: object) -> None: ...

    def exchange(self, sends: object, receives: object) -> None: ...

    def is_on_device(self, tensor: Tensor) -> bool:
        return False


class Neighbours(Links):
    """Neighbours that have already sent a pass's input."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._pipeline, self._stage = pipeline, stage

    def exchange(self, **given: object) -> None: ...

    def arrived(self, name: Hashable) -> Tensor | None:
        assert isinstance(name, Pass)
        return None if self._pipeline.needs(name, self._stage) is None else torch.ones(())


class Running(Passes):
    """The passes of a stage whose modules use known amounts of memory."""

    def __init__(self, program: RankProgram) -> None:
        self.meter, self._program = Meter(), program
        units = [[program.rest, *blocks] for blocks in program.chunks]
        numbered = list(enumerate(itertools.chain(*units)))
        self._layout = lay_out(
            Listed(f"{at}", (int(unit.weights) // 4,), "torch.float32", f"{at}") for at, unit in numbered
        )
        self._flats = [torch.zeros(flat.numel) for flat in self._layout.flats]
        made = [Unit(self._flats[at], unit, self.meter, trains=program.reduces != "never") for at, unit in numbered]
        self._chunks = [made[chunk * len(one) :][: len(one)] for chunk, one in enumerate(units)]
        group: Any = Alone(self.meter)
        seating = Seating(self._layout, circle_of(self._layout), seats_of([("node",)] * 2, 1), 0)
        self._weights = None if program.gathers == "never" else self._gathering(group, seating)
        self._sum = self._summing(group, seating) if program.reduces != "never" else None
        self._leaf = contextlib.ExitStack()

    def _gathering(self, group: Any, seating: Seating) -> UnitWeights:
        for flat in self._flats:
            flat.untyped_storage().resize_(0)
        self.meter.weights = self._flats
        numbered = dict(enumerate(self._flats))
        blocks, rest = list[UnitFlats](), UnitFlats("", numbered)
        if self._program.gathers == "turn":
            rest, *blocks = [UnitFlats("", {at: self._flats[at]}, unit) for at, unit in enumerate(self._chunks[0])]
        return UnitWeights(blocks, rest, group, seating.shares(), lambda run: torch.zeros(run.hi - run.lo))

    def _summing(self, group: Any, seating: Seating) -> ReduceScatterSum:
        turns, mine = self._program.pipeline.num_lanes, self._program.num_lanes
        leaves: list[Lanes] = [range(0, 2 * mine, 2), tuple(sorted({*range(turns + mine)} - {*range(0, 2 * mine, 2)}))]
        flats = [
            FlatGradient(at, self._layout.flats[at].numel, [(unit.weight, 0)])
            for at, unit in enumerate(itertools.chain(*self._chunks))
        ]
        size, is_beside = len(self._chunks[0]), self._program.reduces == "beside"
        trees = [
            ReduceScatterTree(
                [[flat] for flat in flats[first : first + size][::-1]], group, leaves, seating, is_beside=is_beside
            )
            for first in range(0, len(flats), size)
        ]
        sizes = [seating.runs_at(0, seating.trained[0])]
        homes = {
            at: torch.zeros(sum(run.hi - run.lo for run in sizes[0] if run.flat == at)) for at in range(len(flats))
        }
        return ReduceScatterSum(trees, homes, self._weights, by_turn=self._program.gathers == "turn")

    def run(self) -> int:
        """Run a step; return the peak of the bytes held."""
        pipeline, stage = self._program.pipeline, self._program.stage
        made = Leaves._zeros
        with mock.patch.object(Leaves, "_zeros", lambda *of: self.meter.watch(made(*of))):
            if self._sum is not None:
                self._sum.begin()
            run_program(step_program(pipeline, stage), Neighbours(pipeline, stage), self)
        return self.meter.most

    def key(self, number: int) -> Hashable | None:
        return number < self._program.num_lanes or None

    def open(self, one: Open) -> None:
        if self._sum is not None:
            self._leaf.enter_context(self._sum.turn(2 * one.number if self.key(one.number) else None, one.chunk))

    def close(self, one: Close) -> None:
        self._leaf.close()

    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        if self.key(one.number) is None:
            return None
        x = torch.ones((), requires_grad=True) if given is None else given
        for unit in self._chunks[one.chunk]:
            x = unit(x)
        return x

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        if made is not None:
            torch.autograd.backward(made, gradient)


def programs(pipeline: Pipeline, units: Sequence[UnitBytes]) -> Iterator[RankProgram]:
    """Yield a program for each stage, number of lanes and way of holding weights and gradients."""
    ways: list[tuple[Gathers, Reduces]] = [
        ("never", "never"),
        ("never", "beside"),
        ("step", "beside"),
        ("step", "after"),
    ]
    ways += [("turn", "beside")] if pipeline.num_stages == 1 else []
    for stage, fewer, (gathers, reduces) in itertools.product(range(pipeline.num_stages), (0, 1), ways):
        rest, *blocks = [one if reduces != "never" else replace(one, gradient=0.0) for one in units]
        if pipeline.num_lanes > fewer:
            chunks = (tuple(blocks),) * pipeline.num_chunks
            yield RankProgram(pipeline, stage, pipeline.num_lanes - fewer, chunks, rest, gathers, reduces)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_what_is_counted_is_what_is_held(pipeline: Pipeline) -> None:
    """The execution has a stage's passes, units gathered per turn, per step or never, and leaves that are sent away."""
    for units in UNITS:
        for program in programs(pipeline, units):
            assert peak_of(program).held.total == Running(program).run(), program
