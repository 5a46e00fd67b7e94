"""What the local executor can do to a job, kind by kind; `chaos.scenario.kinds` says what each means.

An act does its fault and says what it hit, or returns None if nothing is there to be hit now: it is asked again.
"""

from __future__ import annotations

from chaos.real.acts import (
    etcd,
    network,
    processes,
    storage,
    tracker,
    training_set,
    workers,
)
from chaos.real.acts.job_view import Act
from chaos.real.acts.outcome import Struck, Undo

ACTS: dict[str, Act] = {
    **processes.ACTS,
    **network.ACTS,
    **etcd.ACTS,
    **storage.ACTS,
    **tracker.ACTS,
    **training_set.ACTS,
    **workers.ACTS,
}

__all__ = ["ACTS", "Act", "Struck", "Undo"]
