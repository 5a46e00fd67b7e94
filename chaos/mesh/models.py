"""Chaos Mesh's objects, as far as they are emitted: apiVersion chaos-mesh.org/v1alpha1 of Chaos Mesh 2.x.

Fields, their types, enums and bounds are those of its CRDs' OpenAPI schemas (config/crd/bases in chaos-mesh/chaos-mesh,
Apache-2.0) for PodChaos, NetworkChaos, IOChaos, TimeChaos, StressChaos and Workflow; checks between fields are those
of its admission webhooks. What these models refuse, a cluster refuses, too.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Mode = Literal["one", "all", "fixed", "fixed-percent", "random-max-percent"]
Labels = dict[str, str]
ChaosType = Literal["PodChaos", "NetworkChaos", "IOChaos", "TimeChaos", "StressChaos"]
_GO_DURATION = r"^-?(\d+(\.\d+)?(ns|us|ms|s|m|h))+$"
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_CLOCKS = Literal["CLOCK_REALTIME", "CLOCK_MONOTONIC", "CLOCK_BOOTTIME"]
_METHODS = Literal["open", "create", "mkdir", "write", "read", "fsync", "flush", "rename", "unlink", "link", "statfs"]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Selector(_Object):
    """Which pods: all of what is given must match."""

    namespaces: tuple[str, ...] = Field(min_length=1)
    label_selectors: Labels = Field(min_length=1)


class _Targeting(_Object):
    selector: Selector
    mode: Mode
    value: str | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> _Targeting:
        """`value` belongs to the modes that count; percentages go to 100."""
        if (self.value is not None) != self.mode.startswith(("fixed", "random")):
            raise ValueError(f"mode {self.mode} {'takes no' if self.value else 'needs a'} value")
        if self.value is not None and not 0 < int(self.value) <= (100 if "percent" in self.mode else 1 << 31):
            raise ValueError(f"mode {self.mode} cannot have the value {self.value}")
        return self


class Target(_Targeting):
    """The other end of a network fault."""


class PodChaos(_Targeting):
    action: Literal["pod-kill", "pod-failure", "container-kill"]
    grace_period: int | None = Field(default=None, ge=0)
    """Seconds between SIGTERM and SIGKILL; for pod-kill."""
    container_names: tuple[str, ...] | None = None


class Delay(_Object):
    latency: str = Field(pattern=_GO_DURATION)
    jitter: str | None = Field(default=None, pattern=_GO_DURATION)


class Loss(_Object):
    loss: str = Field(pattern=r"^\d+(\.\d+)?$")
    """Percent of the packets."""


class NetworkChaos(_Targeting):
    action: Literal["partition", "delay", "loss"]
    direction: Literal["to", "from", "both"]
    """to: what the selected pods send to the target; from: what the target sends to them."""
    target: Target | None = None
    delay: Delay | None = None
    loss: Loss | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> NetworkChaos:
        if self.direction != "to" and self.target is None:
            raise ValueError(f"direction {self.direction} needs a target")
        if (self.delay is not None, self.loss is not None) != (self.action == "delay", self.action == "loss"):
            raise ValueError("'delay' belongs to the action delay, 'loss' to loss")
        return self


class IOChaos(_Targeting):
    action: Literal["latency", "fault"]
    volume_path: str = Field(pattern="^/")
    """Where the volume is mounted in the container."""
    path: str | None = None
    methods: tuple[_METHODS, ...] | None = None
    percent: int = Field(default=100, ge=0, le=100)
    errno: int | None = Field(default=None, ge=1)
    delay: str | None = Field(default=None, pattern=_GO_DURATION)

    @model_validator(mode="after")
    def _says_what(self) -> IOChaos:
        if (self.errno is not None, self.delay is not None) != (self.action == "fault", self.action == "latency"):
            raise ValueError("errno belongs to the action fault, delay to latency")
        return self


class TimeChaos(_Targeting):
    time_offset: str = Field(pattern=_GO_DURATION)
    clock_ids: tuple[_CLOCKS, ...] = ("CLOCK_REALTIME",)


class CPUStressor(_Object):
    workers: int = Field(ge=1, le=8192)
    load: int = Field(default=100, ge=0, le=100)


class Stressors(_Object):
    cpu: CPUStressor


class StressChaos(_Targeting):
    stressors: Stressors


Chaos = PodChaos | NetworkChaos | IOChaos | TimeChaos | StressChaos


class Template(_Object):
    """A node of a workflow: what it does, or which others it starts, one after another or all at once."""

    name: str
    template_type: Literal["Serial", "Parallel", "Suspend"] | ChaosType
    deadline: str | None = Field(default=None, pattern=_GO_DURATION)
    """How long it lasts; a fault's duration, too."""
    children: tuple[str, ...] | None = None
    pod_chaos: PodChaos | None = None
    network_chaos: NetworkChaos | None = None
    io_chaos: IOChaos | None = None
    time_chaos: TimeChaos | None = None
    stress_chaos: StressChaos | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> Template:
        if not _DNS_1123.fullmatch(self.name):
            raise ValueError(f"'{self.name}' is no DNS-1123 name")
        chaos = {
            "PodChaos": self.pod_chaos,
            "NetworkChaos": self.network_chaos,
            "IOChaos": self.io_chaos,
            "TimeChaos": self.time_chaos,
            "StressChaos": self.stress_chaos,
        }
        held = [kind for kind, spec in chaos.items() if spec is not None]
        if held != ([self.template_type] if self.template_type in chaos else []):
            raise ValueError(f"a template of type {self.template_type} holds {held}")
        if (self.children is not None) != (self.template_type in ("Serial", "Parallel")):
            raise ValueError("children belong to Serial and Parallel")
        if self.template_type == "Suspend" and self.deadline is None:
            raise ValueError("Suspend needs a deadline")
        return self


class WorkflowSpec(_Object):
    entry: str
    templates: tuple[Template, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_closed(self) -> WorkflowSpec:
        names = [template.name for template in self.templates]
        if len(names) != len(set(names)):
            raise ValueError(f"names of templates are not unique: {names}")
        asked = {self.entry, *(child for template in self.templates for child in template.children or ())}
        if not asked <= set(names):
            raise ValueError(f"no template is called {sorted(asked - set(names))}")
        return self


class Metadata(_Object):
    name: str
    namespace: str
    labels: Labels = Field(default_factory=dict)


class Workflow(_Object):
    api_version: Literal["chaos-mesh.org/v1alpha1"] = "chaos-mesh.org/v1alpha1"
    kind: Literal["Workflow"] = "Workflow"
    metadata: Metadata
    spec: WorkflowSpec


class Experiment(_Object):
    """One fault by itself, to be applied by hand: `spec` is a template's, with its duration."""

    api_version: Literal["chaos-mesh.org/v1alpha1"] = "chaos-mesh.org/v1alpha1"
    kind: ChaosType
    metadata: Metadata
    spec: dict[str, object]
