"""A plan computes what training holds and sends, compared with its own seats, trees and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from elastic_train.core.lanes import contiguous
from elastic_train.parallel.gradient_sum import LaneTree
from elastic_train.placement.grains import Listed, lay_out
from elastic_train.placement.holdings import circle_of, num_elements
from elastic_train.placement.seating import Seating
from elastic_train.placement.seats import seats_of
from elastic_train.planning.arithmetic.catalogue import parse_cluster
from elastic_train.planning.arithmetic.layouts import Batch, Layout, Shards
from elastic_train.planning.arithmetic.memory import memory_of
from elastic_train.planning.arithmetic.model import ModelFacts, Unit, Work
from elastic_train.planning.arithmetic.seating import _replicated, seat_of
from elastic_train.planning.arithmetic.step_time import exchanges_of, sent_bytes
from tests.elastic_train.parallel.sums import make_gradient_sum
from tests.elastic_train.placement.laws import num_sent
from tests.memory_machine import in_memory
from tests.memory_world import group_of

CUT = lay_out(
    [
        Listed("embed", (3000, 256), "torch.float32"),
        *(Listed(f"blocks.{n}.w", (700, 256), "torch.float32", unit=f"blocks.{n}") for n in range(4)),
    ]
)
BATCH = Batch(12, 2)
ELEMENTS = 3 << 16
"""More than a bucket has at the least."""


def facts() -> ModelFacts:
    def unit(name: str) -> Unit:
        size = sum(flat.numel for flat in CUT.flats if flat.unit == name)
        return Unit(name, size, size, Work(1e9, 1e6, 10), Work(2e9, 2e6, 20), 1e6, 1e5)

    blocks = tuple(unit(f"blocks.{number}") for number in range(4))
    return ModelFacts("four blocks", blocks, unit(""), 2, cut=CUT, largest_tensor=3000 * 256)


def seating(world: int, copies: int) -> Seating:
    return Seating(CUT, circle_of(CUT), seats_of([("node-0",)] * world, copies), 0)


@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (5, 2), (8, 1)])
def test_the_largest_share_is_that_of_the_seats(world: int, copies: int) -> None:
    layout = Layout("optimizer", copies)
    seated = seat_of(facts(), layout, BATCH, parse_cluster(f"{world}xCPU"))
    holdings = seating(world, copies).holdings
    assert seated.held == pytest.approx(max(num_elements(CUT, one) for one in holdings))


@pytest.mark.parametrize("num_lanes", [1, 2, 5, 8, 12, 13])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_put_aside_are_those_of_the_tree(num_lanes: int, world: int) -> None:
    if world > num_lanes:
        return
    assigned = contiguous(world, num_lanes)
    for rank, lanes in enumerate(assigned):
        tree, most = LaneTree([torch.zeros(1)], rank, assigned), 0
        tree.begin()
        for lane in lanes:
            with tree.adding(lane):
                most = max(most, len(tree._stack))
        assert _replicated(lanes, Batch(num_lanes, 1))[0] == most


@pytest.mark.parametrize(("world", "copies"), [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
def test_dealt_gradients_send_what_their_chunks_say(world: int, copies: int) -> None:
    seats = seating(world, copies)
    sent = [num_sent(rank, seats.seats, seats.holdings, CUT.span, BATCH.num_lanes) for rank in range(world)]
    exchanges = exchanges_of(facts(), Layout("gradients", copies), BATCH, parse_cluster(f"{world}xCPU"))
    planned = {one.what: one.num_bytes * one.times / 4 for one in exchanges}
    assert planned["leaves"] == pytest.approx(sum(leaves for leaves, _ in sent) / world, rel=0.01)
    assert planned["sums of groups"] == pytest.approx(max(sums for _, sums in sent), rel=0.01)


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("shards", ["none", "optimizer"])
def test_whole_gradients_send_an_all_reduces_volume_whatever_the_copies(shards: Shards, copies: int) -> None:
    """A rank sends (W - 1) / W to owners, (R - 1) / W to holders, (S - 1) / S of the weights in the group in all."""
    model, world = facts(), 4
    batch = Batch(world, 1)
    exchanges = exchanges_of(model, Layout(shards, copies), batch, parse_cluster(f"{world}xCPU"))
    total = sum(one.num_bytes for one in exchanges if one.what != "weights")
    size = world // copies
    given = 4 * model.trained * (size - 1) / size
    expected = 2 * (world - 1) / world if shards == "none" else (world - 1 + copies - 1) / world
    assert total == pytest.approx(4 * model.trained * expected)
    assert sent_bytes(exchanges) == pytest.approx(total + (given if shards == "optimizer" else 0))


def test_more_in_shards_takes_less_but_for_what_is_whole_for_a_moment() -> None:
    model, cluster = facts(), parse_cluster("8xCPU")
    model = replace(model, blocks=8 * model.blocks, cut=None)
    batch = Batch(16, 1)
    states = [memory_of(model, Layout(shards), batch, cluster) for shards in ("none", "optimizer", "gradients")]
    assert states[0].optimizer > 7 * states[1].optimizer
    assert states[1].gradients > states[2].gradients
    assert states[2].optimizer == states[1].optimizer


def test_recomputation_keeps_the_blocks_inputs_and_one_block() -> None:
    model, cluster = facts(), parse_cluster("CPU")
    kept, again = (memory_of(model, Layout(recompute=how), BATCH, cluster).activations for how in ("none", "units"))
    assert (kept, again) == (4e6 + 1e6, 4e5 + 1e6 + 1e6)


def test_a_rank_that_is_not_seated_evenly_has_the_smallest_groups_share() -> None:
    """Five ranks in two copies are groups of three and two."""
    seated = seat_of(replace(facts(), cut=None), Layout("gradients", 2), BATCH, parse_cluster("5xCPU"))
    assert seated.held == pytest.approx(facts().elements / 2)


def kept_for_arrivals(rank: int, size: int, bucket_bytes: float | None) -> int:
    """Add up gradients of some bucket's size once; return the memory that is kept for what arrives."""
    group = group_of("world", rank, size)
    weights = [nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(2)]
    total = make_gradient_sum("canonical", weights, group, size, bucket_bytes)
    total.begin()
    with total.turn(rank):
        torch.stack(weights).sum().backward()
    total.finish(1.0)
    kept = sum(tensor.nbytes for part, tensor in total.tensors() if part == "exchange")
    total.close()
    return kept


@pytest.mark.parametrize("bucket_mb", [None, 0.5])
def test_two_ranks_need_memory_for_what_arrives_beside_the_pass_alone(bucket_mb: float | None) -> None:
    """Half of a bucket; after the pass one all-reduce needs none."""
    bucket_bytes = None if bucket_mb is None else bucket_mb * (1 << 20)
    model = replace(facts(), largest_tensor=ELEMENTS)
    planned = memory_of(model, Layout(bucket_mb=bucket_mb), Batch(4, 2), parse_cluster("2xCPU")).exchange
    assert planned == (0.0 if bucket_mb is None else 4 * ELEMENTS / 2)
    assert in_memory(kept_for_arrivals, 2, bucket_bytes) == [planned] * 2


def test_ranks_of_a_cell_on_gpus_exchange_gradients_after_the_pass() -> None:
    """Two replicas add them by one all-reduce, which needs no memory; on CPUs they are exchanged beside the pass."""
    model = replace(facts(), largest_tensor=ELEMENTS)
    planned = [
        memory_of(model, Layout(tensor=2, bucket_mb=0.5), Batch(4, 2), parse_cluster(cluster)).exchange
        for cluster in ("4xCPU", "4xH100")
    ]
    assert planned[0] > planned[1] == 0.0
