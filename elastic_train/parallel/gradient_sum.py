"""The gradient sum: along a fixed tree of leaves, with bits independent of the world; or fast, with bits that may vary.

Gradients live in one flat buffer per dtype, and every parameter's `.grad` is a view of it. A leaf starts from zeros, so
no negative zero survives, and the backward pass of a leaf's right sibling into the same buffer *is* their sum. A binary
counter keeps a rank's larger subtrees in at most log2 L more buffers.

A leaf is one rank's computation of one lane: `core.lanes.leaf_of`. A sum has several trees if parameters are added over
different ranks or at different times: one per chunk of a stage, and one per chunk for its experts.

During a rank's last leaf, complete parts of the sum are already exchanged (`buckets`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from elastic_train.core.lanes import Lanes, Part, parts_of, settle
from elastic_train.errors import ConfigError
from elastic_train.parallel.buckets import Bucket, ExchangeQueue, Filling, Placed, cut_buckets
from elastic_train.parallel.exchange import Everywhere, InAnyOrder, Reduce, Reduction, Scratch, Subtrees
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Aside, PointToPoint
from elastic_train.program.schedules import UnitAction, Walk, filling_turn, place_of
from elastic_train.system.huge_pages import on_huge_pages

OfPart = tuple[str, Tensor]
"""A tensor that a rank holds, and its category of memory, as named by `elastic-train plan`."""


class GradientSum(Protocol):
    """From the leaves' backward passes to one mean gradient, equal on every rank that holds it."""

    def begin(self) -> None:
        """Start a step: discard the last one's gradients."""

    def turn(self, leaf: int | None, tree: int = 0) -> contextlib.AbstractContextManager[None]:
        """Return the context of a turn's backward pass, which adds to a tree; a rank's leaves come in ascending order.

        A rank without a leaf in the turn still takes part in the exchanges.
        """

    def finish(self, divisor: float) -> None:
        """Leave (sum over all leaves) / divisor in every parameter's `.grad`, or on the ranks that hold it."""

    def close(self) -> None:
        """Stop changing the model's parameters, and release the gradients' memory."""

    def tensors(self) -> Iterator[OfPart]:
        """Yield all tensors it holds, each with its category of memory."""


class Tree(NamedTuple):
    """Flat gradients that ranks add up; `leaves` has the leaves of each of the `ranks`.

    `placed` has the parameters whose gradients are views of them. If it `is_beside`, these are exchanged during the
    backward pass of the last leaf.
    """

    flats: Sequence[Tensor]
    ranks: Group
    leaves: Sequence[Lanes]
    reduce: Reduce
    placed: Sequence[Placed] = ()
    is_beside: bool = True


def tree_of(kind: Reduction, parameters: Sequence[nn.Parameter], ranks: Group, leaves: Sequence[Lanes]) -> Tree:
    """Bind the parameters' gradients to buffers and return the tree that sums them on every rank."""
    flats, placed = place_gradients(parameters)
    return Tree(flats, ranks, leaves, reduce_of(kind), placed)


def make_sum(kind: Reduction, flats: list[Tensor], ranks: Group, leaves: Sequence[Lanes]) -> GradientSum:
    """Return the sum of the values that leaves add to flat tensors."""
    return TreeSum([Tree(flats, ranks, leaves, reduce_of(kind))])


def reduce_of(kind: Reduction) -> Reduce:
    """Return the reduction whose sum is whole on every rank."""
    return Everywhere() if kind == "canonical" else InAnyOrder()


def place_gradients(parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Placed]]:
    """Make every gradient a view of one zeroed flat buffer per (dtype, device).

    Returns the buffers, and the position of each gradient, in the parameters' order.
    """
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
    """Return memory in a parameter's shape, with its strides if its elements are dense in memory."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    is_dense = last + 1 == parameter.numel()
    return memory.as_strided(parameter.shape, parameter.stride()) if is_dense else memory.view_as(parameter)


def check_bound(tree: Tree) -> None:
    """Raise ConfigError if a gradient is no longer a view of the flat ones: what leaves added to it is lost."""
    for parameter, flat, start in tree.placed:
        memory = tree.flats[flat].data_ptr() + start * tree.flats[flat].element_size()
        if parameter.numel() and (parameter.grad is None or parameter.grad.data_ptr() != memory):
            raise ConfigError(
                f"gradients were discarded within a step, e.g. that of a parameter of shape {tuple(parameter.shape)}: "
                "the task, the model or the optimizer calls zero_grad() or assigns to .grad; remove that, since the "
                "trainer clears all gradients before each step"
            )


class LaneTree:
    """This rank's part of a tree: its leaves' sums, up to the largest whole subtrees.

    The flat buffers hold the open subtree's sum, to which the running leaf's backward pass adds.
    """

    def __init__(self, flats: Sequence[Tensor], rank: int, leaves: Sequence[Lanes]) -> None:
        self._flats, self.num_leaves = flats, sum(map(len, leaves))
        self.layout = [parts_of(of_rank, self.num_leaves) for of_rank in leaves]
        """Subtrees of every rank."""
        self._mine, self.last = self.layout[rank], leaves[rank][-1] if leaves[rank] else None
        self._open: Part | None = None  # subtree whose sum is in the flat buffers
        self._stack: list[tuple[Part, list[Tensor]]] = []
        self._free: list[list[Tensor]] = []

    def begin(self) -> None:
        self._free += [buffers for _, buffers in self._stack]
        self._stack.clear()
        self._open = None
        self._zero()

    @contextlib.contextmanager
    def adding(self, leaf: int) -> Iterator[None]:
        """Return the context in which a leaf is added to the flat buffers; leaves come in ascending order."""
        part = Part(0, leaf)
        if self._open is not None and self._open != part.sibling:
            self._push()
        yield
        self._open = part.parent if self._open is not None else part
        self._open = settle(self._open, self.num_leaves)

    def sums(self) -> dict[Part, Sequence[Tensor]]:
        """Return the buffers of each of this rank's subtrees; all leaves must have been run."""
        self._merge_stack()
        mine = {part: buffers for part, buffers in [*self._stack, (self._open, self._flats)] if part is not None}
        self.check_complete(mine)
        return mine

    def check_complete(self, sums: Iterable[Part]) -> None:
        """Raise AssertionError unless these are all of this rank's subtrees, with all leaves run."""
        assert sorted(sums) == sorted(self._mine), "not all of this rank's leaves were run"

    def foresee(self) -> tuple[list[list[Tensor]], dict[Part, Sequence[Tensor]]]:
        """Return the outcome of the running leaf, this rank's last: buffers to add, and the final sums.

        The buffers are to be added in order to the flat ones, whose sum the leaf completes.
        """
        assert self.last is not None, "it runs"
        leaf = Part(0, self.last)
        final = settle(leaf.parent if self._open is not None else leaf, self.num_leaves)
        merged, stack = list[list[Tensor]](), list(self._stack)
        while stack and stack[-1][0] == final.sibling:
            merged.append(stack.pop()[1])
            final = settle(final.parent, self.num_leaves)
        return merged, {**dict(stack), final: self._flats}

    def put_aside(self) -> Iterator[Tensor]:
        """Yield the buffers for sums put aside."""
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
            self._open = settle(self._open.parent, self.num_leaves)

    def _zero(self) -> None:
        for flat in self._flats:
            flat.zero_()


@dataclass(slots=True)
class _Adding:
    """A tree during a step."""

    tree: Tree
    own: LaneTree
    aside: Aside
    buckets: Sequence[Bucket] = ()
    filling: Filling | None = None
    """Exchanges the buckets during the last leaf."""
    mine: dict[Part, Sequence[Tensor]] = field(default_factory=dict)
    """Sums of this rank's subtrees, once its last leaf runs."""
    merged: list[list[Tensor]] = field(default_factory=list)
    """Buffers to be added to the flat ones at that time."""


class TreeSum:
    """Sums along trees of whole gradients; a rank needs no peers until its last leaf."""

    def __init__(self, trees: Sequence[Tree], bucket_bytes: float | None = None) -> None:
        """With `bucket_bytes`, exchange buckets of about this size during the last leaf's backward pass.

        With None, exchange everything after it.
        """
        self._trees = [_Adding(one, LaneTree(one.flats, one.ranks.rank, one.leaves), Aside(one.ranks)) for one in trees]
        self._scratch = Scratch()
        self._queue: ExchangeQueue | None = None
        for one in self._trees:
            if bucket_bytes is not None and _may_be_beside(one.tree):
                self._queue = self._queue or ExchangeQueue(one.tree.ranks)
                one.buckets = cut_buckets(one.tree.placed, one.tree.flats, bucket_bytes)
                one.filling = Filling([bucket.parameters for bucket in one.buckets])

    def begin(self) -> None:
        self._join()  # of a step that was not applied
        for one in self._trees:
            one.mine = {}
            one.own.begin()

    @contextlib.contextmanager
    def turn(self, leaf: int | None, tree: int = 0) -> Iterator[None]:
        one = self._trees[tree]
        if leaf is None or not one.tree.reduce.is_ordered:
            yield  # it needs no peers, or is added in any order
            return
        with one.own.adding(leaf):
            if one.filling is None or leaf != one.own.last:
                yield
            else:
                one.merged, one.mine = one.own.foresee()
                one.own.check_complete(one.mine)
                with one.filling.filling(Walk(filling_turn(len(one.buckets)), partial(self._begin, one))):
                    yield

    def finish(self, divisor: float) -> None:
        """Wait for the exchanges that overlapped with the last leaves, and exchange the rest now."""
        self._join()
        for one in reversed(self._trees):
            flats, ranks, reduce = one.tree.flats, one.tree.ranks, one.tree.reduce
            if one.own.last is not None:
                check_bound(one.tree)
            if one.filling is None:
                one.mine = one.own.sums() if reduce.is_ordered else {}
                for number, flat in enumerate(flats):
                    self._reduce(one, number, 0, flat.numel(), ranks)
            else:
                one.own.check_complete(one.mine)
                ranks.num_bytes, one.aside.num_bytes = ranks.num_bytes + one.aside.num_bytes, 0
            reduce.divide(flats, divisor, ranks)

    def close(self) -> None:
        for one in self._trees:
            if one.filling is not None:
                one.filling.close()
            for placed in one.tree.placed:
                placed.parameter.grad = None
        if self._queue is not None:
            self._queue.close()
        self._trees, self._scratch = [], Scratch()  # whoever keeps the sum keeps no gradients

    def tensors(self) -> Iterator[OfPart]:
        for one in self._trees:
            yield from (("gradients", flat) for flat in one.tree.flats)
            yield from (("sums", buffer) for buffer in one.own.put_aside())
        yield from (("exchange", kept) for kept in self._scratch.tensors())

    def _begin(self, one: _Adding, action: UnitAction) -> None:
        assert self._queue is not None, "exchanges overlap a pass only with a queue"
        bucket = one.buckets[place_of(action.unit, len(one.buckets))]
        uses = [buffers[bucket.flat] for buffers in (*one.mine.values(), *one.merged)]
        self._queue.begin(partial(self._finish_bucket, one, bucket), uses)

    def _finish_bucket(self, one: _Adding, bucket: Bucket) -> None:
        cut = slice(bucket.lo, bucket.hi)
        for buffers in one.merged:
            one.tree.flats[bucket.flat][cut].add_(buffers[bucket.flat][cut])
        self._reduce(one, bucket.flat, bucket.lo, bucket.hi, one.aside)

    def _reduce(self, one: _Adding, number: int, lo: int, hi: int, ranks: PointToPoint) -> None:
        flat, own = one.tree.flats[number], one.own
        elements = Subtrees(flat, number, lo, hi, one.mine, own.layout, own.num_leaves)
        one.tree.reduce.reduce(elements, ranks, self._scratch)

    def _join(self) -> None:
        """Wait for the exchanges that overlap with backward passes."""
        if self._queue is not None:
            self._queue.join()


def _may_be_beside(tree: Tree) -> bool:
    return bool(tree.is_beside and tree.placed and tree.ranks.size > 1 and tree.reduce.is_ordered)
