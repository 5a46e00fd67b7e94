"""The keys of what a run says of itself while it trains: phases, events, pages, traces."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from elastic_train.config.section import Section

EventKind = Literal[
    "slow_compute",
    "slow_data",
    "slow_link",
    "slow_steps",
    "slow_network",
    "slow_etcd",
    "silent_etcd",
    "data_wait",
    "save_stall",
    "failed_saves",
    "loss_spike",
    "gradient_spike",
    "nonfinite",
    "wrong_gradient",
]
Action = Literal["tell", "snapshot", "drop", "stop"]
OF_RANKS: tuple[EventKind, ...] = ("slow_compute", "slow_data", "slow_link", "wrong_gradient")
"""What is wrong with one rank, whose node can be dropped."""


class MonitoringConfig(Section):
    port: int | None = Field(default=None, ge=0, le=65535)
    """Serve a page for Prometheus at this port of every node; null for none, 0 for a free one that the log names."""
    host: str = "127.0.0.1"
    """Where that page listens: this machine alone, or 0.0.0.0 for everybody who reaches it. It asks for no password."""
    phases_every_steps: PositiveInt = 50
    """After how many steps the seconds that every rank has spent, phase by phase, go to the history and the tracker."""
    otlp: str | None = Field(default=None, pattern=r"^https?://")
    """Send an OpenTelemetry trace of every recovery to this OTLP endpoint over HTTP, such as http://collector:4318.
    Needs the extra [otel]."""
    flops_per_sample: PositiveFloat | None = None
    """Operations of the model for a sample, forward and backward, as `elastic-train plan` says; null for no MFU."""
    recomputed_flops_per_sample: NonNegativeFloat = 0.0
    """Operations for a sample that a backward pass computes once more (`parallel.recompute`): HFU counts them, too."""
    peak_tflops: PositiveFloat | None = None
    """What a rank's device can do, in 10^12 operations a second at the run's precision; null for no MFU."""
    on_event: dict[EventKind, Action] = Field(default_factory=dict)
    """What follows an event, by its kind: tell (the default of each) says so in log, history and tracker; snapshot also
    commits at the next step; drop (of one rank) asks its node to leave the others, if at least the fewest nodes
    stay; stop commits, and ends the job with exit code 93. Such as {slow_link: drop}."""

    @model_validator(mode="after")
    def _has_both(self) -> MonitoringConfig:
        """Refuse one half of MFU."""
        if (self.flops_per_sample is None) != (self.peak_tflops is None):
            raise ValueError("MFU needs both, monitoring.flops_per_sample and monitoring.peak_tflops, or neither")
        return self

    @field_validator("on_event")
    @classmethod
    def _drops_ranks(cls, on_event: dict[EventKind, Action]) -> dict[EventKind, Action]:
        """Refuse to drop a node for what is no rank's own."""
        for kind, action in on_event.items():
            if action == "drop" and kind not in OF_RANKS:
                raise ValueError(f"{kind} concerns all ranks: there is no node to drop; {', '.join(OF_RANKS)} name one")
        return on_event


class ProfileConfig(Section):
    at_steps: tuple[PositiveInt, ...] = ()
    """Take a trace that begins with each of these steps, such as [10, 1000]; [] for none, which costs nothing."""
    num_steps: PositiveInt = 2
    """How many steps a trace covers. A step of a large model is tens of megabytes before compression."""
    ranks: tuple[NonNegativeInt, ...] | Literal["all"] = (0,)
    """Whose traces: such as [0, 3], or all."""
    memory: bool = False
    """Also trace what is allocated and freed, and record it all the time on a GPU, for a snapshot at out of memory."""
