"""The duration of a step and its components.

A lane's time is that of its kernels: matrix products at the device's achieved share of peak, all others at memory
bandwidth. An exchange that overlaps a pass costs the excess over that pass, plus its last piece. Pipeline stages wait
for one another (Narayanan et al. 2021, section 2.2), as do tensor ranks, twice per block and pass. Ranks on fewer cores
than they have threads wait for cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.config.combinations import refused
from elastic_train.planning.arithmetic.catalogue import Cluster, Device
from elastic_train.planning.arithmetic.layouts import (
    Batch,
    Layout,
    place_elements,
    rest_elements,
    rest_parts,
    stage_share,
)
from elastic_train.planning.arithmetic.memory import bucket_elements
from elastic_train.planning.arithmetic.model import ModelFacts, Work
from elastic_train.planning.arithmetic.seating import Seated, seat_of


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange: a rank sends these bytes in `rounds` rounds among `ranks` ranks, `times` times a step.

    If `beside` names a pass, the exchange overlaps it in `pieces` pieces. `is_halving`: recursive halving and doubling.
    """

    what: str
    num_bytes: float
    rounds: int = 1
    beside: str = ""
    times: int = 1
    pieces: int = 1
    is_halving: bool = False
    ranks: int = 0


def exchanges_of(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster) -> list[Exchange]:
    """Return a replica's exchanges of gradients and weights in a step; empty for a single replica.

    Uses the alpha-beta model (Hockney 1994): a round costs alpha plus the transfer time of its bytes. Links carry
    both directions at once. In an exchange with all others, the share of remote ranks leaves the node; recursive
    halving exchanges within the node first, so less of it leaves the node.
    """
    seated = seat_of(model, layout, batch, cluster)
    if layout.summing(cluster.size) == 1:
        return []
    trained = place_elements(model, layout, trained=True)
    if layout.shards in ("none", "optimizer"):
        return _whole(model, layout, seated, trained, cluster)
    return _dealt(model, layout, seated, trained)


def _whole(model: ModelFacts, layout: Layout, seated: Seated, trained: float, cluster: Cluster) -> list[Exchange]:
    world, size = layout.summing(cluster.size), model.sizes.gradient
    pieces = max(1, round(trained / bucket_elements(model, layout, trained, cluster)))
    beside = "backward" if pieces > 1 else ""
    part = size * trained * (world - 1) / world
    is_halving = layout.shards == "none" and world & (world - 1) == 0 and seated.parts == 1 and cluster.device.is_cpu
    if layout.shards == "none":
        rounds = 2 * int(math.log2(world)) if is_halving and world > 2 else 2
        sent = part * 2 if is_halving else part * (seated.parts + 1)
        return [Exchange("gradients", sent, rounds * pieces, beside, pieces=pieces, is_halving=is_halving, ranks=world)]
    given = size * trained * (seated.num_groups - 1) / world
    weights = model.sizes.weight * trained * (seated.group_size - 1) / seated.group_size
    return [
        Exchange("gradients to owners", part * seated.parts, pieces, beside, pieces=pieces, ranks=world),
        Exchange("sums to holders", given, 1, ranks=world),
        Exchange("weights", weights, 1, ranks=seated.group_size),
    ]


def _dealt(model: ModelFacts, layout: Layout, seated: Seated, trained: float) -> list[Exchange]:
    size, group = model.sizes.gradient, seated.group_size
    others, units = (group - 1) / group, max(1, len(model.blocks) + 1)
    wire = min(size, 2.0) if layout.wire == "bf16" else size
    gathered = min(wire, model.sizes.weight) if model.precision in ("bf16", "fp8") else model.sizes.weight
    weight = gathered * others
    found = [
        Exchange("leaves", wire * trained * others, units, "backward", seated.turns, units, ranks=group),
        Exchange(
            "sums of groups", size * seated.held_trained * (seated.num_groups - 1) * seated.parts, 1,
            ranks=seated.num_groups,
        ),
    ]  # fmt: skip
    if layout.shards == "gradients":
        return [*found, Exchange("weights", model.sizes.weight * trained * others, 1, ranks=group)]
    if layout.gathers_for_steps:
        whole = weight * place_elements(model, layout, trained=False)
        return [*found, Exchange("weights", whole, 1, ranks=group)]
    rest = rest_elements(model, layout, trained=False)
    blocks = place_elements(model, layout, trained=False) - rest
    last = model.largest_block / layout.tensor
    count = max(1, len(model.blocks))
    return [
        *found,
        Exchange("rest of the weights", weight * rest, 1, ranks=group),
        Exchange("weights for forward", weight * blocks, count, "forward", seated.turns, count, ranks=group),
        Exchange(
            "weights for backward", weight * max(0.0, blocks - last), count, "backward", seated.turns, count,
            ranks=group,
        ),
    ]  # fmt: skip


def sent_bytes(exchanges: Sequence[Exchange]) -> float:
    return sum(one.num_bytes * one.times for one in exchanges)


def seconds_of(exchange: Exchange, cluster: Cluster, cell: int = 1) -> float:
    """Return the seconds of one execution of an exchange that has the links to itself."""
    within = max(1, cluster.per_node // cell)
    ranks, is_across = exchange.ranks, exchange.ranks > within
    alpha = (cluster.between if is_across else cluster.inside).alpha_s
    inside, between = cluster.inside.bytes_per_s, cluster.between_bytes_per_s
    if not is_across:
        return exchange.rounds * alpha + exchange.num_bytes / inside
    if exchange.is_halving:
        out = (1 / within - 1 / ranks) / (1 - 1 / ranks)
        return exchange.rounds * alpha + exchange.num_bytes * ((1 - out) / inside + out / between)
    out = (ranks - within) / max(1, ranks - 1)
    return exchange.rounds * alpha + max(exchange.num_bytes * out / between, exchange.num_bytes * (1 - out) / inside)


UPDATE_CALLS = 16
"""Kernels per tensor in a CPU's update and norm; GPUs' are fused."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by component; `hidden_s` is overlapped communication and not part of the total."""

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
        """Seconds that devices wait for links."""
        return self.tensor_s + self.exchange_s + self.tables_s

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.total_s


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a lane's passes in the slowest stage."""

    forward_s: float
    backward_s: float
    again_s: float


def step_time(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster, threads: int = 1) -> StepTime:
    """Return the duration of a step on all devices of a cluster."""
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
    """Return the slowdown of ranks that share too few cores of their node; 1 for GPUs.

    For a CPU, `node` devices are the cores of a node.
    """
    return max(1.0, cluster.per_node * threads / max(1, cluster.device.node)) if cluster.device.is_cpu else 1.0


def passes_of(model: ModelFacts, layout: Layout, device: Device, waits: float = 1.0) -> Passes:
    """Return the seconds of a lane's passes in one stage."""
    split = layout.tensor * layout.expert * layout.context
    rest_split = rest_parts(layout) * layout.expert * layout.context
    blocks, rest = stage_share(model, layout), 1.0 if layout.pipeline == 1 else 0.5

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
    """Return the seconds of kernels: calls overlap execution on a GPU and add to it on a CPU."""
    products = (work.flops - work.float8_flops) / device.peak_flops(precision)
    if work.float8_flops:
        if not device.tflops_fp8:
            raise refused("no float8 kernel", f"--on {device.name}, which has no tflops_fp8")
        products += work.float8_flops / (1e12 * device.tflops_fp8)
    kernels = products / device.matmul_share + work.moved_bytes / device.bytes_per_s
    calls = work.calls * device.call_s
    return device.pace * (kernels + calls if device.is_cpu else max(kernels, calls))


def _exposed(exchanges: Sequence[Exchange], layout: Layout, passes: Passes, cluster: Cluster) -> tuple[float, float]:
    """Return the exposed and the overlapped seconds of exchanges.

    Exchanges that overlap the same pass share its time, one after the other.
    """
    room = {"forward": passes.forward_s, "backward": passes.backward_s + passes.again_s}
    exposed = hidden = 0.0
    for one in exchanges:
        seconds = seconds_of(one, cluster, layout.cell // layout.context)
        ready = 1 - 1 / one.pieces  # each piece is ready after its part of the pass, the last one at its end
        beside = ready * min(room[one.beside], seconds) if one.beside else 0.0
        if one.beside:
            room[one.beside] -= beside
        exposed, hidden = exposed + one.times * (seconds - beside), hidden + one.times * beside
    return exposed, hidden


def _tensor_s(model: ModelFacts, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds that a lane's ranks of a tensor, expert or context group wait for one another in one stage.

    Each block sums its output over the tensor group twice per pass (Shoeybi et al. 2019, section 3), sends its tokens
    to experts and back, and gathers keys and values, which are assumed to be as wide as its output.
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
    return seconds * stage_share(model, layout)


def _pipeline_s(model: ModelFacts, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds that a lane's passes wait for the previous stage, each of them once per piece.

    Each rank of a tensor group sends its block's whole output, or only its own tokens with sequence parallelism; a
    context rank sends only its own tokens.
    """
    if layout.pipeline == 1:
        return 0.0
    link = cluster.inside if layout.cell <= cluster.per_node else cluster.between
    bytes_per_s = link.bytes_per_s if link is cluster.inside else cluster.between_bytes_per_s
    split = layout.context * (layout.tensor if layout.sequence else 1)
    output = max(unit.output_bytes for unit in model.blocks) / split
    return 2 * layout.interleave * (link.alpha_s + output / bytes_per_s)


def _update_s(model: ModelFacts, layout: Layout, seated: Seated, device: Device, waits: float) -> float:
    """Return the seconds of memory-bound work: sums of lanes, mean, norm and the optimizer's update."""
    size, trained = model.sizes, place_elements(model, layout, trained=True)
    held = trained if layout.shards == "none" else seated.held_trained
    if layout.shards in ("none", "optimizer"):
        # Every lane's gradient starts from zeros and is added to; gradients put aside are copied, and added once more.
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
    return max(seconds, moved / (1e9 * device.bus_gb_per_s))  # both directions at once


def _tables_s(cluster: Cluster) -> float:
    """Return the seconds of a step's two small gathers: the lanes' tables and the norms."""
    if cluster.size == 1:
        return 0.0
    alpha = cluster.between.alpha_s if cluster.nodes > 1 else cluster.inside.alpha_s
    return 2 * alpha * math.ceil(math.log2(cluster.size))


def model_flops_utilisation(model: ModelFacts, batch: Batch, cluster: Cluster, seconds: float) -> float:
    """Return MFU: the model's FLOP/s as a fraction of all devices' peak; recomputation does not count."""
    work = model.flops * batch.num_lanes
    return work / seconds / (cluster.size * cluster.device.peak_flops(model.precision))
