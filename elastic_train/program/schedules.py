"""Pipeline schedules: in which order a stage computes its lanes, and what it sends and takes between two of them.

GPipe (Huang et al. 2019) runs all forward passes, then all backward passes. 1F1B (Narayanan et al. 2021, section 2.2)
begins the first backward pass as soon as it can, so stage s of S keeps at most S - s lanes alive. In the interleaved
schedule (the same, section 2.2.2) a stage has several chunks of the model: of S stages with C chunks each, stage s has
every S-th of S * C pieces, and the time that stages wait is a C-th. Backward passes of a chunk come in the order of the
lanes in all of them, which is the order in which a lane's gradient is added, so no bit depends on the schedule.

A timetable says what each stage does at each tick, where a pass takes one. What a pass has made is sent after its tick,
and the stage that goes on with it takes it in the same tick, whenever it needs it. So no order of events blocks for
ever, even if an exchange ended only when each of its messages had met its other end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["gpipe", "1f1b", "interleaved", "forward"]
"""`forward` has no backward passes: that of a validation."""
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or backward pass of one of a replica's lanes, by its number among them, in a chunk of a stage."""

    direction: Direction
    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a stage sends once the pass before is over, which may be None, and the passes whose needs it takes.

    A forward pass's message is an activation, which goes to the next piece of the model; a backward pass's is the
    gradient of one, which goes to the piece before.
    """

    sends: Pass | None
    takes: tuple[Pass, ...]


Scheduled = Pass | Exchange


class Pipeline(NamedTuple):
    """How a replica's lanes go through the stages, each of which has some chunks of the model."""

    kind: Kind
    num_stages: int
    num_lanes: int
    num_chunks: int = 1

    def piece(self, one: Pass, stage: int) -> int:
        """Return which piece of the model a pass of a stage runs, in their order."""
        return one.chunk * self.num_stages + stage

    def needs(self, one: Pass, stage: int) -> tuple[Direction, int, int] | None:
        """Return the direction, lane and piece of the pass that makes what a pass begins with; None if none does."""
        step = -1 if one.direction == "forward" else 1
        source = self.piece(one, stage) + step
        return (one.direction, one.number, source) if 0 <= source < self.num_stages * self.num_chunks else None

    def follower(self, one: Pass, stage: int) -> tuple[int, Pass] | None:
        """Return the stage and the pass that go on with what a pass of a stage has made; None if none does."""
        target = self.piece(one, stage) + (1 if one.direction == "forward" else -1)
        if not 0 <= target < self.num_stages * self.num_chunks:
            return None
        chunk, other = divmod(target, self.num_stages)
        return other, Pass(one.direction, one.number, chunk)


@lru_cache(64)
def schedule(pipeline: Pipeline, stage: int) -> tuple[Scheduled, ...]:
    """Return what a stage does in a step, in order."""
    assert 0 <= stage < pipeline.num_stages, f"no stage {stage} of {pipeline.num_stages}"
    actions: list[Scheduled] = []
    for tick in timetable(pipeline):
        mine = tick[stage]
        if mine is not None:
            actions.append(mine)
        found = [pipeline.follower(one, source) for source, one in enumerate(tick) if one is not None]
        takes = tuple(one for target, one in filter(None, found) if target == stage)
        sends = mine if mine is not None and pipeline.follower(mine, stage) is not None else None
        if sends is not None or takes:
            actions.append(Exchange(sends, takes))
    return tuple(actions)


@lru_cache(64)
def timetable(pipeline: Pipeline) -> tuple[tuple[Pass | None, ...], ...]:
    """Return what each stage does at each tick, where a pass takes one; None while it waits for others."""
    left = [deque(passes_of(pipeline, stage)) for stage in range(pipeline.num_stages)]
    done: set[tuple[Direction, int, int] | None] = {None}  # what needs nothing is ready
    ticks = list[tuple[Pass | None, ...]]()
    while any(left):
        now = tuple(
            passes[0] if passes and pipeline.needs(passes[0], stage) in done else None
            for stage, passes in enumerate(left)
        )
        assert any(now), f"stages of {pipeline} wait for one another"
        for stage, one in enumerate(now):
            if one is not None:
                left[stage].popleft()
                done.add((one.direction, one.number, pipeline.piece(one, stage)))
        ticks.append(now)
    return tuple(ticks)


def passes_of(pipeline: Pipeline, stage: int) -> list[Pass]:
    """Return a stage's passes, in order."""
    kind, num_chunks = pipeline.kind, pipeline.num_chunks
    may_have_chunks = kind in ("interleaved", "forward") and pipeline.num_stages > 1
    assert num_chunks == 1 or may_have_chunks, f"no chunks in {pipeline}"
    rounds = list(_rounds(pipeline))
    forwards = [Pass("forward", number, chunk) for lanes in rounds for chunk in range(num_chunks) for number in lanes]
    if kind == "forward":
        return forwards
    backwards = [
        Pass("backward", number, chunk) for lanes in rounds for chunk in reversed(range(num_chunks)) for number in lanes
    ]
    ahead = min(_ahead(pipeline, stage, max(map(len, rounds), default=0)), len(forwards))
    found = forwards[:ahead]
    for turn, backward in enumerate(backwards):
        found += forwards[ahead + turn : ahead + turn + 1]
        found.append(backward)
    return found


def _rounds(pipeline: Pipeline) -> Iterator[range]:
    """Yield the lanes that go through a chunk one after the other, before the next chunk: about as many as stages."""
    count = max(1, pipeline.num_lanes // pipeline.num_stages) if pipeline.num_chunks > 1 else 1
    for number in range(count):
        yield range(number * pipeline.num_lanes // count, (number + 1) * pipeline.num_lanes // count)


def _ahead(pipeline: Pipeline, stage: int, longest: int) -> int:
    """Return how many forward passes a stage runs before it begins to take turns; `longest` is the longest round."""
    if pipeline.kind == "gpipe":
        return pipeline.num_lanes
    others = pipeline.num_stages - 1 - stage
    if pipeline.num_chunks == 1:
        return others
    return (pipeline.num_chunks - 1) * longest + 2 * others


def bubble(pipeline: Pipeline) -> float:
    """Return which part of a step a stage waits for others, where all passes take as long."""
    return 1 - 2 * pipeline.num_lanes * pipeline.num_chunks / len(timetable(pipeline))
