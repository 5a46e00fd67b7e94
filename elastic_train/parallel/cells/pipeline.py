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
from elastic_train.parallel.cells.stage_links import Activation, StageLinks


class Passes(Protocol):
    """A stage's passes; lanes have numbers in the order in which their gradients are added."""

    def key(self, number: int) -> Hashable | None:
        """Return what a lane has in common with others of the same shapes; None if it has no samples."""

    def forward(self, number: int, given: Tensor | None) -> Tensor:
        """Return what the stage makes of what the one before has given, None to the first; the last, its loss."""

    def backward(self, number: int, made: Tensor | None, gradient: Tensor | None) -> None:
        """Add the gradients of a lane, given that of what `forward` has made; both None where there are no samples."""

    def waited(self) -> None:
        """Note that an exchange has ended."""


@dataclass(frozen=True, slots=True)
class _Alive:
    """What a lane keeps from its forward to its backward pass."""

    given: Tensor | None
    made: Tensor


def run_schedule(actions: Iterable[Action], links: StageLinks, passes: Passes) -> int:
    """Run the passes of a step; return how many lanes were alive at once at most."""
    alive, most = dict[int, _Alive](), 0
    given: Tensor | None = None
    made: Tensor | None = None
    for action in actions:
        if isinstance(action, Exchange):
            given = _exchange(action, links, passes, alive, made)
            passes.waited()
        elif passes.key(action.number) is None:
            if action.direction == "backward":
                passes.backward(action.number, None, None)
        elif action.direction == "forward":
            start = None if given is None else given.requires_grad_()
            made = passes.forward(action.number, start)
            alive[action.number] = _Alive(start, made)
            most, given = max(most, len(alive)), None
        else:
            lane = alive.pop(action.number)
            passes.backward(action.number, lane.made, given)
            made, given = None if lane.given is None else lane.given.grad, None
    links.finish()
    return most


def _exchange(
    action: Exchange, links: StageLinks, passes: Passes, alive: dict[int, _Alive], made: Tensor | None
) -> Tensor | None:
    """Send what the last pass has made, and return what the next one needs."""
    sends, awaits = _with_samples(action.sends, passes), _with_samples(action.awaits, passes)
    goes_on = sends is not None and sends.direction == "forward"
    comes_back = awaits is not None and awaits.direction == "backward"
    if sends is not None:
        assert made is not None, "a lane with samples has made something, and what it was given has a gradient"
    return links.exchange(
        activation=Activation(passes.key(sends.number), made)
        if sends is not None and made is not None and goes_on
        else None,
        gradient=made if sends is not None and not goes_on else None,
        awaits=passes.key(awaits.number) if awaits is not None and not comes_back else None,
        awaits_gradient_of=alive[awaits.number].made if awaits is not None and comes_back else None,
    )


def _with_samples(one: Pass | None, passes: Passes) -> Pass | None:
    return None if one is None or passes.key(one.number) is None else one
