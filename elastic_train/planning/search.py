"""Compute the figures of layouts, rank the best by a figure, and explain why others are excluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_train.errors import ConfigError
from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.goodput import Goodput, Reliability, goodput_of
from elastic_train.planning.arithmetic.layouts import Batch, Layout, candidates, why_not
from elastic_train.planning.arithmetic.memory import Memory, memory_of
from elastic_train.planning.arithmetic.model import ModelFacts
from elastic_train.planning.arithmetic.step_time import StepTime, model_flops_utilisation, step_time
from elastic_train.system.wording import did_you_mean, nearest, size

SIZES = tuple(1 << power for power in range(11))
"""Numbers for which scaling is computed, 1 to 1,024: of devices within a node, and of nodes."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job to plan: a model and its steps, on a cluster, at a price per device-hour, with its faults."""

    model: ModelFacts
    batch: Batch
    cluster: Cluster
    num_steps: int
    price: float = 0.0
    threads: int = 1
    reliability: Reliability = field(default_factory=Reliability)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A layout with its figures; `problems` say why it cannot be used."""

    layout: Layout
    devices: int
    memory: Memory | None
    step: StepTime | None
    goodput: Goodput | None
    per_s: float
    mfu: float
    days: float
    cost: float
    problems: tuple[str, ...] = ()

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures that layouts are ranked by; more is better except for those in LESS_IS_BETTER."""
        if self.step is None or self.memory is None or self.goodput is None:
            return {}
        return {
            "throughput": self.per_s,
            "mfu": self.mfu,
            "step": self.step.total_s,
            "memory": self.memory.total,
            "communication": self.step.communication_share,
            "goodput": self.goodput.share,
            "days": self.days,
            "cost": self.cost,
        }


LESS_IS_BETTER = frozenset({"step", "memory", "communication", "days", "cost"})
FIGURES = ("throughput", "mfu", "step", "memory", "communication", "goodput", "days", "cost")


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Results for a number of devices, with the run's global batch or with the lanes per device of one device."""

    devices: int
    outcome: Outcome
    speedup: float

    @property
    def efficiency(self) -> float:
        return self.speedup / self.devices


def work_out(job: Job, layout: Layout) -> Outcome:
    """Return a layout's figures; an excluded layout has only problems, one that does not fit has both."""
    model, batch, cluster = job.model, job.batch, job.cluster
    if wrong := why_not(layout, model, batch, cluster):
        return Outcome(layout, cluster.size, None, None, None, 0.0, 0.0, 0.0, 0.0, tuple(wrong))
    memory = memory_of(model, layout, batch, cluster)
    step = step_time(model, layout, batch, cluster, job.threads)
    goodput = goodput_of(layout, memory, step.total_s, cluster, job.reliability)
    per_s = model.amounts * batch.num_lanes / step.total_s
    days = job.num_steps * step.total_s / max(1e-9, goodput.share) / 86400
    mfu = model_flops_utilisation(model, batch, cluster, step.total_s)
    cost = days * 24 * job.price * (cluster.size + job.reliability.spares * cluster.per_node)
    return Outcome(
        layout, cluster.size, memory, step, goodput, per_s, mfu, days, cost, tuple(_does_not_fit(memory, cluster))
    )


def _does_not_fit(memory: Memory, cluster: Cluster) -> list[str]:
    room = cluster.device.usable_bytes
    if memory.total <= room:
        return []
    most = sorted(memory.parts.items(), key=lambda part: -part[1])[:2]
    shown = " and ".join(f"{size(num)} of {name}" for name, num in most)
    has = f"{cluster.device.name} has {size(room)} to use of {size(cluster.device.memory_gb * 1e9)}"
    return [f"needs {size(memory.total)} a device, {shown}; {has}"]


def compare(job: Job, own: Layout, *, with_cells: bool) -> list[Outcome]:
    """Compute all candidate layouts; those that cannot be used come last."""
    cluster = job.cluster
    layouts = candidates(own, cluster.size, with_cells=with_cells, is_cpu=cluster.device.is_cpu)
    outcomes = [work_out(job, layout) for layout in dict.fromkeys(layouts)]
    return sorted(outcomes, key=lambda outcome: bool(outcome.problems))


def wrong_figure(figure: str) -> list[str]:
    if figure in FIGURES:
        return []
    meant = did_you_mean(nearest(figure, FIGURES), f"; there are {', '.join(FIGURES)}")
    return [f"--by: no figure '{figure}'{meant}"]


def best(outcomes: Sequence[Outcome], figure: str, count: int = 5) -> list[Outcome]:
    """Return the best usable outcomes by a figure; raises ConfigError for an unknown figure."""
    if wrong := wrong_figure(figure):
        raise ConfigError(*wrong)
    usable = [outcome for outcome in outcomes if not outcome.problems]
    sign = 1 if figure in LESS_IS_BETTER else -1
    return sorted(usable, key=lambda outcome: (sign * outcome.figures[figure], outcome.figures["memory"]))[:count]


def scaling(job: Job, layout: Layout, *, weak: bool) -> list[ScalingRow]:
    """Return the scaling over numbers of devices: strong with the run's global batch, weak with its lanes per device.

    Speed-up is relative to one device that computes the same lanes, even if they would not fit there.
    """
    lanes_each = max(1, job.batch.num_lanes // max(1, layout.replicas(job.cluster.size)))
    rows, per_node = [], job.cluster.per_node
    whole_nodes = (per_node * number for number in SIZES if per_node * number <= SIZES[-1])
    for num_devices in (*(number for number in SIZES if number < per_node), *whole_nodes):
        if num_devices % layout.cell:
            continue
        num_lanes = lanes_each * layout.replicas(num_devices) if weak else job.batch.num_lanes
        if num_devices // layout.cell > num_lanes:
            break
        here = replace(job, cluster=job.cluster.of_size(num_devices), batch=replace(job.batch, num_lanes=num_lanes))
        outcome = work_out(here, layout.fitting(num_devices))
        if outcome.step is not None:
            rows.append(ScalingRow(num_devices, outcome, _alone_s(here) / outcome.step.total_s))
    return rows


def _alone_s(job: Job) -> float:
    alone = replace(job, cluster=job.cluster.of_size(1))
    return step_time(alone.model, Layout(), alone.batch, alone.cluster, job.threads).total_s
