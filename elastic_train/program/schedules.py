"""A step as lists of actions: pipeline schedules, a stage's passes, exchanges and leaves, and the units of a turn.

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

Unit actions say when a turn with sharded state gathers and releases weights and reduces gradients. All ranks of a group
run a turn's actions in the same order, whatever their passes do, so no rank waits for a message that is never sent.
First comes the rest of the model, unless present; then the blocks' weights, each gathered while the previous block
computes; then, from the last block to the first, the previous block's weights and the block's gradients. A unit's
gradients are sent while the next unit's are computed; those of the rest of the model, the last ones, during the next
turn, and are waited for there or after the last turn. A model of one unit is waited for at once.

A pass only reports its progress (`Walk`), which triggers the actions due; skipped ones follow at its end. A rank
without a lane in the turn runs all actions without a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["gpipe", "1f1b", "interleaved", "forward"]
"""`forward` has no backward passes: it is for validation."""
Direction = Literal["forward", "backward"]

REST = -1
"""Number of the unit outside all blocks, the rest of the model."""


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


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin to exchange a unit's weights or gradients."""

    what: Literal["gather", "reduce"]
    unit: int


@dataclass(frozen=True, slots=True)
class End:
    """Wait for an exchange."""

    what: Literal["gather", "reduce"]
    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Release a unit's weights."""

    unit: int


@dataclass(frozen=True, slots=True)
class Enter:
    """A pass reaches a unit and waits for its weights; there is no wait for a block that it skips."""

    direction: Direction
    unit: int


UnitAction = Begin | End | Free | Enter
_ALONE: tuple[UnitAction, ...] = Begin("reduce", REST), End("reduce", REST)
"""How a model of one unit is reduced: on its way during the next turn, it would be in memory twice."""


@lru_cache(256)
def gathering_turn(num_blocks: int, *, has_rest: bool, trains: bool, reduces: bool) -> tuple[UnitAction, ...]:
    """Return the actions of a turn with gathered units; the rest of the model stays, and is there from the first on."""
    return tuple(_gathering(num_blocks, has_rest=has_rest, trains=trains, reduces=reduces))


@lru_cache(256)
def filling_turn(num_units: int) -> tuple[UnitAction, ...]:
    """Return the actions of a turn whose units are reduced in that order, and waited for after the turn."""
    return tuple(action for action in reducing_turn(num_units, is_first=True) if isinstance(action, Begin))


@lru_cache(256)
def reducing_turn(num_units: int, *, is_first: bool) -> tuple[UnitAction, ...]:
    """Return the actions of a turn whose weights are present: reduce the blocks from the last on, then the rest."""
    if num_units == 1:
        return _ALONE
    units = [*reversed(range(num_units - 1)), REST][:num_units]
    before = [None if is_first else REST, *units]
    return tuple(action for pair in zip(units, before, strict=False) for action in _reduce(*pair))


def place_of(unit: int, num_units: int) -> int:
    """Return a unit's position in the order of reductions: blocks from the last one on, then the rest of the model."""
    return num_units - 2 - unit


def _gathering(num_blocks: int, *, has_rest: bool, trains: bool, reduces: bool) -> Iterator[UnitAction]:
    if not has_rest:
        yield from (Begin("gather", REST), End("gather", REST))
    last = num_blocks - 1
    if num_blocks:
        yield Begin("gather", 0)
    yield Enter("forward", REST)
    for block in range(num_blocks):
        if block < last:
            yield from (End("gather", block), Begin("gather", block + 1))
        yield Enter("forward", block)
        if block < last:
            yield Free(block)
    if trains:
        yield from _backward(num_blocks, REST if has_rest else None, reduces=reduces)
    else:
        yield from _let_go(last, num_blocks)


def _backward(num_blocks: int, before: int | None, *, reduces: bool) -> Iterator[UnitAction]:
    """Yield the actions after a forward pass; the last block's weights are still there.

    `before` is the unit whose gradients are still on their way.
    """
    for block in reversed(range(num_blocks)):
        if block:
            yield from _let_go(block + 1, num_blocks)
            yield Begin("gather", block - 1)
        yield Enter("backward", block)
        if reduces:
            yield from _reduce(block, before)
            before = block
    if reduces:
        yield from _reduce(REST, before) if num_blocks else _ALONE
    for block in (1, 0):
        yield from _let_go(block, num_blocks)


def _let_go(block: int, num_blocks: int) -> Iterator[UnitAction]:
    """Release a block's weights, if there is such a block; wait first, in case no pass reached it."""
    if 0 <= block < num_blocks:
        yield from (End("gather", block), Free(block))


def _reduce(unit: int, before: int | None) -> Iterator[UnitAction]:
    """Begin a unit's exchange, and wait for the previous unit's, which has overlapped with a unit's pass."""
    yield Begin("reduce", unit)
    if before is not None:
        yield End("reduce", before)


@lru_cache(256)
def places(actions: tuple[UnitAction, ...]) -> dict[UnitAction, int]:
    """Return the index at which a pass reaches each unit."""
    return {action: place for place, action in enumerate(actions) if isinstance(action, Enter)}


class Walk:
    """A rank's walk through the actions of a turn; each is done once, in order."""

    def __init__(self, actions: tuple[UnitAction, ...], act: Callable[[UnitAction], None]) -> None:
        self._actions, self._act, self._at = actions, act, 0

    @property
    def next(self) -> UnitAction | None:
        """The next action."""
        return self._actions[self._at] if self._at < len(self._actions) else None

    def enter(self, direction: Direction, unit: int) -> None:
        """Do the actions due before a pass enters a unit, unless it has entered it before."""
        place = places(self._actions)[Enter(direction, unit)]
        while self._at <= place:
            self.step()

    def finish(self) -> None:
        """Do all remaining actions."""
        while self._at < len(self._actions):
            self.step()

    def step(self) -> None:
        """Do the next action."""
        action = self._actions[self._at]
        self._at += 1
        self._act(action)
