"""Faults of a running job: a function per kind inflicts it and returns the processes that it hits.

A fault that hits no process has not happened, except on etcd and storage, which all processes meet sooner or later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chaos.sim.job.fault import SimFault
from chaos.sim.job.fleet import Fleet
from chaos.sim.job.kinds import (
    etcd,
    machines,
    memory,
    network,
    storage,
)
from chaos.sim.machine.kernel import Process

KINDS: Mapping[str, Callable[[Fleet, SimFault], list[Process]]] = {
    **{act.__name__: act for act in (*machines.ACTS, *network.ACTS, *etcd.ACTS, *memory.ACTS)},
    **storage.ACTS,
}
