"""Memory of a rank's step program over time, computed in advance; used by `elastic-train plan`.

It counts memory that varies within a step: gathered weights, a lane's activations from its forward to its backward
pass, and units' gradients until they are sent. Memory that a rank holds throughout, such as its shards and whole
gradients, is constant. Leaves' memory is reused by units of the same size and kept until the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Literal, NamedTuple

from elastic_train.program.schedules import Exchange, Pipeline
from elastic_train.program.step_program import Action, Open, by_unit, step_program
from elastic_train.program.unit_turn import REST, Begin, End, Enter, Free, UnitAction, gathering_turn, reducing_turn


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
