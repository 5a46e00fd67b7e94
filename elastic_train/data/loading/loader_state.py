"""A loader's state: a place of two integers, and the fingerprint of what it is a place in; all else is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from elastic_train.core.mixture.dealing import Mixture, RunOrder
from elastic_train.core.order import VERSION, Cursor
from elastic_train.errors import ConfigError


def cursor_of(state: Mapping[str, object]) -> Cursor:
    """Return the cursor in a loader's state; raise ConfigError if it is none."""
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


def fingerprint_of(order: RunOrder, digest: str, micro_batch: int) -> str:
    """Return what tells the places of an order of a dataset, by the digest of its manifest, from those of others."""
    shares = order.shares if isinstance(order, Mixture) else ()
    whole = hashlib.sha256(repr((VERSION, digest, micro_batch, shares)).encode())
    for one in order.orders if isinstance(order, Mixture) else (order,):
        arranged = one.arrangement.fingerprint if one.arrangement else 0
        whole.update(repr((one.seed, one.num_lanes, one.block_row_groups, one.is_shuffled, arranged)).encode())
        whole.update(one.group_rows.tobytes())
    return whole.hexdigest()[:16]
