"""The traffic of a step: bytes and rounds of each exchange of a replica, and their duration on a cluster's links.

Uses the alpha-beta model (Hockney 1994): a round costs alpha plus the transfer time of its bytes. Links carry both
directions at once. In an exchange with all others, the share of remote ranks leaves the node; recursive halving
exchanges within the node first, so less of it leaves the node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.layouts import Batch, Layout, place_elements, rest_share
from elastic_train.planning.arithmetic.memory import bucket_elements
from elastic_train.planning.arithmetic.model import ModelFacts
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
    """Return a replica's exchanges of gradients and weights in a step; empty for a single replica."""
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
        whole = model.sizes.weight * place_elements(model, layout, trained=False) * others
        return [*found, Exchange("weights", whole, 1, ranks=group)]
    rest = model.rest.elements * rest_share(layout)
    blocks = place_elements(model, layout, trained=False) - rest
    last = model.largest_block / layout.tensor
    weight = model.sizes.weight * others
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
    """Return the bytes that a rank sends in a step."""
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
