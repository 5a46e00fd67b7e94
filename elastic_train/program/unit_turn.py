"""A turn by units, where ranks hold shares: when weights are gathered and let go of, and when gradients are given away.

All ranks of a group go through one turn's actions in the same order, whatever a pass does, so nobody waits for what
another rank will never send. The rest of the model, if it is not there, comes first; then the blocks' weights, first to
last, each while the block before it computes; then, from the last block to the first, the weights of the block before
it, and its gradients. Gradients of a unit are on their way while the next one's are computed.

A pass only reports how far it is (`Walk`): what is due by then is done, and at its end, what it has left out. A rank
without a lane in the turn goes through all of it without a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from elastic_train.program.schedules import Direction

REST = -1
"""The number of the unit that is no block."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin to exchange a unit's weights, or its gradients."""

    what: Literal["gather", "reduce"]
    unit: int


@dataclass(frozen=True, slots=True)
class End:
    """Wait for what was begun."""

    what: Literal["gather", "reduce"]
    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of a unit's weights."""

    unit: int


@dataclass(frozen=True, slots=True)
class Enter:
    """A pass comes to a unit, and waits for its weights; one that leaves a block out does not."""

    direction: Direction
    unit: int


UnitAction = Begin | End | Free | Enter


@lru_cache(256)
def gathering_turn(num_blocks: int, *, has_rest: bool, trains: bool, reduces: bool) -> tuple[UnitAction, ...]:
    """Return the actions of a turn for which units are gathered; the rest of the model stays, and may be there."""
    return tuple(_gathering(num_blocks, has_rest=has_rest, trains=trains, reduces=reduces))


@lru_cache(256)
def filling_turn(num_units: int) -> tuple[UnitAction, ...]:
    """Return the actions of a turn of units that are reduced in the same order, and waited for after it."""
    return tuple(action for action in reducing_turn(num_units) if isinstance(action, Begin))


@lru_cache(256)
def reducing_turn(num_units: int) -> tuple[UnitAction, ...]:
    """Return the actions of a turn whose weights are there: blocks are reduced from the last on, and then the rest."""
    units = [*reversed(range(num_units - 1)), REST][:num_units]
    begun = [action for pair in zip(units, [None, *units], strict=False) for action in _reduce(*pair)]
    return (*begun, *(End("reduce", unit) for unit in units[-1:]))


def place_of(unit: int, num_units: int) -> int:
    """Return where in the order of reductions a unit is: blocks from the last one on, then the rest of the model."""
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
    """Yield the actions from the end of a forward pass on: the last block's weights stay."""
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
    """Let go of a block's weights, if there is such a block; nobody waited for them if no pass came to it."""
    if 0 <= block < num_blocks:
        yield from (End("gather", block), Free(block))


def _reduce(unit: int, before: int | None) -> Iterator[UnitAction]:
    """Begin a unit's exchange; that of the unit before it has had the time of a unit's pass."""
    yield Begin("reduce", unit)
    if before is not None:
        yield End("reduce", before)


@lru_cache(256)
def places(actions: tuple[UnitAction, ...]) -> dict[UnitAction, int]:
    """Return where a pass comes to each unit."""
    return {action: place for place, action in enumerate(actions) if isinstance(action, Enter)}


class Walk:
    """A rank's way through the actions of a turn, each of which is done once, in their order."""

    def __init__(self, actions: tuple[UnitAction, ...], act: Callable[[UnitAction], None]) -> None:
        self._actions, self._act, self._at = actions, act, 0

    @property
    def next(self) -> UnitAction | None:
        """The action that is due next."""
        return self._actions[self._at] if self._at < len(self._actions) else None

    def enter(self, direction: Direction, unit: int) -> None:
        """Do what is due before a pass comes to a unit, unless it has come to that one before."""
        place = places(self._actions)[Enter(direction, unit)]
        while self._at <= place:
            self.step()

    def finish(self) -> None:
        """Do all that is left."""
        while self._at < len(self._actions):
            self.step()

    def step(self) -> None:
        """Do the next action."""
        action = self._actions[self._at]
        self._at += 1
        self._act(action)
