"""Grains of which ranks have parts: their squares add up to the norm of the whole tensor, to the last bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from elastic_train.parallel.cells.expert_grains import begun_grains, num_begun
from elastic_train.shards.grains import GRAIN
from elastic_train.shards.norm import grain_squares, split_grains, total_norm

NUM_DRAWN = 20


class Mail:
    """What ranks send to those before them, which are asked after them."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.num_sent = size, 0, 0
        self._sent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for to, tensor in sends:
            self.num_sent += 1
            self._sent[self.rank, to].append(tensor)
        for source, memory in receives:
            memory.copy_(self._sent[source, self.rank].pop(0))

    def grains(self, tensors: Sequence[Tensor]) -> list[list[list[Tensor]]]:
        """Return the grains that begin at each rank, by rank and tensor, of whole tensors."""
        found = []
        for rank in reversed(range(self.size)):
            self.rank, runs = rank, [tensor.chunk(self.size)[rank] for tensor in tensors]
            found.append(list(begun_grains(runs, self)))  # type: ignore[arg-type]
        assert not any(self._sent.values()), "all that is sent is awaited"
        return found[::-1]


def norm(grains: Iterable[Tensor]) -> float:
    return total_norm(grain_squares(list(grains)).numpy())


def test_all_have_the_norm_of_the_whole() -> None:
    """Where grains begin anew on each rank, some have another."""
    draw, num_other = torch.Generator().manual_seed(7), 0
    for _ in range(NUM_DRAWN):
        size, numel = (int(torch.randint(lo, hi, (), generator=draw)) for lo, hi in ((2, 5), (1, 3 * GRAIN)))
        whole = torch.randn(size * numel, generator=draw)
        by_rank = Mail(size).grains([whole])
        expected = norm(split_grains([whole]))
        assert norm(grain for [grains] in by_rank for grain in grains) == expected
        assert [len(grains) for [grains] in by_rank] == [num_begun(numel, rank) for rank in range(size)]
        num_other += norm(split_grains(whole.chunk(size))) != expected
    assert 0 < num_other < NUM_DRAWN


@pytest.mark.parametrize(("numels", "num_sent"), [((2 * GRAIN, GRAIN), 0), ((GRAIN // 4, GRAIN + 1, 0), 6)])
def test_only_what_reaches_over_a_ranks_end_is_sent(numels: tuple[int, ...], num_sent: int) -> None:
    """Of several tensors at once, each grain to the rank that has its first element."""
    mail, draw = Mail(4), torch.Generator().manual_seed(8)
    wholes = [torch.randn(4 * numel, generator=draw) for numel in numels]
    by_rank = mail.grains(wholes)
    assert mail.num_sent == num_sent
    for number, whole in enumerate(wholes):
        found = [grain for of_rank in by_rank for grain in of_rank[number]]
        expected = split_grains([whole])
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
