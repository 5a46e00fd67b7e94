"""The in-memory world for tests of combinations behaves like gloo groups, but every run is the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from elastic_train.errors import PeerLostError
from elastic_train.parallel.point_to_point import Aside
from rendezvous.waiting import begin
from tests.memory_machine import DeadlockError, in_memory
from tests.memory_world import group_of

SIZE = 3


def collectives(rank: int, size: int) -> list[object]:
    group = group_of("world", rank, size)
    total = torch.full((2,), float(rank))
    group.all_reduce(total)
    gathered = group.all_gather(torch.tensor([rank, -rank]))
    others = group.part("others", [1, 2]) if rank else None
    part = others.all_gather_objects(rank) if others else None
    root = torch.tensor([float(rank)])
    group.broadcast(root, source=2)
    group.close()
    return [total.tolist(), gathered.tolist(), part, root.item()]


def test_collectives_give_what_gloo_does() -> None:
    seen = in_memory(collectives, SIZE)
    gathered = [[0, 0], [1, -1], [2, -2]]
    assert seen == [[[3.0, 3.0], gathered, [1, 2] if rank else None, 2.0] for rank in range(SIZE)]


def swap(rank: int, size: int) -> float:
    """Send to the other rank before receiving: nothing is buffered, so waiting for the send would hang."""
    group, received = group_of("world", rank, size), torch.zeros(1)
    sent = group.send(1 - rank, torch.tensor([10.0 + rank]))
    group.wait([group.receive(1 - rank, received), sent])
    return received.item()


def send_first(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    group.transfer(torch.ones(1), to=1 - rank)
    group.transfer(torch.ones(1), source=1 - rank)


def test_a_send_ends_when_its_receive_is_posted() -> None:
    assert in_memory(swap, 2) == [11.0, 10.0]
    with pytest.raises(DeadlockError, match="rank 0 waits for a message from 0 to 1 of world; rank 1 waits for"):
        in_memory(send_first, 2)


def mixed_up(rank: int, size: int) -> None:
    group = group_of("world", rank, size)
    group.all_reduce(torch.zeros(1)) if rank else group.broadcast(torch.zeros(1))


def test_ranks_that_begin_different_operations_are_an_error() -> None:
    with pytest.raises(AssertionError, match="begins all_reduce where others begin broadcast of 0"):
        in_memory(mixed_up, 2)


def count_up(rank: int, size: int) -> int:
    """Return the number of sums that all ranks reached."""
    group, num = group_of("world", rank, size), 0
    try:
        while num < 5:
            group.all_reduce(torch.zeros(1))
            num += 1
    except PeerLostError:
        group.abandon()
    return num


@pytest.mark.parametrize("after", [0, 3])
def test_a_rank_is_lost_at_any_exchange_and_its_peers_learn_of_it(after: int) -> None:
    assert in_memory(count_up, SIZE, lose=(1, after)) == [after, None, after]
    assert in_memory(count_up, SIZE, lose=(1, 5)) == [5, 5, 5]


def draw(rank: int, size: int) -> list[float]:
    """Draw random numbers before and after other ranks have drawn."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    drawn = []
    for _ in range(2):
        drawn += [torch.rand(1).item(), np.random.rand(), random.random()]
        group_of(f"world-{len(drawn)}", rank, size).barrier()
    return drawn


def test_ranks_draw_as_if_they_were_alone() -> None:
    before = torch.get_rng_state()
    assert in_memory(draw, SIZE) == [
        in_memory(lambda _, size, rank=rank: draw_alone(rank), 1)[0] for rank in range(SIZE)
    ]  # type: ignore[misc]
    assert torch.equal(torch.get_rng_state(), before)


def draw_alone(rank: int) -> list[float]:
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    return [draw() for _ in range(2) for draw in (lambda: torch.rand(1).item(), np.random.rand, random.random)]


def exchange_aside(rank: int, size: int) -> float:
    """Exchange on another thread while this one joins it, as gradient exchanges do."""
    group, received = group_of("world", rank, size), torch.zeros(1)
    aside = Aside(group)
    group.expect(
        begin("aside", lambda: aside.exchange([(1 - rank, torch.tensor([float(rank)]))], [(1 - rank, received)]))
    )
    group.join()
    return received.item()


def test_a_rank_waits_for_its_other_threads() -> None:
    assert in_memory(exchange_aside, 2) == [1.0, 0.0]
