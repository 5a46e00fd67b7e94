"""Memory of a rank's step program over time, computed in advance; used by `elastic-train plan`.

It counts memory that varies within a step: gathered weights, a lane's activations from its forward to its backward
pass, and units' gradients until they are sent. Memory that a rank holds throughout, such as its shards and whole
gradients, is constant. Leaves' memory is reused by units of the same size and kept until the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Literal, NamedTuple

from elastic_train.program.schedules import Action, Close, Direction, Exchange, Open, Pass, Pipeline, step_program
from elastic_train.program.unit_turn import (
    REST,
    Begin,
    End,
    Enter,
    Free,
    UnitAction,
    gathering_turn,
    places,
    reducing_turn,
)


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of a unit: its whole weights, if gathered, and its gradients, if reduced unit by unit.

    A forward pass keeps `kept` until its backward pass; each pass needs `again` more while it is in the unit.
    """

    weights: float = 0.0
    gradient: float = 0.0
    kept: float = 0.0
    again: float = 0.0


class Held(NamedTuple):
    """Bytes held at a moment; `leaves` are gradients in transit, and memory kept for the next ones."""

    weights: float = 0.0
    gradients: float = 0.0
    leaves: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Held) -> Held:
        """Return the sum of both."""
        return Held(*map(add, self, other))


class Peak(NamedTuple):
    """The maximum held, and the action, and unit action within it, that reaches it first."""

    held: Held
    at: tuple[Action, UnitAction | None] | None


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's step; `chunks` has the blocks of each chunk of its stage, equally many, and `rest` the rest of each.

    It has `num_lanes` lanes, possibly fewer than turns. Units are gathered per turn or per step, and gradients are sent
    during or after the backward pass.
    """

    pipeline: Pipeline
    stage: int
    num_lanes: int
    chunks: tuple[tuple[UnitBytes, ...], ...]
    rest: UnitBytes = UnitBytes()
    gathers: Literal["never", "turn", "step"] = "never"
    reduces: Literal["never", "beside", "after"] = "never"

    @property
    def num_blocks(self) -> int:
        return len(self.chunks[0])

    def unit(self, chunk: int, unit: int) -> UnitBytes:
        """Return the bytes of a unit by its number."""
        return self.rest if unit == REST else self.chunks[chunk][unit]

    def turn(self, leaf: Open) -> tuple[UnitAction, ...]:
        """Return the unit actions of a turn."""
        if self.gathers == "turn":
            is_first, reduces = leaf.number == 0, self.reduces == "beside"
            return gathering_turn(self.num_blocks, has_rest=not is_first, trains=True, reduces=reduces)
        reduced = () if self.reduces == "never" else reducing_turn(self.num_blocks + 1)
        return (Enter("backward", REST), *reduced) if self.reduces == "after" else reduced


@lru_cache(1024)
def peak_of(program: RankProgram) -> Peak:
    """Return the peak memory of a rank's program in a step."""
    units = chain(*((program.rest, *blocks) for blocks in program.chunks)) if program.gathers == "step" else ()
    held = Held(sum(unit.weights for unit in units))
    peak, waiting, known = Peak(held, None), _Waiting(), dict[tuple[int, int, _Waiting], _Effect]()
    for action, done in by_unit(step_program(program.pipeline, program.stage), program.num_blocks, program.turn):
        if isinstance(action, Exchange) or action.number >= program.num_lanes:
            continue
        key = action.chunk, id(done), waiting
        effect = known.get(key) or known.setdefault(key, _effect_of(program, action.chunk, done, waiting))
        if held.total + effect.most.total > peak.held.total:
            peak = Peak(held.plus(effect.most), (action, effect.at))
        held, waiting = held.plus(effect.after), effect.waiting
    return peak


_Waiting = tuple[float, ...]
"""Sizes of leaves kept for the next units, ascending."""


class _Effect(NamedTuple):
    """Change in held memory by an action: at its end, and at its peak, with the unit action of the peak."""

    after: Held
    most: Held
    at: UnitAction | None
    waiting: _Waiting


def _effect_of(program: RankProgram, chunk: int, actions: Sequence[UnitAction], waiting: _Waiting) -> _Effect:
    now, most, at, sizes = Held(), Held(), None, list(waiting)
    for action in actions:
        unit, ends = program.unit(chunk, action.unit), Held()
        match action:
            case Begin("gather"):
                now = now.plus(Held(weights=unit.weights))
            case Free():
                ends = Held(weights=-unit.weights)
            case Begin():  # a leaf is made of the gradients, which are dropped
                if unit.gradient in sizes:
                    sizes.remove(unit.gradient)
                else:
                    now = now.plus(Held(leaves=unit.gradient))
                ends = Held(gradients=-unit.gradient)
            case End("reduce"):
                sizes.append(unit.gradient)
            case Enter("forward"):
                now, ends = now.plus(Held(activations=unit.kept + unit.again)), Held(activations=-unit.again)
            case Enter():
                now = now.plus(Held(gradients=unit.gradient, activations=unit.again))
                ends = Held(activations=-unit.kept - unit.again)
        if now.total > most.total:
            most, at = now, action
        now = now.plus(ends)
    return _Effect(now, most, at, tuple(sorted(sizes)))


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
