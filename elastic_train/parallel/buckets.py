"""Buckets: slices of flat gradients, exchanged on another thread beside the backward pass that fills them.

A backward pass comes to a model's parameters about in the opposite order. While a replica's last lane runs, a bucket
whose gradients are all there is finished: all ranks do that in one order, whatever the order in which theirs fill. No
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
        self._group.join()

    def take_busy_s(self) -> float:
        """Return how long the thread took for exchanges since the last time; after `join`."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

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


class Beside:
    """Finishes buckets in turn, beside the pass that fills them; it must be closed."""

    def __init__(self, buckets: Sequence[Bucket], queue: ExchangeQueue, finish: Callable[[Bucket], None]) -> None:
        self._buckets, self.queue, self._finish = list(buckets), queue, finish
        self._num_full = 0
        self._missing: list[int] | None = None
        self._seen: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))  # type: ignore[no-untyped-call]
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Return the context of the backward pass that fills the buckets; what no lane uses is full at its end."""
        self._missing, self._seen = [len(bucket.parameters) for bucket in self._buckets], set()
        try:
            yield
            self._hand_out(len(self._buckets))
        finally:
            self._missing = None

    def join(self) -> None:
        """Wait until all buckets that were full are finished; raises what went wrong there."""
        self._num_full = 0
        self.queue.join()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, number: int, parameter: Tensor) -> None:
        if self._missing is None:
            return  # another lane's pass
        check_once(parameter, self._seen)
        self._missing[number] -= 1
        num_full = self._num_full
        while num_full < len(self._missing) and self._missing[num_full] == 0:
            num_full += 1
        self._hand_out(num_full)

    def _hand_out(self, num_full: int) -> None:
        for bucket in self._buckets[self._num_full : num_full]:
            self.queue.begin(partial(self._finish, bucket))
        self._num_full = num_full
