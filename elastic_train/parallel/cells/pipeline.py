"""Run a stage's program: forward and backward passes of its lanes, and exchanges with neighbouring stages.

A lane's activation is a leaf of the stage's graph, so its backward pass adds the same gradients as on one rank. Lanes
without samples, and turns without a lane, are skipped in the exchanges by all stages; their passes compute nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor

from elastic_train.parallel.cells.stage_links import Activation, Awaited, Links
from elastic_train.program.schedules import Exchange, Pass
from elastic_train.program.step_program import Action, AddExperts, Close, Open


class Passes(ABC):
    """A rank's passes, by turn; lanes are numbered in the order in which their gradients are added."""

    @abstractmethod
    def key(self, number: int) -> Hashable | None:
        """Return the key that lanes with equal shapes share; None if the lane has no samples."""

    @abstractmethod
    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        """Run a chunk on the previous piece's output (None for the first); return its output, or the last piece's loss.

        Returns None without samples, or if there is nothing to backpropagate through.
        """

    @abstractmethod
    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        """Add a lane's gradients, given that of the output of `forward`; None for the last piece."""

    def waited(self) -> None:  # noqa: B027 - few ask for it
        """Note that an exchange has ended."""

    def open(self, one: Open) -> None:  # noqa: B027 - outside of steps there are no leaves
        """Begin the leaf of a turn."""

    def close(self, one: Close) -> None:  # noqa: B027
        """End the leaf of a turn."""

    def add_experts(self, one: AddExperts) -> None:  # noqa: B027
        """Add the gradients that a turn's lanes have given to this rank's experts."""


@dataclass(frozen=True, slots=True)
class _Alive:
    """A lane's input and output in a chunk, kept from its forward to its backward pass."""

    given: Tensor | None
    made: Tensor


_Lanes = dict[tuple[int, int], _Alive]
"""By lane number and chunk."""


def run_program(actions: Iterable[Action], links: Links, passes: Passes) -> int:
    """Run the actions of a step; return the maximum number of live lanes, counted per chunk."""
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
    """Run a pass; return its output for the next piece, or its gradient for the previous one."""
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
    """Begin to send the last pass's result, and to receive the tensors for other passes."""
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
