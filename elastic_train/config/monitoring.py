"""The keys of what a run says of itself while it trains: phases, events, pages, traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from elastic_train.config.section import MOST_CHARS_OF_A_NAME, Old, Section, checked_name

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
"""Events that name one rank, whose node can be dropped."""


LOOPBACK = "127.0.0.1"


def _port(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the address of a section that has a key for the host, and one for the port."""
    return {"port": f"{old['host']}:{old['port']}"} if isinstance(old.get("port"), int) else {}


class MonitoringConfig(Section):
    port: int | str | None = None
    """Serve Prometheus metrics at this port of every node, for this machine only, or with an address such as
    0.0.0.0:9100 for everybody: the page has no password. null: no page. 0: a free port, which the log names."""
    OLD: ClassVar[Mapping[str, Old]] = {
        "host": Old(str, LOOPBACK, "is now port: HOST:PORT", _port),
        "phases_every_steps": Old(int, 50, "is ignored, and is 50"),
        "flops_per_sample": Old(
            float | None, None, "is ignored: each process counts the FLOPs of a sample at its start"
        ),
        "peak_tflops": Old(float | None, None, "is ignored: MFU is shown for GPUs that `elastic-train plan` knows"),
        "otlp": Old(str | None, None, "is ignored: `elastic-train report` shows every recovery and its parts"),
        "recomputed_flops_per_sample": Old(float, 0.0, "is ignored: each process counts it at its start"),
    }
    on_event: dict[EventKind, Action] = Field(default_factory=dict)
    """Action for each kind of event, such as {slow_link: drop}. tell (default): log it. snapshot: also commit at
    the next step. drop (events of one rank): ask the rank's node to leave if enough nodes stay. stop: commit and
    end the job with exit code 93."""

    @field_validator("port")
    @classmethod
    def _is_an_address(cls, port: int | str | None) -> int | str | None:
        _, _, number = f"{port or 0}".rpartition(":")
        if not (number.isdecimal() and int(number) <= 65535) or port == "":
            raise ValueError("must be a port from 0 to 65535, or an address and a port, such as 0.0.0.0:9100")
        return port

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the Prometheus page; None without a page."""
        if self.port is None:
            return None
        host, _, number = f"{self.port}".rpartition(":")
        return host.strip("[]") or LOOPBACK, int(number)

    @field_validator("on_event")
    @classmethod
    def _drops_ranks(cls, on_event: dict[EventKind, Action]) -> dict[EventKind, Action]:
        """Refuse to drop a node for what is no rank's own."""
        for kind, action in on_event.items():
            if action == "drop" and kind not in OF_RANKS:
                raise ValueError(f"{kind} concerns all ranks: there is no node to drop; {', '.join(OF_RANKS)} name one")
        return on_event


def _at_steps(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the steps of a section that has a key for the length of a trace."""
    return {"at_steps": sorted({at + step for at in old.get("at_steps", ()) for step in range(old["num_steps"])})}


class ProfileConfig(Section):
    at_steps: tuple[PositiveInt, ...] = ()
    """Trace these steps; consecutive ones make one trace: [10, 11, 1000] makes two. A step of a large model takes tens
    of megabytes before compression. []: no traces, at no cost."""
    ranks: tuple[NonNegativeInt, ...] | Literal["all"] = (0,)
    """Ranks to trace, such as [0, 3], or all."""
    memory: bool = False
    """Also trace allocations. On a GPU they are recorded all the time, for a snapshot when memory runs out."""
    OLD: ClassVar[Mapping[str, Old]] = {"num_steps": Old(PositiveInt, 2, "is now at_steps, with every step", _at_steps)}


def _experiment(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the experiment of a section that names a Weights & Biases project; ValueError if it names two."""
    project = old["wandb_project"]
    if old.get("wandb") is None:
        return {}
    if old.get("mlflow_uri") is not None and old.get("experiment", "elastic-train") != project:
        raise ValueError(f"experiment names the project, too: set it to {project!r}, and leave out wandb_project")
    return {"experiment": project}


class TrackingConfig(Section):
    mlflow_uri: str | None = None
    """MLflow tracking URI, such as sqlite:///mlflow.db. null: local metrics only."""
    experiment: str = "elastic-train"
    """MLflow experiment, and Weights & Biases project."""
    tensorboard: bool = False
    """Also write TensorBoard event files to run.dir/tensorboard. Needs the extra [tensorboard]."""
    wandb: Literal["online", "offline"] | None = None
    """Also log to Weights & Biases. offline: write to run.dir/wandb, for `wandb sync`. Needs the extra [wandb]."""
    OLD: ClassVar[Mapping[str, Old]] = {
        "wandb_project": Old(str, "elastic-train", "is now experiment, for all trackers", _experiment)
    }

    @field_validator("experiment")
    @classmethod
    def _is_an_experiment(cls, name: str) -> str | None:
        return checked_name(name, 256)

    @model_validator(mode="after")
    def _is_a_project(self) -> TrackingConfig:
        if self.wandb is not None:
            checked_name(self.experiment, MOST_CHARS_OF_A_NAME, without="/\\#?%:", key="experiment ")
        return self
