"""Faults that the local executor can inject, by kind; `chaos.scenario.kinds` defines them.

An act injects its fault and returns what it hit, or None if there is no target now: it is then called again.
"""

from __future__ import annotations

from chaos.real.acts import (
    etcd,
    network,
    processes,
    storage,
    workers,
)
from chaos.real.acts.job_view import Act, Struck, Undo

ACTS: dict[str, Act] = {
    **processes.ACTS,
    **network.ACTS,
    **etcd.ACTS,
    **storage.ACTS,
    **workers.ACTS,
}

__all__ = ["ACTS", "Act", "Struck", "Undo"]
