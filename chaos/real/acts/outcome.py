"""What an act has struck, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.real.acts.effects import Effect, gone, stopped

if TYPE_CHECKING:
    from chaos.services.torchrun_node import Node

Undo = Callable[[], "list[int] | None"]
"""Undoes a fault and returns the processes that this started or ended; None if it has to be tried again."""

_BY_SIGNAL = {"SIGKILL": gone, "SIGTERM": gone, "SIGSTOP": stopped}


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was done: the processes and nodes that it hit, and what else is to be recorded of it."""

    pids: list[int]
    nodes: list[Node] = field(default_factory=list)
    signal: str | None = None
    undo: Undo | None = None
    recorded: dict[str, object] = field(default_factory=dict)
    effect: Effect | None = None
    """Sees that it bit; left out where a signal and its processes say what there is to see."""

    def __post_init__(self) -> None:
        if self.effect is None and (self.signal not in _BY_SIGNAL or not self.pids):
            raise ValueError("a fault needs an effect, or a signal and the processes that it hit: what proves it?")

    @property
    def proof(self) -> Effect:
        """What sees that the fault bit."""
        if self.effect is not None:
            return self.effect
        return _BY_SIGNAL[str(self.signal)](self.pids)
