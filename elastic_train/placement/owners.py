"""Owners: of the holders of each grain, the one that finishes its gradient's sum, and that writes it in commits.

Every grain that is held has one owner, and what ranks own is as even as whole grains allow: with copies, a rank owns
about its holdings' part of one copy. So a sum is finished once, and what its owner gives to the other holders is all
that copies cost: a step's volume is that of an all-reduce, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.placement.recut import Holder, plan_recut


def owned_of(holdings: Sequence[Int64s], spans: Int64s, owners: Sequence[int] | None = None) -> list[Int64s]:
    """Return the numbers of the grains that each rank owns, by rank, ascending.

    `holdings` are what ranks hold, by rank; `spans` has the elements of every grain, shape (grains,). With `owners`
    none but these ranks own anything. Raises LookupError if a grain has no holder that may own it.
    """
    may = range(len(holdings)) if owners is None else owners
    none = np.empty(0, dtype=np.int64)
    had = [Holder((0, 0), grains if rank in may else none) for rank, grains in enumerate(holdings)]
    # A rank that is not there, and wants everything, is served by the holders as evenly as they can.
    wants = [none] * len(holdings) + [np.arange(spans.size, dtype=np.int64)]
    plan = plan_recut([*had, Holder()], wants, spans)
    if plan.lost.size:
        raise LookupError(f"{plan.lost.size} of {spans.size} grains have no holder among the ranks {list(may)}")
    owned = [none] * len(holdings)
    for transfer in plan.transfers:
        owned[transfer.giver] = transfer.grains
    return owned
