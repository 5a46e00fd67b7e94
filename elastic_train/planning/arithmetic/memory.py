"""What a rank's memory is taken by, part by part, in the trainer's own terms.

Whole gradients are added up lane by lane in a binary counter; shares in counters of their own. A pass keeps its units'
activations; with recomputation a block's input, and one block's activations while that is computed again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.layouts import Batch, Layout, place_elements, rest_parts, rest_share
from elastic_train.planning.arithmetic.model import ModelFacts, Unit
from elastic_train.planning.arithmetic.seating import Seated, seat_of
from elastic_train.program.schedules import Kind, Pipeline, passes_of, peak_lanes

UNCUT_OUTPUTS = 6
"""How many tensors of its output's size a block keeps that tensor ranks do not share out: of two norms the input, what
is left of it before weights, and what they return (`python -m benchmarks.cells --only tp2_kept_ratio`)."""
ROOMS_BYTES = 2 * (32 << 20)
"""Two blocks of what is offloaded are on the device at a time."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device by what takes them; `host_bytes` is what a rank takes of its machine's memory instead."""

    weights: float
    gradients: float
    optimizer: float
    sums: float
    exchange: float
    activations: float
    buffers: float
    staging: float
    host_bytes: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer: what the ZeRO paper calls model states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "host_bytes"}


def memory_of(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster) -> Memory:
    """Return what the rank with the largest share has in memory at the most."""
    seated = seat_of(model, layout, batch, cluster)
    elements, trained = (place_elements(model, layout, trained=only) for only in (False, True))
    sizes = model.sizes
    weights = _weights(model, layout, seated, elements)
    state = sizes.state * (trained if layout.shards == "none" else seated.held_trained)
    staged = (sizes.weight * elements + sizes.state * trained) / layout.summing(cluster.size)
    host = 0.0 if cluster.device.is_cpu else staged
    if layout.offload != "none":
        host, state = host + state, rooms_bytes(model, layout, seated)
    if layout.offload == "all":
        host += weights - (kept := _in_use(model, layout, elements))
        weights = kept
    return Memory(
        weights=weights,
        gradients=_gradients(model, layout, seated, trained),
        optimizer=state,
        sums=_sums(model, layout, seated, trained),
        exchange=_exchange(model, layout, seated, trained, cluster),
        activations=activations(model, layout, batch, cluster),
        buffers=model.buffer_bytes + model.input_bytes,
        staging=staged if cluster.device.is_cpu else 0.0,
        host_bytes=host,
    )


def rooms_bytes(model: ModelFacts, layout: Layout, seated: Seated) -> float:
    """Return the bytes of the rooms in which what is offloaded is updated on the device, block by block."""
    held = seated.held_trained * (model.sizes.state + (model.sizes.weight if layout.offload == "all" else 0.0))
    return min(held, ROOMS_BYTES)


def activations(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return the bytes of the passes that the first stage of a pipeline has under way at most."""
    blocks = sum(_kept(unit, layout) for unit in model.blocks) / layout.pipeline
    kept = blocks * _under_way(layout, batch, cluster)
    again = max((_whole(unit, layout) for unit in model.blocks), default=0.0) if layout.recompute == "units" else 0.0
    rest = (model.rest.saved_bytes + model.transient_bytes) / rest_parts(layout)
    return (kept + again + rest) / layout.context  # ranks with experts have a lane each


def _under_way(layout: Layout, batch: Batch, cluster: Cluster) -> float:
    """Return how many lanes' activations the first stage keeps at most, in whichever cell keeps most of them.

    That is not always one with most lanes: chunks keep least where lanes are a multiple of the stages.
    """
    if layout.pipeline == 1:
        return 1.0
    kind: Kind = "interleaved" if layout.interleave > 1 else layout.schedule
    lanes, replicas = batch.num_lanes, layout.replicas(cluster.size)
    counts = lanes // replicas, -(-lanes // replicas)
    most = max(_peak(Pipeline(kind, layout.pipeline, count, layout.interleave)) for count in counts)
    return most / layout.interleave  # a pass is of one chunk


@functools.lru_cache(256)
def _peak(pipeline: Pipeline) -> int:
    return peak_lanes(passes_of(pipeline, 0))


def _kept(unit: Unit, layout: Layout) -> float:
    """Return what a rank of a tensor group keeps of a block: with recomputation its input alone."""
    if layout.recompute != "units":
        return _whole(unit, layout)
    return min(unit.saved_bytes, unit.output_bytes) / (layout.tensor if layout.sequence else 1)


def _whole(unit: Unit, layout: Layout) -> float:
    """Return what a rank keeps of a block without recomputation: of what goes in and out of what is cut, all tokens,
    or its own."""
    uncut = min(unit.saved_bytes, UNCUT_OUTPUTS * unit.output_bytes)
    return (unit.saved_bytes - uncut) / layout.tensor + uncut / (layout.tensor if layout.sequence else 1)


def _weights(model: ModelFacts, layout: Layout, seated: Seated, elements: float) -> float:
    if layout.shards != "parameters":
        return model.sizes.weight * elements
    # A rank alone holds all of it, and its blocks are made whole beside that all the same.
    return model.sizes.weight * seated.held + _in_use(model, layout, elements)


def _in_use(model: ModelFacts, layout: Layout, elements: float) -> float:
    """Return the bytes of whole weights at a time: the rest of the model and two blocks, or all."""
    if layout.gathers_for_steps:
        return model.sizes.weight * elements
    blocks = min(2, len(model.blocks)) * model.largest_block / layout.tensor
    return model.sizes.weight * min(elements, model.rest.elements * rest_share(layout) + blocks)


def _gradients(model: ModelFacts, layout: Layout, seated: Seated, trained: float) -> float:
    if layout.shards in ("none", "optimizer"):
        return model.sizes.gradient * trained
    return model.sizes.gradient * (seated.held_trained + _leaves(model, layout, trained))


def _leaves(model: ModelFacts, layout: Layout, trained: float) -> float:
    """Return the elements of the leaves that are there at once: two units', the largest ones; all with experts."""
    if layout.expert > 1:
        return trained
    parts = [unit.trained / layout.tensor for unit in model.blocks] + [model.rest.trained * rest_share(layout)]
    return min(trained, sum(sorted(parts)[-2:]))


def _sums(model: ModelFacts, layout: Layout, seated: Seated, trained: float) -> float:
    whole = trained if layout.shards in ("none", "optimizer") else seated.held_trained
    groups = 0.0
    if layout.shards in ("gradients", "parameters"):
        groups = (seated.num_groups - 1) * seated.parts * seated.held_trained  # other groups' sums of this share
    return model.sizes.gradient * (seated.put_aside * whole + groups)


def _exchange(model: ModelFacts, layout: Layout, seated: Seated, trained: float, cluster: Cluster) -> float:
    """Return the bytes that arrive and are not yet added."""
    world = layout.summing(cluster.size)
    if world == 1:
        return 0.0
    size = model.sizes.gradient
    if layout.shards in ("gradients", "parameters"):
        others = (seated.group_size - 1) / seated.group_size
        return size * _leaves(model, layout, trained) * others
    bucket, is_beside = bucket_elements(model, layout, trained, cluster), layout.bucket_mb is not None
    if layout.shards == "none" and world == 2 and seated.parts == 1 and not (is_beside and cluster.device.is_cpu):
        return 0.0  # one all-reduce, which only what is not beside the backward pass may use
    if layout.shards == "none" and world & (world - 1) == 0 and seated.parts == 1 and cluster.device.is_cpu:
        return size * bucket * (1 - 1 / world)
    return size * bucket / world * (world - 1) * seated.parts


def bucket_elements(model: ModelFacts, layout: Layout, trained: float, cluster: Cluster) -> float:
    """Return the elements of what is exchanged at once: a bucket, or all where nothing is beside the pass."""
    if layout.bucket_mb is None or not (cluster.device.is_cpu or layout.overlaps):
        return trained
    least = layout.bucket_mb * (1 << 20) / model.sizes.gradient
    return min(trained, max(least, float(model.largest_tensor) / layout.tensor))
