"""A rank's step, in order: passes of its stage, exchanges, and begin and end of leaves.

A program refers to turns by number; the rank maps them to lanes. A rank without a lane in a turn runs the same actions
and takes part in the exchanges for others' lanes.

A leaf begins before the weights it needs are gathered, and ends when all its gradients are added locally or sent. In a
model with one stage, it spans both passes; in a pipeline, lanes overlap and weights stay for the step, so it spans only
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from elastic_train.program.schedules import Direction, Exchange, Pass, Pipeline, schedule
from elastic_train.program.unit_turn import REST, Begin, End, Enter, UnitAction, places


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


def by_unit(
    actions: Iterable[Action], num_blocks: int, turn_of: Callable[[Open], tuple[UnitAction, ...]]
) -> Iterator[tuple[Action, tuple[UnitAction, ...]]]:
    """Yield each action of a step with its unit actions; equal ones share one tuple.

    Each chunk has `num_blocks` blocks; a pass reaches all of them. `turn_of` returns the unit actions of a leaf. A
    forward pass reaches the rest of the model first, a backward pass last. A unit's gradients are sent once the
    backward pass has left it.
    """
    known = dict[tuple[Direction | None, int, int], tuple[tuple[UnitAction, ...], int]]()
    turn: tuple[UnitAction, ...] = ()
    turns, at = {id(turn): turn}, 0
    for action in actions:
        done: tuple[UnitAction, ...] = ()
        if isinstance(action, Open):
            turn, at = turn_of(action), 0
            turns[id(turn)] = turn  # keeps the tuple alive, so that its id is not reused
        elif isinstance(action, Pass | Close):
            key = action.direction if isinstance(action, Pass) else None, id(turn), at
            if key not in known:
                known[key] = (turn[at:], len(turn)) if key[0] is None else _in_pass(key[0], num_blocks, turn, at)
            done, at = known[key]
            turn, at = ((), 0) if isinstance(action, Close) else (turn, at)
        yield action, done


def _in_pass(
    direction: Direction, num_blocks: int, turn: tuple[UnitAction, ...], at: int
) -> tuple[tuple[UnitAction, ...], int]:
    """Return a pass's unit actions, from action `at` of the turn on, and the index after them."""
    done, listed, units = list[UnitAction](), places(turn), [REST, *range(num_blocks)]
    for unit in units if direction == "forward" else units[::-1]:
        enter = Enter(direction, unit)
        while at < len(turn) and (turn[at] != enter if enter in listed else _has_left(enter, turn[at])):
            done.append(turn[at])
            at += 1
        at += enter in listed
        done.append(enter)
    return tuple(done), at


def _has_left(enter: Enter, due: UnitAction) -> bool:
    """Return True if a pass that enters a unit has left the one whose gradients are due."""
    return enter.direction == "backward" and isinstance(due, Begin | End) and due.unit > enter.unit
