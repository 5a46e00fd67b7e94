"""Exchanges within a lane: of sums and gradients (tensor parallelism), of keys and values (context parallelism).

Modules keep one `CellLinks` across worlds, to which the current group is bound, so a new world changes neither model
nor hooks. Sums follow a fixed tree: they are bit-identical on all ranks and depend only on the cell's size. All
exchanges raise PeerLostError if a peer is lost.

Context-parallel ranks compute some tokens of every row each. They all-gather a row's keys and values, one block at a
time (as in Llama 3, Grattafiori et al. 2024, section 3.3.2); in the backward pass, gradients are reduce-scattered.

Compiled graphs end before an exchange within a cell and resume after it. So graphs know neither peers nor worlds, and
can be compiled before there are any, with a `LoneGroup` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Function

from elastic_train.core.keyed_random import derive
from elastic_train.core.lanes import Part, lane_additions
from elastic_train.parallel.cells.pipeline import Generators
from elastic_train.parallel.exchange import Scratch, Subtrees, exchange
from elastic_train.parallel.group import Group


class RandomStreams:
    """Random numbers of tensor ranks: a shared stream, used first, and one of each rank's own for its parts of tensors.

    What all ranks compute alike has to draw alike; dropout of a rank's own attention heads must not drop the elements
    that the other ranks drop of theirs (as in Megatron-LM, Shoeybi et al. 2019). Each switch to the own stream seeds it
    with a number from the shared one and the rank's place, so it depends on lane, step and tensor degree, but not on
    the world.
    """

    def __init__(self) -> None:
        self._shared: tuple[Generators, Tensor] | None = None
        """State of the shared stream while the own one is in use."""

    def use_own(self, place: int, device: torch.device) -> None:
        """Draw from the own stream of the rank at `place` from now on."""
        if self._shared is not None:
            return
        generators, number = Generators(device), torch.randint(1 << 62, (), generator=torch.default_generator)
        self._shared = generators, generators.state()
        generators.seed(derive(int(number), place) >> 1)

    def use_shared(self) -> None:
        """Continue with the shared stream."""
        if self._shared is not None:
            generators, state = self._shared
            self._shared = None
            generators.continue_at(state)


class CellLinks:
    """The tensor-parallel group of this rank in the current world."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._scratch = Scratch()
        self.streams = RandomStreams()

    @property
    def group(self) -> Group:
        assert self._group is not None, "no cell has been formed"
        return self._group

    def bind(self, group: Group) -> None:
        """Exchange with the ranks of this group from now on."""
        self._group = group

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        group, total = self.group, tensor.detach().clone(memory_format=torch.contiguous_format)
        flat, layout = total.view(-1), [[Part(0, place)] for place in range(group.size)]
        subtrees = Subtrees(flat, 0, 0, flat.numel(), {Part(0, group.rank): [flat]}, layout, group.size)
        exchange(subtrees, group, self._scratch)
        return total


Exchange = Callable[[Tensor], Tensor]


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def exchanged(tensor: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """Return `there` of a tensor; its gradient is `back` of the result's."""
    return _Exchanged.apply(tensor, there, back)  # type: ignore[no-any-return, no-untyped-call]


def shared(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return a replicated tensor for each rank's own use; its gradient is summed over the ranks."""
    return exchanged(tensor, lambda one: one.view_as(one), links.sum)


def summed(tensor: Tensor, links: CellLinks) -> Tensor:
    """Return the sum of all ranks' tensors; its gradient must be equal on all ranks."""
    return exchanged(tensor, links.sum, lambda gradient: gradient)


P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Exclude a function from the compiled graphs around it.

    Equal to torch.compiler.disable, without its import of torch's compiler, which takes a second.
    """
    return _disable_dynamo(function)


class LoneGroup(Group):
    """The first of `size` ranks without peers: gathers and sums use its own tensor, and receives give zeros."""

    def __init__(self, size: int) -> None:
        super().__init__(0, 1, None, timeout_s=0.0)
        self.size, self._host = size, _Nobody()


class _Nobody:
    """A backend without connections; its operations are complete when they begin."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        return _Done()

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        tensors[0].zero_()
        return _Done()

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor]) -> _Done:
        for place in gathered[0]:
            place.copy_(tensors[0])
        return _Done()

    def gather(self, gathered: list[list[Tensor]], tensors: list[Tensor], options: dist.GatherOptions) -> _Done:
        return self.allgather(gathered, tensors)

    def allreduce(self, tensors: list[Tensor]) -> _Done:
        return _Done()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> _Done:
        return _Done()


class _Done:
    def wait(self) -> None: ...


TOKENS = -2


class Gathering:
    """Function that all-gathers the tensors of a group; of one class in every world, and before."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @outside_of_graphs
    def __call__(self, tensor: Tensor) -> Tensor:
        return gathered(tensor, self._group)


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """All-gather tensors (…, tokens, size) of equal shapes along their tokens."""
    return exchanged(tensor, partial(gather, group=group), partial(sum_of_own, group=group))


def gather(tensor: Tensor, group: Group) -> Tensor:
    """All-gather tensors of equal shapes along their tokens."""
    return torch.cat(group.all_gather(tensor.contiguous()).unbind(0), TOKENS)


def sum_of_own(tensor: Tensor, group: Group) -> Tensor:
    """Reduce-scatter a tensor along its tokens: return the sum over all ranks of this rank's tokens."""
    parts = [part.contiguous() for part in tensor.chunk(group.size, TOKENS)]
    mine = group.rank
    found = [part if place == mine else torch.empty_like(part) for place, part in enumerate(parts)]
    group.exchange(
        [(place, part) for place, part in enumerate(parts) if place != mine],
        [(place, part) for place, part in enumerate(found) if place != mine],
    )
    for left, right in lane_additions(group.size):
        found[left] = found[left] + found[right]
    return found[0]
