"""The gradient sum: along one fixed tree of lanes, so that no bit depends on the world; or fast, so that they may.

Gradients live in one flat buffer per dtype, and every parameter's `.grad` is a view of it. A leaf starts from zeros,
so no negative zero survives, and the backward pass of a lane's right sibling into the same buffer *is* their sum. The
larger subtrees of a replica are kept by a binary counter of at most log2 L more buffers.

While a replica's last lane computes, parts of the sum that are complete are exchanged beside it (`buckets`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from elastic_train.core.lanes import (
    Lanes,
    Part,
    contiguous,
    parts_of,
    settle,
)
from elastic_train.parallel.buckets import Beside, Bucket, Placed, Turns, cut_buckets
from elastic_train.parallel.exchange import Scratch, exchange
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Aside, PointToPoint
from elastic_train.system.huge_pages import on_huge_pages

Reduction = Literal["canonical", "fast"]
OfPart = tuple[str, Tensor]
"""A tensor that a rank holds, and which of the parts of its memory it is, in the words of `elastic-train plan`."""


class GradientSum(Protocol):
    """From the lanes' backward passes to one mean gradient, the same on every rank."""

    def begin(self, lanes: Lanes) -> None:
        """Start a step: forget the last one's gradients."""

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Return the context in which one lane's backward pass runs; lanes come in ascending order."""

    def serve(self) -> None:
        """Take part in what other ranks' lanes need; after this rank's own, and before it waits for anything else."""

    def finish(self, divisor: float) -> None:
        """Leave (sum over all lanes) / divisor in every parameter's `.grad`, or where it is held."""

    def close(self) -> None:
        """Leave the model's parameters alone from now on."""

    def tensors(self) -> Iterator[OfPart]:
        """Yield all that it holds, each with the part of memory that it belongs to."""


def make_gradient_sum(
    kind: Reduction,
    parameters: Sequence[nn.Parameter],
    replicas: Group,
    num_lanes: int,
    bucket_bytes: float | None = None,
) -> GradientSum:
    """Bind the parameters' gradients to buffers and return the sum that the configuration asks for.

    With `bucket_bytes` slices of about that size are exchanged beside the backward pass.
    """
    flats, placed = place_gradients(parameters)
    if kind == "fast":
        return FastSum(flats, replicas)
    total = CanonicalSum(flats, replicas, contiguous(replicas.size, num_lanes))
    total.exchange_beside(placed, bucket_bytes)
    return total


def make_sum(kind: Reduction, flats: list[Tensor], replicas: Group, assigned: Sequence[Lanes]) -> GradientSum:
    """Return the sum of whatever lanes add to flat tensors; `replicas` has one rank of every replica, by replica.

    `assigned` are the replicas' lanes.
    """
    return CanonicalSum(flats, replicas, assigned) if kind == "canonical" else FastSum(flats, replicas)


def bind_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Make every gradient a view of one zeroed flat buffer per (dtype, device); return the buffers."""
    return place_gradients(parameters)[0]


def place_gradients(parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Placed]]:
    """Bind gradients as `bind_gradients` does; return the buffers, and where each is, in the parameters' order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    flats, placed = list[Tensor](), dict[int, Placed]()
    for (dtype, device), members in kinds.items():
        flat = torch.zeros(sum(member.numel() for member in members), dtype=dtype, device=device)
        place = 0
        for member in members:
            member.grad = _placed_as(flat[place : place + member.numel()], member)
            placed[id(member)] = Placed(member, len(flats), place)
            place += member.numel()
        flats.append(flat)
    return flats, [placed[id(parameter)] for parameter in parameters if id(parameter) in placed]


def _placed_as(memory: Tensor, parameter: Tensor) -> Tensor:
    """Return memory in a parameter's shape, and with its strides if its elements fill the memory that they are in."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    is_dense = last + 1 == parameter.numel()
    return memory.as_strided(parameter.shape, parameter.stride()) if is_dense else memory.view_as(parameter)


class LaneTree:
    """This replica's part of the tree: its lanes' sums, up to the largest whole subtrees.

    The flat buffers hold the open subtree's sum, in which the running lane's backward pass adds.
    """

    def __init__(self, flats: list[Tensor], replica: int, assigned: Sequence[Lanes]) -> None:
        self._flats, self._num_lanes = flats, sum(map(len, assigned))
        self.layout = [parts_of(lanes, self._num_lanes) for lanes in assigned]
        """The subtrees of every replica."""
        self._mine, self._lanes = self.layout[replica], assigned[replica]
        self._open: Part | None = None  # the subtree whose sum the flat buffers hold
        self._stack: list[tuple[Part, list[Tensor]]] = []
        self._free: list[list[Tensor]] = []

    def begin(self, lanes: Lanes) -> None:
        assert lanes == self._lanes, f"{lanes} are not this replica's"
        self._free += [buffers for _, buffers in self._stack]
        self._stack.clear()
        self._open = None
        self._zero()

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        leaf = Part(0, lane)
        if self._open is not None and self._open != leaf.sibling:
            self._push()
        yield
        self._open = leaf.parent if self._open is not None else leaf
        self._open = settle(self._open, self._num_lanes)

    def sums(self) -> dict[Part, list[Tensor]]:
        """Return the buffers of each of this replica's subtrees, all of whose lanes must have been run."""
        self._merge_stack()
        mine = {part: buffers for part, buffers in [*self._stack, (self._open, self._flats)] if part is not None}
        self.check_complete(mine)
        return mine

    def check_complete(self, sums: Iterable[Part]) -> None:
        """Raise AssertionError unless these are all of this replica's subtrees, and all of its lanes were run."""
        assert sorted(sums) == sorted(self._mine), "not all of this replica's lanes were run"

    def foresee(self) -> tuple[list[list[Tensor]], dict[Part, list[Tensor]]]:
        """Return what the lane that runs now, this replica's last, leads to: buffers to add, and the sums then.

        The buffers are added in their order to the flat ones, which hold the sum that the lane completes.
        """
        leaf = Part(0, self._lanes[-1])
        final = settle(leaf.parent if self._open is not None else leaf, self._num_lanes)
        merged, stack = list[list[Tensor]](), list(self._stack)
        while stack and stack[-1][0] == final.sibling:
            merged.append(stack.pop()[1])
            final = settle(final.parent, self._num_lanes)
        return merged, {**dict(stack), final: self._flats}

    def put_aside(self) -> Iterator[Tensor]:
        """Yield the buffers that sums are, or were, put aside in."""
        for buffers in (*(buffers for _, buffers in self._stack), *self._free):
            yield from buffers

    def _push(self) -> None:
        """Put the open subtree aside and start a new leaf from zeros."""
        self._merge_stack()
        assert self._open is not None, "nothing to put aside"
        buffers = self._free.pop() if self._free else [on_huge_pages(torch.empty_like(flat)) for flat in self._flats]
        for buffer, flat in zip(buffers, self._flats, strict=True):
            buffer.copy_(flat)
        self._stack.append((self._open, buffers))
        self._open = None
        self._zero()

    def _merge_stack(self) -> None:
        """Add the subtrees put aside to the open one while they are its left siblings."""
        while self._stack and self._open is not None and self._stack[-1][0] == self._open.sibling:
            _, buffers = self._stack.pop()
            for flat, buffer in zip(self._flats, buffers, strict=True):
                flat.add_(buffer)
            self._free.append(buffers)
            self._open = settle(self._open.parent, self._num_lanes)

    def _zero(self) -> None:
        for flat in self._flats:
            flat.zero_()


class TreeSum(ABC):
    """What sums along the tree share: a replica's lanes add into whole gradients, and need nobody else for that."""

    def __init__(self, flats: list[Tensor], replicas: Group, assigned: Sequence[Lanes]) -> None:
        self._flats, self._replicas, self._num_lanes = flats, replicas, sum(map(len, assigned))
        self._tree = LaneTree(flats, replicas.rank, assigned)
        self._last = assigned[replicas.rank][-1] if assigned[replicas.rank] else None
        self._scratch = Scratch()
        self._beside: Beside | None = None
        self._own_turns: Turns | None = None
        self._aside = Aside(replicas)
        self._merged: list[list[Tensor]] = []
        self._mine: dict[Part, list[Tensor]] = {}

    def exchange_beside(self, placed: Sequence[Placed], bucket_bytes: float | None, turns: Turns | None = None) -> None:
        """Exchange buckets of about so many bytes beside the backward pass of the last lane; not at all for None.

        Sums whose exchanges would meet share `turns`, which are closed with none of them. On a GPU nothing is exchanged
        so: it would need streams, and NCCL's order of calls another group.
        """
        is_on_device = any(flat.is_cuda or self._replicas.is_on_device(flat) for flat in self._flats)
        if bucket_bytes is not None and self._replicas.size > 1 and not is_on_device:
            buckets = cut_buckets(placed, self._flats, bucket_bytes)
            if turns is None:
                turns = self._own_turns = Turns(self._replicas)
            self._beside = Beside(buckets, turns, self._finish_bucket)

    def begin(self, lanes: Lanes) -> None:
        if self._beside is not None:
            self._beside.join()  # of a step that was not applied after all
            self._mine = {}
        self._tree.begin(lanes)

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        with self._tree.lane(lane):
            if self._beside is None or lane != self._last:
                yield
            else:
                self._merged, self._mine = self._tree.foresee()
                self._tree.check_complete(self._mine)
                with self._beside.filling():
                    yield

    def serve(self) -> None:  # noqa: B027 - what all of these sums do
        """Lanes need nobody else."""

    def finish(self, divisor: float) -> None:
        """Wait for what was exchanged beside the last lane, or exchange all now."""
        if self._beside is None:
            self._mine = self._tree.sums()
            for number, flat in enumerate(self._flats):
                self.reduce(number, 0, flat.numel(), self._mine, self._replicas)
        else:
            waited_s = self._replicas.waited_s
            self._beside.join()
            waited_s = self._replicas.waited_s - waited_s
            self._replicas.beside_s += max(0.0, self._beside.turns.take_busy_s() - waited_s)
            self._tree.check_complete(self._mine)
            self._replicas.num_bytes, self._aside.num_bytes = self._replicas.num_bytes + self._aside.num_bytes, 0
        self.divide(divisor)

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()
        if self._own_turns is not None:
            self._own_turns.close()

    def tensors(self) -> Iterator[OfPart]:
        yield from (("gradients", flat) for flat in self._flats)
        yield from (("sums", buffer) for buffer in self._tree.put_aside())
        yield from (("exchange", kept) for kept in self._scratch.tensors())

    @abstractmethod
    def reduce(self, number: int, lo: int, hi: int, mine: Mapping[Part, list[Tensor]], ranks: PointToPoint) -> None:
        """Finish the tree over elements [lo, hi) of a flat gradient, from all ranks' parts of them."""

    @abstractmethod
    def divide(self, divisor: float) -> None:
        """Divide what was reduced; share what others need of it."""

    def _finish_bucket(self, bucket: Bucket) -> None:
        cut = slice(bucket.lo, bucket.hi)
        for buffers in self._merged:
            self._flats[bucket.flat][cut].add_(buffers[bucket.flat][cut])
        self.reduce(bucket.flat, bucket.lo, bucket.hi, self._mine, self._aside)


class CanonicalSum(TreeSum):
    """The sum along the tree, whole on every rank."""

    def reduce(self, number: int, lo: int, hi: int, mine: Mapping[Part, list[Tensor]], ranks: PointToPoint) -> None:
        if self._replicas.size > 1:
            parts = {part: buffers[number][lo:hi] for part, buffers in mine.items()}
            exchange(self._flats[number][lo:hi], parts, self._tree.layout, ranks, self._num_lanes, self._scratch)

    def divide(self, divisor: float) -> None:
        for flat in self._flats:
            flat.div_(divisor)


class FastSum:
    """All lanes into one buffer, then all_reduce: coverage stays exact, rounding varies with the world."""

    def __init__(self, flats: list[Tensor], replicas: Group) -> None:
        self._flats, self._replicas = flats, replicas

    def begin(self, lanes: Lanes) -> None:
        for flat in self._flats:
            flat.zero_()

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def serve(self) -> None:
        """Lanes need nobody else."""

    def finish(self, divisor: float) -> None:
        for flat in self._flats:
            self._replicas.all_reduce(flat)
            flat.div_(divisor)

    def close(self) -> None:
        """There are no hooks."""

    def tensors(self) -> Iterator[OfPart]:
        yield from (("gradients", flat) for flat in self._flats)
