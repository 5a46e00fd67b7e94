"""A loader's state: two integers, and the fingerprint of the order they refer to; anything else is rejected."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping

from elastic_train.core.mixture import Mixture, RunOrder
from elastic_train.core.order import VERSION, Cursor
from elastic_train.errors import ConfigError

log = logging.getLogger(__name__)


def cursor_of(state: Mapping[str, object]) -> Cursor:
    """Return the cursor in a loader's state; raise ConfigError if it is invalid."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"a loader's state is {type(state).__name__}, not what its state_dict() returned")
    numbers = [state.get(name) for name in ("epoch", "offset")]
    for name, number in zip(("epoch", "offset"), numbers, strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(
                f"a loader's state has {name} {number!r}, not a whole number from 0 on: load what state_dict() returned"
            )
    epoch, offset = numbers
    assert isinstance(epoch, int) and isinstance(offset, int), "it was checked"
    return Cursor(epoch, offset)


def check_place(order: RunOrder, micro_batch: int, cursor: Cursor) -> None:
    """Raise ConfigError if no step begins at a cursor."""
    if order.cursor_at(order.step_of(cursor, micro_batch), micro_batch) != cursor:
        raise ConfigError(
            f"offset {cursor.offset} of epoch {cursor.epoch} is not where a step begins: offsets are multiples of "
            f"micro_batch {micro_batch}, below the samples of the longest lane"
        )


class LoaderStates:
    """Writes and reads loader states of one order and dataset, given its manifest's digest."""

    def __init__(self, order: RunOrder, digest: str, micro_batch: int) -> None:
        self._order, self._digest, self._micro_batch = order, digest, micro_batch

    def write(self, cursor: Cursor) -> dict[str, int | str]:
        """Return the state at a cursor; the same for all lanes of a step, and for any way of reading."""
        return {"epoch": cursor.epoch, "offset": cursor.offset, "order": self._fingerprint}

    def read(self, state: Mapping[str, object]) -> Cursor:
        """Return the cursor of a state; raise ConfigError if it is malformed, or of another order, dataset or
        micro-batch.

        Without a fingerprint it is accepted only at the beginning of an epoch, which is the same in all orders.
        """
        cursor = cursor_of(state)
        known, here = state.get("order"), self._fingerprint
        if known is None and cursor.offset:
            raise ConfigError(
                f"a loader's state without 'order' does not say which order its offset {cursor.offset} is a place in: "
                "if it is this one, give the place as cursor=Cursor(epoch, offset) where the loader is made"
            )
        if known is not None and known != here:
            raise ConfigError(
                f"a loader's state is of order {known!r}, and this loader has {here!r}: dataset, seed, lanes, "
                "micro-batch and blocks of row groups must be those with which it was saved"
            )
        check_place(self._order, self._micro_batch, cursor)
        return cursor

    def num_left(self, begin: Cursor, num_steps: int, cursor: Cursor) -> int:
        """Return the steps left at a cursor of a loader with `num_steps`; raise ConfigError if it is past the last.

        The loader's last step stays the same.
        """
        end = self._order.step_of(begin, self._micro_batch) + num_steps
        step = self._order.step_of(cursor, self._micro_batch)
        if step > end:
            raise ConfigError(
                f"a loader's state is at step {step}, and this loader ends with step {end}: give it more steps "
                "(num_steps), or a later cursor"
            )
        if step == end:
            log.warning("the loaded state is at step %d, with which this loader ends: it yields no step", step)
        return end - step

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self._order, self._digest, self._micro_batch)


def fingerprint_of(order: RunOrder, digest: str, micro_batch: int) -> str:
    """Return a fingerprint of an order, a dataset (by its manifest's digest) and a micro-batch."""
    shares = order.shares if isinstance(order, Mixture) else ()
    whole = hashlib.sha256(repr((VERSION, digest, micro_batch, shares)).encode())
    for one in order.orders if isinstance(order, Mixture) else (order,):
        arranged = one.arrangement.fingerprint if one.arrangement else 0
        whole.update(repr((one.seed, one.num_lanes, one.block_row_groups, one.is_shuffled, arranged)).encode())
        whole.update(one.group_rows.tobytes())
    return whole.hexdigest()[:16]
