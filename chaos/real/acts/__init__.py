"""Faults that the local executor can inject, by kind; `chaos.scenario.kinds` defines them.

An act injects its fault and returns what it hit, or None if there is no target now: it is then called again. The act of
a kind is the function of its name.
"""

from __future__ import annotations

from chaos.real.acts import etcd, network, processes, storage, workers
from chaos.real.acts.job_view import Act, Struck, Undo
from chaos.scenario.kinds import LOCAL

_FUNCTIONS = {**vars(processes), **vars(network), **vars(etcd), **vars(storage), **vars(workers)}
ACTS: dict[str, Act] = {
    **{kind: _FUNCTIONS[kind] for kind in LOCAL if kind in _FUNCTIONS},
    **dict.fromkeys(storage.ON_S3, storage.spoil_s3),
}

__all__ = ["ACTS", "Act", "Struck", "Undo"]
