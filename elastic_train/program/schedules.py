"""Pipeline schedules, and step programs: the order of a stage's passes, exchanges and leaves.

GPipe (Huang et al. 2019) runs all forward passes, then all backward passes. 1F1B (Narayanan et al. 2021, section 2.2)
starts the first backward pass as early as possible, so stage s of S has at most S - s live lanes. In the interleaved
schedule (same, section 2.2.2) a stage has several chunks of the model: with C chunks per stage, stage s has every S-th
of S * C pieces, and the bubble shrinks to a C-th. In all of them, a chunk's backward passes follow the order of the
lanes, in which gradients are added, so bits do not depend on the schedule.

A timetable gives each stage's pass at each tick. A pass's result is sent after its tick, and the receiving stage takes
it in the same tick, whenever it needs it. So no order of events deadlocks, even if an exchange ended only when each of
its messages had been received.

A program refers to turns by number; the rank maps them to lanes. A rank without a lane in a turn runs the same actions
and takes part in the exchanges for others' lanes. A leaf begins before the weights it needs are gathered, and ends when
all its gradients are added locally or sent. In a model with one stage, it spans both passes; in a pipeline, lanes
overlap and weights stay for the step, so it spans only the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["gpipe", "1f1b", "interleaved", "forward"]
"""`forward` has no backward passes: it is for validation."""
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or backward pass of a replica's lane, by number, in a chunk of a stage."""

    direction: Direction
    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends the result of the previous pass, if any, and receives the inputs of the passes `takes`.

    A forward pass's message is an activation for the next piece of the model; a backward pass's is a gradient for the
    previous one.
    """

    sends: Pass | None
    takes: tuple[Pass, ...]


Scheduled = Pass | Exchange


class Pipeline(NamedTuple):
    """A replica's lanes and stages; each stage has some chunks of the model."""

    kind: Kind
    num_stages: int
    num_lanes: int
    num_chunks: int = 1

    def piece(self, one: Pass, stage: int) -> int:
        """Return the index of the model piece that a pass of a stage runs."""
        return one.chunk * self.num_stages + stage

    def needs(self, one: Pass, stage: int) -> tuple[Direction, int, int] | None:
        """Return direction, lane and piece of the pass that produces a pass's input; None if there is none."""
        step = -1 if one.direction == "forward" else 1
        source = self.piece(one, stage) + step
        return (one.direction, one.number, source) if 0 <= source < self.num_stages * self.num_chunks else None

    def follower(self, one: Pass, stage: int) -> tuple[int, Pass] | None:
        """Return the stage and pass that consume a pass's result; None if there are none."""
        target = self.piece(one, stage) + (1 if one.direction == "forward" else -1)
        if not 0 <= target < self.num_stages * self.num_chunks:
            return None
        chunk, other = divmod(target, self.num_stages)
        return other, Pass(one.direction, one.number, chunk)


@lru_cache(64)
def schedule(pipeline: Pipeline, stage: int) -> tuple[Scheduled, ...]:
    """Return a stage's actions in a step, in order."""
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
    """Return each stage's pass at each tick; None while it waits for others."""
    left = [deque(passes_of(pipeline, stage)) for stage in range(pipeline.num_stages)]
    done: set[tuple[Direction, int, int] | None] = {None}  # passes without input are ready
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
    """Yield groups of lanes that pass through a chunk before the next chunk starts: about as many as stages."""
    count = max(1, pipeline.num_lanes // pipeline.num_stages) if pipeline.num_chunks > 1 else 1
    for number in range(count):
        yield range(number * pipeline.num_lanes // count, (number + 1) * pipeline.num_lanes // count)


def _ahead(pipeline: Pipeline, stage: int, longest: int) -> int:
    """Return the number of forward passes before a stage starts to alternate; `longest` is the longest round."""
    if pipeline.kind == "gpipe":
        return pipeline.num_lanes
    others = pipeline.num_stages - 1 - stage
    if pipeline.num_chunks == 1:
        return others
    return (pipeline.num_chunks - 1) * longest + 2 * others


def bubble(pipeline: Pipeline) -> float:
    """Return the idle fraction of a step, if all passes take equally long."""
    return 1 - 2 * pipeline.num_lanes * pipeline.num_chunks / len(timetable(pipeline))


@dataclass(frozen=True, slots=True)
class Open:
    """A turn's leaf of a chunk begins: its gradients are zero, and its weights are gathered from here on."""

    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """A turn's leaf of a chunk ends: its gradients have been added or sent."""

    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class AddExperts:
    """Add the gradients that a turn's lanes gave to this rank's experts of a chunk."""

    number: int
    chunk: int = 0


Action = Pass | Exchange | Open | Close | AddExperts


@lru_cache(64)
def step_program(pipeline: Pipeline, stage: int, *, has_experts: bool = False) -> tuple[Action, ...]:
    """Return a rank's actions in a step with as many turns as the pipeline has lanes."""
    return tuple(_with_leaves(pipeline, stage, has_experts=has_experts))


def _with_leaves(pipeline: Pipeline, stage: int, *, has_experts: bool) -> Iterator[Action]:
    first = "forward" if pipeline.num_stages == 1 else "backward"
    if pipeline.num_stages == 1:
        pipeline = pipeline._replace(kind="1f1b")  # no lane waits for other stages
    for action in schedule(pipeline, stage):
        if isinstance(action, Exchange):
            yield action
            continue
        if action.direction == first:
            yield Open(action.number, action.chunk)
        yield action
        if action.direction == "backward":
            yield Close(action.number, action.chunk)
            if has_experts:
                yield AddExperts(action.number, action.chunk)
