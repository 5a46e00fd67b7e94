"""The memory that a rank's program takes at each moment, counted before anything runs; `elastic-train plan` goes by it.

Counted is what comes and goes within a step: weights that are gathered, a lane's activations from its forward to its
backward pass, and the gradients of units until all of them have been given away. What ranks hold throughout, such as
their shares and whole gradients, is the same at each moment. Leaves' memory is used again by units of the same size,
and kept until the end of a step.
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
    """Bytes of a unit: its whole weights, if they are gathered, and its gradients, if they are given away unit by unit.

    A forward pass keeps `kept` of it until its backward pass; either takes `again` besides while it is in the unit.
    """

    weights: float = 0.0
    gradient: float = 0.0
    kept: float = 0.0
    again: float = 0.0


class Held(NamedTuple):
    """Bytes that are held at a moment; `leaves` are gradients on their way, and the memory for the next ones."""

    weights: float = 0.0
    gradients: float = 0.0
    leaves: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Held) -> Held:
        """Return both together."""
        return Held(*map(add, self, other))


class Peak(NamedTuple):
    """The most that is held, and the action, and that of a unit within it, at which it first is."""

    held: Held
    at: tuple[Action, UnitAction | None] | None


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's step: `chunks` are the blocks of each chunk of its stage, equally many, and `rest` is the rest of each.

    It has `num_lanes` lanes, which may be fewer than there are turns. Units are gathered for each turn or for the step,
    and gradients are given away beside the backward pass or after it.
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
        """Return what is done of units in a turn."""
        if self.gathers == "turn":
            is_first, reduces = leaf.number == 0, self.reduces == "beside"
            return gathering_turn(self.num_blocks, has_rest=not is_first, trains=True, reduces=reduces)
        reduced = () if self.reduces == "never" else reducing_turn(self.num_blocks + 1)
        return (Enter("backward", REST), *reduced) if self.reduces == "after" else reduced


@lru_cache(1024)
def peak_of(program: RankProgram) -> Peak:
    """Return the most memory that a rank's program takes in a step."""
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
"""The sizes of leaves that wait for the next units, ascending."""


class _Effect(NamedTuple):
    """What an action adds to what is held: at its end, and at the most, which is at an action of a unit."""

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
            case Begin():  # a leaf is made of the gradients, which are forgotten
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
