"""Problems of a run as its steps show them: events with evidence. Pure: no clock, no files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_train.config.monitoring import EventKind

Kind = EventKind
LINE_EVERY_S = 60.0

MEANINGS: dict[Kind, str] = {
    "slow_compute": "a rank computes for longer than the others",
    "slow_data": "a rank waits for its samples for longer than the others",
    "slow_link": "a rank's connections are slower than the others', and the exchange is a good part of a step",
    "slow_steps": "steps take longer than they did in this world",
    "slow_network": "round trips between ranks take longer than they did in this world",
    "slow_etcd": "etcd takes long to answer",
    "silent_etcd": "etcd leaves most requests without an answer",
    "data_wait": "a good part of all ranks' time goes into waiting for samples",
    "save_stall": "a good part of the time goes into waiting for saves",
    "failed_saves": "commits have failed since the last one that succeeded",
    "loss_spike": "the loss is far above that of the steps before",
    "gradient_spike": "the gradient's norm is many times that of the steps before",
    "nonfinite": "loss or gradient is not a number",
    "wrong_gradient": "a rank's gradient of a lane is not the one that others compute",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something goes wrong, or with `is_over` is right again.

    Seen after `step`, true since step `since`. `rank` is the affected rank, None for all. `value` is the measurement,
    `usual` its reference, in `unit`. `lane` and its `samples` are those of an audit.
    """

    kind: Kind
    step: int
    since: int
    rank: int | None
    value: float
    usual: float
    unit: str
    is_over: bool = False
    lane: int | None = None
    samples: tuple[int, ...] = ()

    def render(self, host: str | None = None) -> str:
        who = "" if self.rank is None else f" rank {self.rank}{f' on {host}' if host else ''}:"
        if self.is_over:
            return f"resolved after step {self.step}, since step {self.since}:{who} {MEANINGS[self.kind]}"
        measured = f"{self.value:.3g}{self.unit} against {self.usual:.3g}{self.unit}"
        if self.lane is not None:
            measured += f", lane {self.lane}, samples {', '.join(map(str, self.samples))}"
        return f"after step {self.step}:{who} {MEANINGS[self.kind]}: {measured}, since step {self.since}"


@dataclass(slots=True)
class _Held:
    """Events of a kind since its last log line."""

    line_at: float
    events: list[tuple[Event, str]]


class EventLines:
    """Log lines for events: one per kind in `LINE_EVERY_S` seconds, which counts those held back."""

    def __init__(self) -> None:
        self._held: dict[Kind, _Held] = {}

    def add(self, event: Event, text: str, now: float, *, is_urgent: bool = False) -> str | None:
        """Return the line of an event, None if it is held back; urgent ones are logged at once."""
        held = self._held.get(event.kind)
        if held is not None and not is_urgent and now - held.line_at < LINE_EVERY_S:
            held.events.append((event, text))
            return None
        before = [] if held is None else held.events
        self._held[event.kind] = _Held(now, [])
        return f"EVENT {event.kind}: {text}{_counted(before)}"

    def due(self, now: float) -> Iterator[str]:
        """Yield a line for each kind whose last line is old enough, with the last event held back."""
        for kind, held in self._held.items():
            if held.events and now - held.line_at >= LINE_EVERY_S:
                *before, (_, text) = held.events
                held.line_at, held.events = now, []
                yield f"EVENT {kind}: {text}{_counted(before)}"


def _counted(held: list[tuple[Event, str]]) -> str:
    if not held:
        return ""
    ranks = sorted({event.rank for event, _ in held if event.rank is not None})
    of_ranks = f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    return f" ({len(held)} more since the last line{of_ranks}: see the history)"
