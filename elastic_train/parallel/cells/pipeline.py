"""Running a stage's schedule: passes of its lanes, and between them exchanges with its neighbours.

A lane's activation is a leaf of the stage's graph, so its backward pass adds what one rank's would. Lanes without
samples are left out of the exchanges, on all stages alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from elastic_train.core.schedules import Action, Exchange, Pass
from elastic_train.parallel.cells.stage_links import Activation, Awaited, StageLinks


class Passes(Protocol):
    """A stage's passes; lanes have numbers in the order in which their gradients are added."""

    def key(self, number: int) -> Hashable | None:
        """Return what a lane has in common with others of the same shapes; None if it has no samples."""

    def forward(self, one: Pass, given: Tensor | None) -> Tensor:
        """Return what a chunk makes of what the piece before has given, None to the first; the last, its loss."""

    def backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        """Add the gradients of a lane, given that of what `forward` has made; the last is given none."""

    def left_out(self, one: Pass) -> None:
        """Note that the turn of a lane without samples has come."""

    def waited(self) -> None:
        """Note that an exchange has ended."""


@dataclass(frozen=True, slots=True)
class _Alive:
    """What a lane keeps in a chunk from its forward to its backward pass."""

    given: Tensor | None
    made: Tensor


_Lanes = dict[tuple[int, int], _Alive]
"""By number and chunk."""


def run_schedule(actions: Iterable[Action], links: StageLinks, passes: Passes) -> int:
    """Run the passes of a step; return how many lanes were alive at once at most, each in one chunk.

    What was sent last may still be under way: `links.finish` waits for it.
    """
    alive, most = _Lanes(), 0
    made: Tensor | None = None
    for action in actions:
        if isinstance(action, Exchange):
            _exchange(action, links, passes, alive, made)
            passes.waited()
        elif passes.key(action.number) is None:
            passes.left_out(action)
        else:
            given = links.arrived(action)
            passes.waited()
            if action.direction == "forward":
                start = None if given is None else given.requires_grad_()
                made = passes.forward(action, start)
                alive[action.number, action.chunk] = _Alive(start, made)
                most = max(most, len(alive))
            else:
                lane = alive.pop((action.number, action.chunk))
                passes.backward(action, lane.made, given)
                made = None if lane.given is None else lane.given.grad
    return most


def _exchange(action: Exchange, links: StageLinks, passes: Passes, alive: _Lanes, made: Tensor | None) -> None:
    """Begin to send what the last pass has made, and to take what other passes need."""
    takes = [_awaited(one, passes, alive) for one in action.takes if passes.key(one.number) is not None]
    sends, key = action.sends, None if action.sends is None else passes.key(action.sends.number)
    if sends is None or key is None:
        links.exchange(takes=takes)
        return
    assert made is not None, "a lane with samples has made something, and what it was given has a gradient"
    if sends.direction == "forward":
        links.exchange(activation=Activation((sends.chunk, key), made), takes=takes)
    else:
        links.exchange(gradient=made, takes=takes)


def _awaited(one: Pass, passes: Passes, alive: _Lanes) -> Awaited:
    if one.direction == "forward":
        return Awaited(one, key=(one.chunk, passes.key(one.number)))
    return Awaited(one, made=alive[one.number, one.chunk].made)
