"""How long a step takes, and where its time goes.

A lane is its kernels: products at what the device reaches of its peak, all else at its memory's bandwidth. An exchange
beside a pass costs what it takes longer than that pass, and its last piece. A pipeline's stages wait for one another
(Narayanan et al. 2021, section 2.2), and so do tensor ranks twice in each block's pass. Ranks on fewer cores than they
have threads wait for those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.planning.arithmetic.catalogue import Cluster, Device
from elastic_train.planning.arithmetic.layouts import Batch, Layout, place_elements, rest_parts
from elastic_train.planning.arithmetic.model import ModelFacts, Work
from elastic_train.planning.arithmetic.seating import Seated, seat_of
from elastic_train.planning.arithmetic.traffic import Exchange, exchanges_of, seconds_of, sent_bytes

UPDATE_CALLS = 16
"""Kernels that a CPU's update and norm take for each tensor; GPUs' are fused."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by what they are spent on; `hidden_s` is communication beside computing, and not a part."""

    compute_s: float
    recompute_s: float
    bubble_s: float
    tensor_s: float
    exchange_s: float
    update_s: float
    tables_s: float
    hidden_s: float
    sent_bytes: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.recompute_s + self.bubble_s + self.update_s + self.communication_s

    @property
    def communication_s(self) -> float:
        """Seconds for which devices wait for links."""
        return self.tensor_s + self.exchange_s + self.tables_s

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.total_s


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a lane's passes in the slowest stage of a cell."""

    forward_s: float
    backward_s: float
    again_s: float


def step_time(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster, threads: int = 1) -> StepTime:
    """Return what a step takes on all devices of a cluster."""
    seated = seat_of(model, layout, batch, cluster)
    waits = crowding(cluster, threads)
    passes = passes_of(model, layout, cluster.device, waits)
    exchanges = exchanges_of(model, layout, batch, cluster)
    lane_s = passes.forward_s + passes.backward_s + passes.again_s
    tensor_s = _tensor_s(model, layout, cluster)
    exposed, hidden = _exposed(exchanges, layout, passes, cluster)
    lanes = seated.turns
    return StepTime(
        compute_s=lanes * (passes.forward_s + passes.backward_s),
        recompute_s=lanes * passes.again_s,
        bubble_s=(lane_s + tensor_s) * (layout.pipeline - 1) / layout.interleave,
        tensor_s=lanes * (tensor_s + _pipeline_s(model, layout, cluster)),
        exchange_s=exposed,
        update_s=_update_s(model, layout, seated, cluster.device, waits),
        tables_s=_tables_s(cluster),
        hidden_s=hidden,
        sent_bytes=sent_bytes(exchanges),
    )


def crowding(cluster: Cluster, threads: int) -> float:
    """Return how many times longer ranks compute because their node has fewer cores; 1 for GPUs.

    Of a CPU, `node` devices are the cores of a node.
    """
    return max(1.0, cluster.per_node * threads / max(1, cluster.device.node)) if cluster.device.is_cpu else 1.0


def passes_of(model: ModelFacts, layout: Layout, device: Device, waits: float = 1.0) -> Passes:
    """Return the seconds of a lane's passes in a stage of a cell."""
    split = layout.tensor * layout.expert * layout.context
    rest_split = rest_parts(layout) * layout.expert * layout.context
    blocks, rest = 1 / layout.pipeline, 1.0 if layout.pipeline == 1 else 0.5

    def seconds(which: str) -> float:
        work = [getattr(unit, which) for unit in model.blocks]
        of_blocks = sum((seconds_of_work(one.over(split), device, model.precision) for one in work), 0.0)
        of_rest = seconds_of_work(getattr(model.rest, which).over(rest_split), device, model.precision)
        return waits * (of_blocks * blocks + of_rest * rest)

    forward_s = seconds("forward")
    again_s = 0.0
    if layout.recompute == "units":
        rest_s = waits * rest * seconds_of_work(model.rest.forward.over(rest_split), device, model.precision)
        again_s = forward_s - rest_s
    return Passes(forward_s, seconds("backward"), again_s)


def seconds_of_work(work: Work, device: Device, precision: str) -> float:
    """Return how long kernels take: on a GPU they are launched beside one another, on a CPU one by one."""
    kernels = work.flops / (device.peak_flops(precision) * device.matmul_share) + work.moved_bytes / device.bytes_per_s
    calls = work.calls * device.call_s
    return device.pace * (kernels + calls if device.is_cpu else max(kernels, calls))


def _exposed(exchanges: Sequence[Exchange], layout: Layout, passes: Passes, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of exchanges that nothing hides, and those that a pass does.

    Exchanges beside the same pass share its time, one after the other.
    """
    room = {"forward": passes.forward_s, "backward": passes.backward_s + passes.again_s}
    exposed = hidden = 0.0
    for one in exchanges:
        seconds = seconds_of(one, cluster, layout.cell // layout.context)
        ready = 1 - 1 / one.pieces  # the last piece is there when the pass ends, and each one after its part of it
        beside = ready * min(room[one.beside], seconds) if one.beside else 0.0
        if one.beside:
            room[one.beside] -= beside
        exposed, hidden = exposed + one.times * (seconds - beside), hidden + one.times * beside
    return exposed, hidden


def _tensor_s(model: ModelFacts, layout: Layout, cluster: Cluster) -> float:
    """Return what a lane's ranks of a tensor, expert or context group wait for one another in one stage.

    Each block adds up its output over the tensor group twice in each pass (Shoeybi et al. 2019, section 3), sends its
    tokens to experts and back, and brings together keys and values, which are taken to be as wide as its output.
    """
    if layout.tensor == layout.expert == layout.context == 1:
        return 0.0
    passes = 3 if layout.recompute == "units" else 2
    seconds = 0.0
    link = cluster.inside if layout.tensor * layout.expert * layout.context <= cluster.per_node else cluster.between
    everywhere = [(layout.tensor, 2 * passes, 2.0 / layout.context), (layout.context, passes, 2.0 / layout.tensor)]
    everywhere += [(layout.tensor, 2, 1.0)] if layout.sequence else []  # inputs of column layers, once more
    with_experts = [(layout.expert, 2 * passes, 1.0)]
    for unit in model.blocks:
        for degree, count, factor in everywhere + (with_experts if unit.experts else []):
            if degree > 1:
                sent = factor * unit.output_bytes * (degree - 1) / degree
                seconds += count * (link.alpha_s * math.ceil(math.log2(degree)) + sent / link.bytes_per_s)
    return seconds / layout.pipeline


def _pipeline_s(model: ModelFacts, layout: Layout, cluster: Cluster) -> float:
    """Return what a lane's passes wait for what comes from the stage before, each of them once for every piece.

    Each rank of a tensor group sends all of its block's output, or its own tokens of it; one of a context group sends
    its own tokens only.
    """
    if layout.pipeline == 1:
        return 0.0
    link = cluster.inside if layout.cell <= cluster.per_node else cluster.between
    bytes_per_s = link.bytes_per_s if link is cluster.inside else cluster.between_bytes_per_s
    split = layout.context * (layout.tensor if layout.sequence else 1)
    output = max(unit.output_bytes for unit in model.blocks) / split
    return 2 * layout.interleave * (link.alpha_s + output / bytes_per_s)


def _update_s(model: ModelFacts, layout: Layout, seated: Seated, device: Device, waits: float) -> float:
    """Return the seconds of what only moves memory: sums of lanes, mean, norm, and the optimizer's update."""
    size, trained = model.sizes, place_elements(model, layout, trained=True)
    held = trained if layout.shards == "none" else seated.held_trained
    if layout.shards in ("none", "optimizer"):
        # Every lane's gradient begins with zeros and is added to; those put aside are copied, and added once more.
        sums = seated.lanes * size.gradient * trained + max(0, seated.lanes // 2 - 1) * 5 * size.gradient * trained
        mean = size.gradient * (trained if layout.shards == "none" else held) * 2
    else:
        sums, mean = seated.lanes * seated.group_size * 3 * size.gradient * held, size.gradient * held * 2
    norm = size.gradient * held
    update = (2 * size.weight + size.gradient + 2 * size.state) * held
    calls = UPDATE_CALLS * model.num_tensors * device.call_s if device.is_cpu else 0.0
    seconds = waits * ((sums + mean + norm + update) / device.bytes_per_s + calls)
    if layout.offload == "none":
        return seconds
    moved = held * (size.state + (size.weight if layout.offload == "all" else 0.0))
    return max(seconds, moved / (1e9 * device.bus_gb_per_s))  # both ways at once


def _tables_s(cluster: Cluster) -> float:
    """Return the seconds of a step's two small gathers: the lanes' tables, and the norms."""
    if cluster.size == 1:
        return 0.0
    alpha = cluster.between.alpha_s if cluster.nodes > 1 else cluster.inside.alpha_s
    return 2 * alpha * math.ceil(math.log2(cluster.size))


def model_flops_utilisation(model: ModelFacts, batch: Batch, cluster: Cluster, seconds: float) -> float:
    """Return MFU: the model's own operations a second, of the peak of all devices; what is computed again is none."""
    work = model.flops * batch.num_lanes
    return work / seconds / (cluster.size * cluster.device.peak_flops(model.precision))
