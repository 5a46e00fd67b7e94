"""Detect worker processes that ended while needed, and scripts that would train in each of their workers.

torch reports a lost worker from a signal handler, wherever the process is then. This module does not import torch, so
that the supervisor can use it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from elastic_train.errors import ConfigError, ElasticTrainError, UnfinishedError
from rendezvous.agent.worker_end import RecentMemoryKills, described

UNGUARDED_CODE = 64
UNGUARDED = (
    "data.num_workers starts processes that import the script again, and it calls elastic_train.train when it is "
    'imported: put that call below `if __name__ == "__main__":`, or set data.num_workers to 0'
)

NOTICED_S = 1.0
"""Most seconds between the end of a process's connections and its exit."""

_needed: dict[BaseProcess, RecentMemoryKills] = {}
"""Workers that must not end yet, with the count of out-of-memory kills before each."""


def need(worker: BaseProcess) -> None:
    """Register a worker that has just been started."""
    _needed[worker] = RecentMemoryKills()


def needed() -> set[BaseProcess]:
    """Return the workers that must not end yet."""
    return {*_needed}


def need_no_more(workers: Iterable[BaseProcess]) -> None:
    """Forget workers, which may end from now on."""
    for worker in workers:
        _needed.pop(worker, None)


def are_at_work() -> None:
    """Note that the workers are alive: kills for memory until now were not theirs."""
    for kills in _needed.values():
        kills.look()


def ended_too_soon(patience_s: float = 0.0, workers: Collection[BaseProcess] | None = None) -> ElasticTrainError | None:
    """Return the error if a needed worker (by default any) has ended, or ends within `patience_s`; else None."""
    asked = needed() if workers is None else workers
    ending = wait([worker.sentinel for worker in asked], patience_s)
    ended = [worker for worker in asked if worker.sentinel in ending]
    if not ended:
        return None
    ended[0].join(NOTICED_S)  # its connections are closed just before it ends
    code = ended[0].exitcode
    if code == UNGUARDED_CODE:
        return ConfigError(UNGUARDED)
    how = "exited with 0" if code == 0 else described(code or 0, _needed[ended[0]].before)
    return UnfinishedError(
        f"a worker process of the loader (data.num_workers) {how} while its batches were needed: the task's collate or "
        "a library ended it, or the system did. With data.num_workers: 0 this process reads the data itself"
    )


def refuse_unguarded() -> None:
    """End a process that trains because it imported a script in order to become that script's worker."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os.write(2, f"error: {UNGUARDED}\n".encode())
        os._exit(UNGUARDED_CODE)
