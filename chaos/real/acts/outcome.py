"""What an act has struck, and how it is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.real.acts.effects import Effect, gone, running, stopped

if TYPE_CHECKING:
    from chaos.services.torchrun_node import Node

Undo = Callable[[], "list[int] | None"]
"""Undoes a fault and returns the processes that this started or ended; None if it has to be tried again."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was done: the processes and nodes that it hit, and what else is to be recorded of it."""

    pids: list[int]
    nodes: list[Node] = field(default_factory=list)
    signal: str | None = None
    undo: Undo | None = None
    recorded: dict[str, object] = field(default_factory=dict)
    effect: Effect | None = None
    """Sees that it bit; left out where signal and processes say what there is to see."""

    @property
    def proof(self) -> Effect:
        """What sees that the fault bit."""
        if self.effect is not None:
            return self.effect
        by_signal = {"SIGKILL": gone, "SIGTERM": gone, "SIGSTOP": stopped}
        return by_signal.get(str(self.signal), running)(self.pids)
