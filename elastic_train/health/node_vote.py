"""Workers of one node join together or not at all: none becomes a member before all have passed.

Otherwise a node with one broken device would join with its other workers, and cost two regroups: one to admit it, one
when its agent ends it. Workers tell each other through their agent's store.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

WITHIN_S = 10.0
"""Seconds to wait for the other workers; a killed or stopped one is the agent's to judge."""
_FIT = "fit"


def tell_mates(unfit: str) -> str:
    """Report this worker's problem to the node's other workers, "" if it is fit.

    A fit worker waits for the others; return the node's problem, "" if there is none.
    """
    rank, number = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if number == 1:
        return unfit
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=WITHIN_S))
        store.set(_key(rank), unfit or _FIT)
        if unfit:
            return unfit
        others = [_key(one) for one in range(number) if one != rank]
        store.wait(others)
        said = [store.get(key).decode() for key in others]
    except (DistError, KeyError, ValueError):
        return unfit
    return next((text for text in said if text != _FIT), "")


def _key(local_rank: int) -> str:
    return f"health/{local_rank}"
