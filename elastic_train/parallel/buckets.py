"""Exchanges of gradients beside the backward pass that fills them: of units, or of buckets, slices of flat gradients.

A backward pass comes to a model's parameters about in the opposite order. What is full is exchanged, on all ranks in
the order of the turn's actions, whatever the order in which theirs fill. Buckets are exchanged on another thread. No
bit can change: a bucket cuts the vectors, never the tree of lanes. (Li et al. 2020, section 3.2.3, for whole rings.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from elastic_train.errors import ConfigError
from elastic_train.parallel.group import Group
from elastic_train.program.unit_turn import Begin, End, Walk, place_of
from rendezvous.waiting import Bystander


class Placed(NamedTuple):
    """A parameter, and the element of a flat gradient, by number, that its own begins with."""

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

    `placed` is in the model's order, in which starts ascend. Each has at least so many bytes but a vector's first one.
    Parameters without elements, those of other stages, are in none: no backward pass comes to them.
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
    """Note that a backward pass has come to the end of a parameter's gradient; raises ConfigError if it had before."""
    if id(parameter) in seen:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} gets its gradient in several parts in one backward pass, "
            "and may be exchanged after the first: use torch.utils.checkpoint with use_reentrant=False, or set "
            "parallel.bucket_mb to null and parallel.shards to none or optimizer"
        )
    seen.add(id(parameter))


class ExchangeQueue:
    """Another thread, which makes exchanges one after another, none after one that could not be made; it must be
    closed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._thread = Bystander(f"exchanges of rank {group.rank}")
        self._has_failed = False
        self._busy_s = 0.0

    def begin(self, exchange: Callable[[], None]) -> None:
        """Let the thread make an exchange after those that were begun before."""
        self._group.expect(self._thread.begin(partial(self._in_turn, exchange)))

    def join(self) -> None:
        """Wait until all exchanges are made; raises what went wrong there."""
        waited_s = self._group.waited_s
        self._group.join()
        self._group.beside_s += max(0.0, self._busy_s - (self._group.waited_s - waited_s))
        self._busy_s = 0.0

    def close(self) -> None:
        """End the thread once it is free."""
        self._thread.leave()

    def _in_turn(self, exchange: Callable[[], None]) -> None:
        """Make an exchange unless one before it could not be: its world has ended, and no other may follow it.

        A peer that has lost nobody yet still awaits what was not sent. It would take the next bucket for that, and
        gloo ends a process to which more is sent than it awaits.
        """
        if self._has_failed:
            return
        started = time.perf_counter()
        try:
            exchange()
            self._busy_s += time.perf_counter() - started
        except BaseException:
            self._has_failed = True
            raise


class Filling:
    """Does what is due of a turn as a backward pass ends the gradients of units; it must be closed."""

    def __init__(self, units: Sequence[Sequence[nn.Parameter]]) -> None:
        """`units` are the parameters of each, in the order of reductions."""
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
        """Return the context of the backward pass that fills the units; what no lane uses is full at its end."""
        self._walk, self._missing, self._seen = walk, list(map(len, self._units)), set()
        try:
            yield
            walk.finish()
        finally:
            self._missing = None

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, place: int, parameter: Tensor) -> None:
        """A backward pass has come to the end of a parameter's gradient."""
        if self._missing is None:
            return  # a pass of another lane, or outside of any step
        check_once(parameter, self._seen)
        self._missing[place] -= 1
        while (
            isinstance(due := self._walk.next, Begin)
            and due.what == "reduce"
            and self._missing[place_of(due.unit, len(self._units))] == 0
        ):
            self._walk.step()
            if isinstance(before := self._walk.next, End) and before.unit != due.unit:
                self._walk.step()
