"""Unit actions of a turn with sharded state: when weights are gathered and released, and gradients reduced.

All ranks of a group run a turn's actions in the same order, whatever their passes do, so no rank waits for a message
that is never sent. First comes the rest of the model, unless present; then the blocks' weights, each gathered while the
previous block computes; then, from the last block to the first, the previous block's weights and the block's gradients.
A unit's gradients are sent while the next unit's are computed.

A pass only reports its progress (`Walk`), which triggers the actions due; skipped ones follow at its end. A rank
without a lane in the turn runs all actions without a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from elastic_train.program.schedules import Direction

REST = -1
"""Number of the unit outside all blocks, the rest of the model."""


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


@lru_cache(256)
def gathering_turn(num_blocks: int, *, has_rest: bool, trains: bool, reduces: bool) -> tuple[UnitAction, ...]:
    """Return the actions of a turn with gathered units; the rest of the model stays, and may be present already."""
    return tuple(_gathering(num_blocks, has_rest=has_rest, trains=trains, reduces=reduces))


@lru_cache(256)
def filling_turn(num_units: int) -> tuple[UnitAction, ...]:
    """Return the actions of a turn whose units are reduced in that order, and waited for after the turn."""
    return tuple(action for action in reducing_turn(num_units) if isinstance(action, Begin))


@lru_cache(256)
def reducing_turn(num_units: int) -> tuple[UnitAction, ...]:
    """Return the actions of a turn whose weights are present: reduce the blocks from the last on, then the rest."""
    units = [*reversed(range(num_units - 1)), REST][:num_units]
    begun = [action for pair in zip(units, [None, *units], strict=False) for action in _reduce(*pair)]
    return (*begun, *(End("reduce", unit) for unit in units[-1:]))


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
        yield from _backward(num_blocks, reduces=reduces)
    else:
        yield from _let_go(last, num_blocks)


def _backward(num_blocks: int, *, reduces: bool) -> Iterator[UnitAction]:
    """Yield the actions after a forward pass; the last block's weights are still there."""
    before: int | None = None
    for block in reversed(range(num_blocks)):
        if block:
            yield from _let_go(block + 1, num_blocks)
            yield Begin("gather", block - 1)
        yield Enter("backward", block)
        if reduces:
            yield from _reduce(block, before)
            before = block
    if reduces:
        yield from (*_reduce(REST, before), End("reduce", REST))
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
