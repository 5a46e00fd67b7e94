"""A stage's chunks compute lanes in their own turns, with the sums of whole lanes; summands' memory is reused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from elastic_train.core.lanes import contiguous
from elastic_train.parallel.buckets import BufferPool
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import Pipeline, passes_of
from tests.elastic_train.parallel.sums import make_gradient_sum
from tests.memory_machine import in_memory
from tests.memory_world import group_of

LANES = 7


def make_chunks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)) for _ in range(3)]


def add(chunk: nn.Module, lane: int) -> None:
    chunk(torch.randn(4, 3, generator=torch.Generator().manual_seed(lane))).square().sum().backward()


def gradients_of(chunks: list[nn.Module]) -> list[list[float]]:
    return [one.grad.flatten().tolist() for chunk in chunks for one in chunk.parameters() if one.grad is not None]


def of_chunks(
    chunks: Sequence[nn.Module], group: Group, bucket_bytes: float | None, kind: Reduction = "canonical"
) -> TreeSum:
    lanes = contiguous(group.size, LANES)
    return TreeSum([tree_of(kind, list(chunk.parameters()), group, lanes) for chunk in chunks], bucket_bytes)


def whole() -> list[list[float]]:
    """Run each lane through all chunks before the next one, on one rank."""
    chunks = make_chunks()
    parameters = [one for chunk in chunks for one in chunk.parameters()]
    total = make_gradient_sum("canonical", parameters, Group(0, 1, None, 60), LANES)
    total.begin()
    for lane in range(LANES):
        with total.turn(lane):
            for chunk in chunks:
                add(chunk, lane)
    total.finish(3.0)
    return gradients_of(chunks)


def in_chunks(group: Group, bucket_bytes: float | None) -> list[list[float]]:
    """Run this rank's lanes as the first of two stages does; before that, abandon a step midway."""
    chunks = make_chunks()
    total, lanes = of_chunks(chunks, group, bucket_bytes), contiguous(group.size, LANES)[group.rank]
    passes = passes_of(Pipeline("interleaved", 2, len(lanes), 3), 0)
    for _ in range(2):
        total.begin()
        for one in passes:
            if one.direction == "backward":
                with total.turn(lanes[one.number], one.chunk):
                    add(chunks[one.chunk], lanes[one.number])
    total.finish(3.0)
    found = gradients_of(chunks)
    total.close()
    return found


def ranks(rank: int, size: int) -> list[list[list[float]]]:
    group = group_of("world", rank, size)
    return [in_chunks(group, least) for least in (None, 1, 1 << 20)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_add_up_to_what_whole_lanes_do(size: int) -> None:
    """Buckets hold one parameter, all, or are off; some ranks have one lane more."""
    assert in_memory(ranks, size) == [[whole()] * 3] * size


def in_any_order(rank: int, size: int) -> list[list[float]]:
    chunks, group = make_chunks(), group_of("world", rank, size)
    total = of_chunks(chunks, group, 1, "fast")
    total.begin()
    for lane in contiguous(size, LANES)[rank]:
        for number, chunk in enumerate(chunks):
            with total.turn(lane, number):
                add(chunk, lane)
    assert [part for part, _ in total.tensors()] == ["gradients"] * len(chunks), "nothing is put aside"
    total.finish(3.0)
    found = gradients_of(chunks)
    total.close()
    return found


def test_a_sum_in_any_order_is_that_of_the_tree_but_for_rounding() -> None:
    """It exchanges nothing during a pass, whatever the bucket size; ranks have unequal numbers of lanes."""
    for found in in_memory(in_any_order, 3):
        assert found is not None
        for one, expected in zip(found, whole(), strict=True):
            assert one == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_memory_is_used_again_for_what_fits_into_it() -> None:
    spare = BufferPool(2)
    first = spare.take(torch.empty(8), torch.float32)
    spare.give_back(first)
    smaller = spare.take(torch.empty(5), torch.float32)
    assert smaller.data_ptr() == first.data_ptr() and smaller.shape == (5,)
    spare.give_back(smaller)  # all of it can be kept
    assert spare.take(torch.empty(8), torch.float32).data_ptr() == first.data_ptr()


def test_memory_of_another_kind_or_size_is_fresh() -> None:
    spare = BufferPool(2)
    kept = [torch.empty(8), torch.empty(8, dtype=torch.float64), torch.empty(64)]
    for memory in kept:
        spare.give_back(memory)
    assert spare.take(torch.empty(64), torch.float32).data_ptr() != kept[2].data_ptr(), "two are kept"
    assert spare.take(torch.empty(8), torch.float64).data_ptr() == kept[1].data_ptr()
    spare.clear()
    assert spare.take(torch.empty(8), torch.float32).data_ptr() != kept[0].data_ptr()
