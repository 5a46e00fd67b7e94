"""The outcome of an act, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.real.acts.effects import Effect, gone, stopped

if TYPE_CHECKING:
    from chaos.services.torchrun_node import Node

Undo = Callable[[], "list[int] | None"]
"""Undoes a fault and returns the processes that this started or ended; None if it must be retried."""

_BY_SIGNAL = {"SIGKILL": gone, "SIGTERM": gone, "SIGSTOP": stopped}


@dataclass(frozen=True, slots=True)
class Struck:
    """An injected fault: processes and nodes hit, and further fields to record."""

    pids: list[int]
    nodes: list[Node] = field(default_factory=list)
    signal: str | None = None
    undo: Undo | None = None
    recorded: dict[str, object] = field(default_factory=dict)
    effect: Effect | None = None
    """Observes the effect; optional if a signal and its processes imply it."""

    def __post_init__(self) -> None:
        if self.effect is None and (self.signal not in _BY_SIGNAL or not self.pids):
            raise ValueError("a fault needs an effect, or a signal and the processes that it hit: what proves it?")

    @property
    def proof(self) -> Effect:
        if self.effect is not None:
            return self.effect
        return _BY_SIGNAL[str(self.signal)](self.pids)
