"""What a rank does in a step, in order: passes of its stage, what they exchange, and where leaves begin and end.

A program speaks of turns, by number: which lane a turn is, if any, is up to the rank. One without a lane goes through
the same actions, and takes part in what others' lanes need.

A leaf begins before what it needs whole is gathered, and ends once all of it is added here or on its way to those that
add it. Where a model is in one stage that is around both of its passes; in a pipeline lanes overlap, weights stay for
the step, and it is around the backward pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from elastic_train.program.schedules import Direction, Exchange, Pass, Pipeline, schedule
from elastic_train.program.unit_turn import REST, Begin, End, Enter, UnitAction, places


@dataclass(frozen=True, slots=True)
class Open:
    """A turn's leaf of a chunk begins: its gradients are zero, and what it needs is gathered from here on."""

    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """A turn's leaf of a chunk ends: all of its gradients are added here, or are where they are added."""

    number: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class AddExperts:
    """Add what the lanes of a turn have given to this rank's experts of a chunk."""

    number: int
    chunk: int = 0


Action = Pass | Exchange | Open | Close | AddExperts


@lru_cache(64)
def step_program(pipeline: Pipeline, stage: int, *, has_experts: bool = False) -> tuple[Action, ...]:
    """Return what a rank of a stage does in a step of as many turns as the pipeline has lanes."""
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
    """Yield each action of a step with what is done of units in it; for equal ones that is the same tuple.

    Each chunk has as many blocks, to all of which a pass comes; `turn_of` are the actions of a leaf that begins. A pass
    first comes to the rest of the model, or last. A unit's gradients are on their way once a backward pass has left it.
    """
    known = dict[tuple[Direction | None, int, int], tuple[tuple[UnitAction, ...], int]]()
    turn: tuple[UnitAction, ...] = ()
    turns, at = {id(turn): turn}, 0
    for action in actions:
        done: tuple[UnitAction, ...] = ()
        if isinstance(action, Open):
            turn, at = turn_of(action), 0
            turns[id(turn)] = turn  # as long as it is here, no other has its number
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
    """Return what is done of units in a pass, from an action of the turn on, and which action comes after it."""
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
    """Say whether a pass that comes to a unit has left the one whose gradients are due."""
    return enter.direction == "backward" and isinstance(due, Begin | End) and due.unit > enter.unit
