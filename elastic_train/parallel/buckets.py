"""Exchange gradients while the backward pass still computes: by unit, or by bucket (a slice of a flat gradient).

A backward pass reaches a model's parameters roughly in reverse order. Full units or buckets are exchanged in the order
of the turn's actions, the same on all ranks, whatever the order in which they fill. Buckets are exchanged on another
thread. Buckets cut the vectors but not the tree of lanes, so they do not change any bit. (Li et al. 2020, section
3.2.3, for rings.)

Where ranks hold shards, a unit's gradients are in transit as *leaves*: one flat vector at a time, in reused memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.parallel.devices.device import Mark
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import Begin, End, Walk, place_of
from elastic_train.system.huge_pages import on_huge_pages
from rendezvous.waiting import Bystander


class Placed(NamedTuple):
    """A parameter, and the position of its gradient: the flat gradient's number and the first element."""

    parameter: nn.Parameter
    flat: int
    start: int


class Bucket(NamedTuple):
    """Elements [lo, hi) of a flat gradient, and the parameters that fill them."""

    flat: int
    lo: int
    hi: int
    parameters: tuple[nn.Parameter, ...]


def cut_buckets(placed: Sequence[Placed], flats: Sequence[Tensor], least_bytes: float) -> list[Bucket]:
    """Cut flat gradients into buckets of whole parameters, in the order in which a backward pass fills them.

    `placed` is in the model's order, with ascending starts. Each bucket has at least `least_bytes`, except a vector's
    first. Parameters without elements (of other stages) are skipped: they get no gradient.
    """
    buckets: list[Bucket] = []
    filling: dict[int, Bucket] = {}
    for parameter, flat, start in reversed([one for one in placed if one.parameter.numel()]):
        known = filling.pop(flat, None) or Bucket(flat, start, flats[flat].numel(), ())
        last = next((bucket for bucket in reversed(buckets) if bucket.flat == flat), None)
        hi = last.lo if last is not None else flats[flat].numel()
        bucket = Bucket(flat, start, hi, (*known.parameters, parameter))
        if (hi - start) * flats[flat].element_size() >= least_bytes or start == 0:
            buckets.append(bucket)
        else:
            filling[flat] = bucket
    assert not filling, "every flat gradient begins with a parameter"
    return buckets


def check_once(parameter: Tensor, seen: set[int]) -> None:
    """Note that a parameter's gradient is complete; raise ConfigError if it was complete before."""
    if id(parameter) in seen:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} gets its gradient in several parts in one backward pass, "
            "and may be exchanged after the first: use torch.utils.checkpoint with use_reentrant=False, or set "
            "parallel.bucket_mb to null and parallel.shards to none or optimizer"
        )
    seen.add(id(parameter))


class ExchangeQueue:
    """A thread that makes exchanges in order, and none after one that has failed; must be closed.

    On a device, exchanges have their own queue. An exchange starts after all work enqueued before `begin`, and work
    enqueued after `join` waits for it.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._queue = group, group.device.beside()
        self._thread = Bystander(f"exchanges of rank {group.rank}")
        self._has_failed = False
        self._busy_s = 0.0

    def begin(self, exchange: Callable[[], None], uses: Sequence[Tensor] = ()) -> None:
        """Queue an exchange, which `uses` these tensors, for the thread."""
        for tensor in uses:
            self._queue.keep(tensor)
        self._group.expect(self._thread.begin(partial(self._in_turn, exchange, self._group.device.queue().mark())))

    def join(self) -> None:
        """Wait until all exchanges are made; raise the thread's error."""
        waited_s = self._group.waited_s
        self._group.join()
        self._group.device.queue().follow(self._queue.mark())
        self._group.beside_s += max(0.0, self._busy_s - (self._group.waited_s - waited_s))
        self._busy_s = 0.0

    def close(self) -> None:
        """End the thread once it is idle."""
        self._thread.leave()

    def _in_turn(self, exchange: Callable[[], None], after: Mark) -> None:
        """Make an exchange unless an earlier one has failed: then the world has ended.

        A peer that has not noticed still waits for the data that was not sent. It would take the next bucket for it,
        and gloo aborts a process that is sent more than it expects.
        """
        if self._has_failed:
            return
        started = time.perf_counter()
        try:
            with self._queue.entered():
                self._queue.follow(after)
                exchange()
            self._busy_s += time.perf_counter() - started
        except BaseException:
            self._has_failed = True
            raise


class Filling:
    """Reduces units as a backward pass completes their gradients; must be closed."""

    def __init__(self, units: Sequence[Sequence[nn.Parameter]]) -> None:
        """`units` has the parameters of each unit, in the order of reduction."""
        self._units, self._walk = units, Walk((), lambda action: None)
        self._missing: list[int] | None = None
        self._seen: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, place))  # type: ignore[no-untyped-call]
            for place, unit in enumerate(units)
            for parameter in unit
        ]

    @contextlib.contextmanager
    def filling(self, walk: Walk) -> Iterator[None]:
        """Return the context of the backward pass that fills the units; unused parameters count as full at its end."""
        self._walk, self._missing, self._seen = walk, list(map(len, self._units)), set()
        try:
            yield
            walk.finish()
        finally:
            self._walk, self._missing = Walk((), lambda action: None), None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, place: int, parameter: Tensor) -> None:
        """Count a parameter's complete gradient, and reduce the units that are full and next in order."""
        if self._missing is None:
            return  # another lane's pass, or outside any step
        check_once(parameter, self._seen)
        self._missing[place] -= 1
        while (
            isinstance(due := self._walk.next, Begin)
            and due.what == "reduce"
            and self._missing[place_of(due.unit, len(self._units))] == 0
        ):
            self._walk.step()
            if isinstance(before := self._walk.next, End) and before.what == "reduce" and len(self._units) > 1:
                self._walk.step()


Shape = tuple[int, torch.dtype, tuple[tuple[int, torch.Size, tuple[int, ...]], ...]]
"""Number of elements of a flat vector, their dtype, and start, shape and stride of its parameters.

Elements between them are zero.
"""


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """One flat vector's parameters, each with its first element."""

    number: int
    numel: int
    parameters: Sequence[tuple[nn.Parameter, int]]
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        places = tuple((start, parameter.shape, parameter.stride()) for parameter, start in self.parameters)
        object.__setattr__(self, "shape", (self.numel, self.parameters[0][0].dtype, places))


Wire = Literal["exact", "bf16"]
"""Wire format of a leaf, exact or rounded. Rounding depends only on the leaf, so no world affects the sum."""
Units = Sequence[Sequence[FlatGradient]]
"""Gradients to exchange together, in exchange order."""


class Leaf(NamedTuple):
    """A flat vector's memory, and its views in the parameters' shapes."""

    memory: Tensor
    parts: Sequence[Tensor]


class Leaves:
    """Makes leaves from a backward pass's gradients in reused memory: fresh pages cost more than the additions."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._kept: dict[Shape, list[Leaf]] = {}

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which leaves are sent: bf16 if that is narrower, and they are no complex numbers."""
        is_wider = dtype.is_floating_point and dtype.itemsize > torch.bfloat16.itemsize
        return torch.bfloat16 if self._wire == "bf16" and is_wider else dtype

    def take(self, flat: FlatGradient) -> Leaf:
        """Return a flat vector's leaf in its wire format, and drop its parameters' gradients; it starts from zeros.

        Unused parameters are zero.
        """
        kept = self._kept.get(flat.shape)
        leaf = kept.pop() if kept else self._made(flat)
        for (parameter, _), part in zip(flat.parameters, leaf.parts, strict=True):
            if (gradient := parameter.grad) is None:
                part.zero_()
            else:
                torch.add(gradient, 0.0, out=part)
                parameter.grad = None
        return leaf

    def _made(self, flat: FlatGradient) -> Leaf:
        memory, (*_, places) = self._zeros(flat.numel, flat.parameters[0][0]), flat.shape
        return Leaf(memory, [memory[start:].as_strided(shape, strides) for start, shape, strides in places])

    def _zeros(self, numel: int, like: Tensor) -> Tensor:
        return on_huge_pages(torch.empty(numel, dtype=self.dtype_of(like.dtype), device=like.device)).zero_()

    def give_back(self, flat: FlatGradient, leaf: Leaf) -> None:
        """Return a leaf's memory for reuse."""
        self._kept.setdefault(flat.shape, []).append(leaf)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory kept for leaves."""
        yield from (leaf.memory for leaves in self._kept.values() for leaf in leaves)

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()


class BufferPool:
    """Reusable memory of summands; keeps at most `most` tensors, each large enough for a unit."""

    def __init__(self, most: int) -> None:
        self._kept: list[Tensor] = []
        self._most = most

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor of the same size and device."""
        for place, memory in enumerate(self._kept):
            if memory.numel() >= like.numel() and (memory.dtype, memory.device) == (dtype, like.device):
                return self._kept.pop(place)[: like.numel()]
        return on_huge_pages(torch.empty_like(like, dtype=dtype))

    def give_back(self, tensor: Tensor) -> None:
        """Return memory from `take`, or any other that is no longer read."""
        if len(self._kept) < self._most:
            self._kept.append(tensor if tensor._base is None else tensor._base)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory kept for summands."""
        yield from self._kept

    def clear(self) -> None:
        """Release all memory."""
        self._kept.clear()


def forget_gradients(units: Units) -> None:
    """Drop the gradients of an unfinished backward pass."""
    for unit in units:
        for flat in unit:
            for parameter, _ in flat.parameters:
                parameter.grad = None
