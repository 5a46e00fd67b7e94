"""A rank's memory by component, in the trainer's own terms.

Memory that varies within a step is counted at its peak, from the program that the trainer executes: gathered weights, a
lane's activations from its forward to its backward pass, and units' gradients until they are sent. Leaves' memory is
reused by units of the same size and kept until the end of a step. Whole gradients are summed lane by lane in a binary
counter; sharded gradients in their own counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Literal, NamedTuple

from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.layouts import Batch, Layout, place_elements, rest_elements, rest_parts
from elastic_train.planning.arithmetic.model import ModelFacts, Sizes, Unit
from elastic_train.planning.arithmetic.seating import Seated, seat_of
from elastic_train.program.schedules import (
    REST,
    Action,
    Begin,
    Close,
    Direction,
    End,
    Enter,
    Exchange,
    Free,
    Kind,
    Open,
    Pass,
    Pipeline,
    UnitAction,
    gathering_turn,
    places,
    reducing_turn,
    step_program,
)

UNCUT_OUTPUTS = 6
"""Number of output-sized tensors per block that tensor parallelism does not shard: the inputs, normalized inputs and
outputs of two norms."""
ROOMS_BYTES = 2 * (32 << 20)
"""Two blocks of offloaded state are on the device at a time."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on a device by component; `host_bytes` is a rank's use of host memory and not part of the total."""

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
        """Weights, gradients and optimizer state: the model states of the ZeRO paper."""
        return self.weights + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "host_bytes"}


def memory_of(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster) -> Memory:
    """Return the peak memory of the rank with the largest share."""
    seated = seat_of(model, layout, batch, cluster)
    elements, trained = (place_elements(model, layout, trained=only) for only in (False, True))
    sizes = model.sizes
    peak, rest = _peak(model, layout, batch, cluster, elements), model.rest.saved_bytes + model.transient_bytes
    weights = sizes.weight * (seated.held if layout.shards == "parameters" else elements) + peak.weights
    state = sizes.state * (trained if layout.shards == "none" else seated.held_trained)
    staged = (sizes.weight * elements + sizes.state * trained) / layout.summing(cluster.size)
    host = 0.0 if cluster.device.is_cpu else staged
    if layout.offload != "none":
        host, state = host + state, rooms_bytes(model, layout, seated)
    if layout.offload == "all":
        host += weights - peak.weights
        weights = peak.weights
    return Memory(
        weights=weights,
        gradients=sizes.gradient * (seated.held_trained if layout.deals else trained) + peak.gradients + peak.leaves,
        optimizer=state,
        sums=_sums(model, layout, seated, trained),
        exchange=_exchange(model, layout, seated, trained, cluster, peak.leaves),
        activations=peak.activations + rest / (rest_parts(layout) * layout.context),
        buffers=model.buffer_bytes + model.input_bytes,
        staging=staged if cluster.device.is_cpu else 0.0,
        host_bytes=host,
    )


def rooms_bytes(model: ModelFacts, layout: Layout, seated: Seated) -> float:
    """Return the bytes of the device buffers in which offloaded state is updated block by block."""
    held = seated.held_trained * (model.sizes.state + (model.sizes.weight if layout.offload == "all" else 0.0))
    return min(held, ROOMS_BYTES)


def _peak(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster, elements: float) -> Held:
    """Return the peak of step-local memory on a first-stage rank, in the replica where it is largest.

    That replica need not have the most lanes: chunks keep least if the lanes are a multiple of the stages.
    """
    lanes, replicas = batch.num_lanes, layout.replicas(cluster.size)
    programs = [_program(model, layout, count, elements) for count in (lanes // replicas, -(-lanes // replicas))]
    return max((peak_of(one).held for one in programs), key=lambda held: held.total)


def _program(model: ModelFacts, layout: Layout, num_lanes: int, elements: float) -> RankProgram:
    """Return the first stage's program for a step, with only as many microsteps as the peak needs."""
    kind: Kind = "interleaved" if layout.interleave > 1 else layout.schedule
    if layout.pipeline == 1 or kind == "1f1b":
        kind, num_lanes = "1f1b", min(num_lanes, layout.pipeline + 1)
    blocks = [_block_bytes(unit, model.sizes, layout) for unit in model.blocks]
    num_chunks = layout.interleave if layout.pipeline > 1 else 1
    if layout.pipeline > 1:
        blocks = [_alike(blocks)] * math.ceil(len(blocks) / layout.pipeline / num_chunks)
    whole = elements if layout.gathers_for_steps else rest_elements(model, layout, trained=False)
    trained = rest_elements(model, layout, trained=True) if layout.deals else 0.0
    rest = UnitBytes(model.sizes.weight * whole / num_chunks, model.sizes.gradient * trained / num_chunks)
    return RankProgram(
        Pipeline(kind, layout.pipeline, num_lanes, num_chunks),
        0,
        num_lanes,
        (tuple(blocks),) * num_chunks,
        rest,
        gathers="step" if layout.gathers_for_steps else "turn" if layout.shards == "parameters" else "never",
        reduces="never" if not layout.deals else "after" if layout.expert > 1 else "beside",
    )


def _block_bytes(unit: Unit, sizes: Sizes, layout: Layout) -> UnitBytes:
    """Return the bytes of a block on a tensor rank; with sequence parallelism each rank keeps part of the rows."""
    own = (unit.trained - unit.trained_experts + unit.trained_experts / layout.expert) / layout.tensor
    return UnitBytes(
        0.0 if layout.gathers_for_steps else sizes.weight * unit.elements / layout.tensor,
        sizes.gradient * own if layout.deals else 0.0,
        _kept(unit, layout) / layout.context,
        _whole(unit, layout) / layout.context if layout.recompute == "units" else 0.0,
    )


def _alike(blocks: Sequence[UnitBytes]) -> UnitBytes:
    """Return one block that represents all, as any may be in the largest stage. Its activations are the mean."""
    most = UnitBytes(*(max(getattr(one, name.name) for one in blocks) for name in fields(UnitBytes)))
    return replace(most, kept=sum(one.kept for one in blocks) / len(blocks))


def _kept(unit: Unit, layout: Layout) -> float:
    """Return the bytes that a tensor rank keeps of a block; with recomputation only its input."""
    if layout.recompute != "units":
        return _whole(unit, layout)
    return min(unit.saved_bytes, unit.output_bytes) / (layout.tensor if layout.sequence else 1)


def _whole(unit: Unit, layout: Layout) -> float:
    """Return the bytes that a rank keeps of a block without recomputation.

    The inputs and outputs of sharded layers count for all tokens, or only for the rank's own with sequence parallelism.
    """
    uncut = min(unit.saved_bytes, UNCUT_OUTPUTS * unit.output_bytes)
    return (unit.saved_bytes - uncut) / layout.tensor + uncut / (layout.tensor if layout.sequence else 1)


def _sums(model: ModelFacts, layout: Layout, seated: Seated, trained: float) -> float:
    whole = seated.held_trained if layout.deals else trained
    groups = 0.0
    if layout.deals:
        groups = (seated.num_groups - 1) * seated.parts * seated.held_trained  # other groups' sums of this shard
    return model.sizes.gradient * (seated.put_aside * whole + groups)


def _exchange(
    model: ModelFacts, layout: Layout, seated: Seated, trained: float, cluster: Cluster, leaves: float
) -> float:
    """Return the bytes received but not yet added; other ranks' leaves count as many bytes as this rank's."""
    world = layout.summing(cluster.size)
    if world == 1:
        return 0.0
    size = model.sizes.gradient
    if layout.deals:
        return leaves * (seated.group_size - 1) / seated.group_size
    bucket = bucket_elements(model, layout, trained, cluster)
    is_beside = layout.bucket_bytes(on_cpu=cluster.device.is_cpu) is not None
    if layout.shards == "none" and world == 2 and seated.parts == 1 and not is_beside:
        return 0.0  # one all-reduce, used only without overlap with the backward pass
    if layout.shards == "none" and world & (world - 1) == 0 and seated.parts == 1 and cluster.device.is_cpu:
        return size * bucket * (1 - 1 / world)
    return size * bucket / world * (world - 1) * seated.parts


def bucket_elements(model: ModelFacts, layout: Layout, trained: float, cluster: Cluster) -> float:
    """Return the elements exchanged at once: a bucket, or all of them without overlap."""
    least_bytes = layout.bucket_bytes(on_cpu=cluster.device.is_cpu)
    if least_bytes is None:
        return trained
    least = least_bytes / model.sizes.gradient
    return min(trained, max(least, float(model.largest_tensor) / layout.tensor))


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of a unit: its whole weights, if gathered, and its gradients, if reduced unit by unit.

    A forward pass keeps `kept` until its backward pass; each pass needs `again` more while it is in the unit.
    """

    weights: float = 0.0
    gradient: float = 0.0
    kept: float = 0.0
    again: float = 0.0


class Held(NamedTuple):
    """Bytes held at a moment; `leaves` are gradients in transit, and memory kept for the next ones."""

    weights: float = 0.0
    gradients: float = 0.0
    leaves: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: Held) -> Held:
        """Return the sum of both."""
        return Held(*map(add, self, other))


class Peak(NamedTuple):
    """The maximum held, and the action, and unit action within it, that reaches it first."""

    held: Held
    at: tuple[Action, UnitAction | None] | None


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's step; `chunks` has the blocks of each chunk of its stage, equally many, and `rest` the rest of each.

    It has `num_lanes` lanes, possibly fewer than turns. Units are gathered per turn or per step, and gradients are sent
    during or after the backward pass.
    """

    pipeline: Pipeline
    stage: int
    num_lanes: int
    chunks: tuple[tuple[UnitBytes, ...], ...]
    rest: UnitBytes = UnitBytes()
    gathers: Literal["never", "turn", "step"] = "never"
    reduces: Literal["never", "beside", "after"] = "never"

    @property
    def num_blocks(self) -> int:
        return len(self.chunks[0])

    def unit(self, chunk: int, unit: int) -> UnitBytes:
        """Return the bytes of a unit by its number."""
        return self.rest if unit == REST else self.chunks[chunk][unit]

    def turn(self, leaf: Open) -> tuple[UnitAction, ...]:
        """Return the unit actions of a turn."""
        is_first = leaf.number == 0
        if self.gathers == "turn":
            reduces = self.reduces == "beside"
            return gathering_turn(self.num_blocks, has_rest=not is_first, trains=True, reduces=reduces)
        reduced = () if self.reduces == "never" else reducing_turn(self.num_blocks + 1, is_first=is_first)
        return (Enter("backward", REST), *reduced) if self.reduces == "after" else reduced


@lru_cache(1024)
def peak_of(program: RankProgram) -> Peak:
    """Return the peak memory of a rank's program in a step."""
    units = chain(*((program.rest, *blocks) for blocks in program.chunks)) if program.gathers == "step" else ()
    held = Held(sum(unit.weights for unit in units))
    peak, waiting, known = Peak(held, None), _Waiting(), dict[tuple[int, int, _Waiting], _Effect]()
    for action, done in by_unit(step_program(program.pipeline, program.stage), program.num_blocks, program.turn):
        if isinstance(action, Exchange) or action.number >= program.num_lanes:
            continue
        key = action.chunk, id(done), waiting
        effect = known.get(key) or known.setdefault(key, _effect_of(program, action.chunk, done, waiting))
        if held.total + effect.most.total > peak.held.total:
            peak = Peak(held.plus(effect.most), (action, effect.at))
        held, waiting = held.plus(effect.after), effect.waiting
    return peak


_Waiting = tuple[float, ...]
"""Sizes of leaves kept for the next units, ascending."""


class _Effect(NamedTuple):
    """Change in held memory by an action: at its end, and at its peak, with the unit action of the peak."""

    after: Held
    most: Held
    at: UnitAction | None
    waiting: _Waiting


def _effect_of(program: RankProgram, chunk: int, actions: Sequence[UnitAction], waiting: _Waiting) -> _Effect:
    now, most, at, sizes = Held(), Held(), None, list(waiting)
    for action in actions:
        unit, ends = program.unit(chunk, action.unit), Held()
        match action:
            case Begin("gather"):
                now = now.plus(Held(weights=unit.weights))
            case Free():
                ends = Held(weights=-unit.weights)
            case Begin():  # a leaf is made of the gradients, which are dropped
                if unit.gradient in sizes:
                    sizes.remove(unit.gradient)
                else:
                    now = now.plus(Held(leaves=unit.gradient))
                ends = Held(gradients=-unit.gradient)
            case End("reduce"):
                sizes.append(unit.gradient)
            case Enter("forward"):
                now, ends = now.plus(Held(activations=unit.kept + unit.again)), Held(activations=-unit.again)
            case Enter():
                now = now.plus(Held(gradients=unit.gradient, activations=unit.again))
                ends = Held(activations=-unit.kept - unit.again)
        if now.total > most.total:
            most, at = now, action
        now = now.plus(ends)
    return _Effect(now, most, at, tuple(sorted(sizes)))


def by_unit(
    actions: Iterable[Action], num_blocks: int, turn_of: Callable[[Open], tuple[UnitAction, ...]]
) -> Iterator[tuple[Action, tuple[UnitAction, ...]]]:
    """Yield each action of a step with its unit actions; equal ones share one tuple.

    Each chunk has `num_blocks` blocks; a pass reaches all of them. `turn_of` returns the unit actions of a leaf. A
    forward pass reaches the rest of the model first, a backward pass last. A unit's gradients are sent once the
    backward pass has left it.
    """
    known = dict[tuple[Direction | None, int, int], tuple[tuple[UnitAction, ...], int]]()
    turn: tuple[UnitAction, ...] = ()
    turns, at = {id(turn): turn}, 0
    for action in actions:
        done: tuple[UnitAction, ...] = ()
        if isinstance(action, Open):
            turn, at = turn_of(action), 0
            turns[id(turn)] = turn  # keeps the tuple alive, so that its id is not reused
        elif isinstance(action, Pass | Close):
            key = action.direction if isinstance(action, Pass) else None, id(turn), at
            if key not in known:
                known[key] = (turn[at:], len(turn)) if key[0] is None else _in_pass(key[0], num_blocks, turn, at)
            done, at = known[key]
            turn, at = ((), 0) if isinstance(action, Close) else (turn, at)
        yield action, done


def _in_pass(
    direction: Direction, num_blocks: int, turn: tuple[UnitAction, ...], at: int
) -> tuple[tuple[UnitAction, ...], int]:
    """Return a pass's unit actions, from action `at` of the turn on, and the index after them."""
    done, listed, units = list[UnitAction](), places(turn), [REST, *range(num_blocks)]
    for unit in units if direction == "forward" else units[::-1]:
        enter = Enter(direction, unit)
        while at < len(turn) and (turn[at] != enter if enter in listed else _has_left(enter, turn[at])):
            done.append(turn[at])
            at += 1
        at += enter in listed
        done.append(enter)
    return tuple(done), at


def _has_left(enter: Enter, due: UnitAction) -> bool:
    """Return True if a pass that enters a unit has left the one whose gradients are due; then it also waits for those
    on their way."""
    has_left = isinstance(due, End) or (isinstance(due, Begin) and due.unit > enter.unit)
    return enter.direction == "backward" and has_left
