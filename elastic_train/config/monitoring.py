"""The keys of what a run says of itself while it trains: phases, events, pages, traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from elastic_train.config.section import Old, Section

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
    """Serve Prometheus metrics at this port of every node. null: no page. 0: a free port, which the log names."""
    host: str = "127.0.0.1"
    """Address of the Prometheus page: this machine only, or 0.0.0.0 for everybody. It has no password."""
    phases_every_steps: PositiveInt = 50
    """Write each rank's seconds per phase to the history and the tracker every N steps."""
    otlp: str | None = Field(default=None, pattern=r"^https?://")
    """Send an OpenTelemetry trace of every recovery to this OTLP endpoint over HTTP, such as http://collector:4318.
    Needs the extra [otel]."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a rank's device at the run's precision, for MFU. null: by the GPU's name, if `elastic-train plan`
    knows it."""
    OLD: ClassVar[Mapping[str, Old]] = {
        "flops_per_sample": Old(
            float | None, None, "is ignored: each process counts the FLOPs of a sample at its start"
        ),
        "recomputed_flops_per_sample": Old(float, 0.0, "is ignored: each process counts it at its start"),
    }
    on_event: dict[EventKind, Action] = Field(default_factory=dict)
    """Action for each kind of event, such as {slow_link: drop}. tell (default): log it. snapshot: also commit at
    the next step. drop (events of one rank): ask the rank's node to leave if enough nodes stay. stop: commit and
    end the job with exit code 93."""

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
    """Take a trace that begins at each of these steps, such as [10, 1000]. []: no traces, at no cost."""
    num_steps: PositiveInt = 2
    """Number of steps in a trace. A step of a large model takes tens of megabytes before compression."""
    ranks: tuple[NonNegativeInt, ...] | Literal["all"] = (0,)
    """Ranks to trace, such as [0, 3], or all."""
    memory: bool = False
    """Also trace allocations. On a GPU they are recorded all the time, for a snapshot when memory runs out."""
