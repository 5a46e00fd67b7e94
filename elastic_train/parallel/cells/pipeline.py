"""Running a program: passes of a rank's lanes, and between them exchanges with its neighbours.

A lane's activation is a leaf of the stage's graph, so its backward pass adds what one rank's would. Lanes without
samples, and turns without a lane, are left out of the exchanges, on all stages alike; their passes come all the same,
and compute nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from elastic_train.parallel.cells.stage_links import Activation, Awaited
from elastic_train.program.schedules import Exchange, Pass
from elastic_train.program.step_program import Action, AddExperts, Close, Open


class Passes(ABC):
    """A rank's passes, by turn; lanes have numbers in the order in which their gradients are added."""

    @abstractmethod
    def key(self, number: int) -> Hashable | None:
        """Return what a lane has in common with others of the same shapes; None if it has no samples."""

    @abstractmethod
    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        """Return what a chunk makes of what the piece before has given, None to the first; the last, its loss.

        None without samples, or if there is nothing to go back through.
        """

    @abstractmethod
    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        """Add the gradients of a lane, given that of what `forward` has made; the last is given none."""

    def waited(self) -> None:  # noqa: B027 - few ask for it
        """Note that an exchange has ended."""

    def open(self, one: Open) -> None:  # noqa: B027 - outside of steps nothing is added
        """Begin the leaf of a turn."""

    def close(self, one: Close) -> None:  # noqa: B027
        """End the leaf of a turn."""

    def add_experts(self, one: AddExperts) -> None:  # noqa: B027
        """Add what the lanes of a turn have given to this rank's experts."""


class Links(Protocol):
    """What a program's rank sends its neighbours, and they send it: `StageLinks`, or nothing."""

    def exchange(
        self, *, activation: Activation | None = None, gradient: Tensor | None = None, takes: Sequence[Awaited] = ()
    ) -> None:
        """Begin to send an activation or a gradient, and to take what comes."""

    def arrived(self, name: Hashable) -> Tensor | None:
        """Return what has come for a pass, once it has; None if nothing comes for it."""

    def finish(self) -> None:
        """Wait until all that was sent is taken."""


@dataclass(frozen=True, slots=True)
class _Alive:
    """What a lane keeps in a chunk from its forward to its backward pass."""

    given: Tensor | None
    made: Tensor


_Lanes = dict[tuple[int, int], _Alive]
"""By number and chunk."""


def run_program(actions: Iterable[Action], links: Links, passes: Passes) -> int:
    """Run the actions of a step; return how many lanes were alive at once at most, each in one chunk."""
    alive, most = _Lanes(), 0
    made: Tensor | None = None
    for action in actions:
        match action:
            case Exchange():
                _exchange(action, links, passes, alive, made)
                passes.waited()
            case Pass():
                made = _pass(action, links, passes, alive)
                most = max(most, len(alive))
            case Open():
                passes.open(action)
            case Close():
                passes.close(action)
            case AddExperts():
                passes.add_experts(action)
    links.finish()
    return most


def _pass(one: Pass, links: Links, passes: Passes, alive: _Lanes) -> Tensor | None:
    """Run a pass; return what it has made for the next piece, or for the one before."""
    given = links.arrived(one)
    if given is not None:
        passes.waited()
    if one.direction == "forward":
        start = None if given is None else given.requires_grad_()
        made = passes.forward(one, start)
        if made is not None:
            alive[one.number, one.chunk] = _Alive(start, made)
        return made
    lane = alive.pop((one.number, one.chunk), None)
    passes.backward(one, None if lane is None else lane.made, given)
    return None if lane is None or lane.given is None else lane.given.grad


def _exchange(action: Exchange, links: Links, passes: Passes, alive: _Lanes, made: Tensor | None) -> None:
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
