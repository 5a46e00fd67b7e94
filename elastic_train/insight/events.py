"""What is wrong with a run, as its steps show: events with their evidence. Pure: no clock, no files."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.monitoring import EventKind

Kind = EventKind

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
    """Something begins, or with `is_over` ends, to be wrong.

    It was seen after `step` and has been so since the step `since`. `rank` is whose it is, None where it is all ranks'.
    `value` is what was measured and `usual` what it is compared with, in `unit`. `lane` and its `samples` are those of
    an audit.
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
        """Return the event as a sentence for people."""
        who = "" if self.rank is None else f" rank {self.rank}{f' on {host}' if host else ''}:"
        if self.is_over:
            return f"over after step {self.step}:{who} {MEANINGS[self.kind]} (since step {self.since})"
        measured = f"{self.value:.3g}{self.unit} against {self.usual:.3g}{self.unit}"
        if self.lane is not None:
            measured += f", lane {self.lane}, samples {', '.join(map(str, self.samples))}"
        return f"after step {self.step}:{who} {MEANINGS[self.kind]}: {measured}, since step {self.since}"
