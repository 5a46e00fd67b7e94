"""Worker processes that have ended although their batches are needed, and scripts that would train in each of them.

torch reports a lost worker from a signal handler, wherever the process is at that moment. This module does not
import torch, so that the supervisor can ask.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from elastic_train.errors import ConfigError, ElasticTrainError, UnfinishedError
from rendezvous.agent.worker_end import described, memory_kills

UNGUARDED_CODE = 64
UNGUARDED = (
    "data.num_workers starts processes that import the script again, and it calls elastic_train.train when it is "
    'imported: put that call below `if __name__ == "__main__":`, or set data.num_workers to 0'
)

NOTICED_S = 1.0
"""How much later than the end of its connections that of a process is known, at most."""

_needed: dict[BaseProcess, int | None] = {}
"""The workers that must not end yet, and how many processes were killed for memory before each."""


def need(worker: BaseProcess) -> None:
    """Note a worker that has just been started."""
    _needed[worker] = memory_kills()


def needed() -> set[BaseProcess]:
    """Return the workers that must not end yet."""
    return {*_needed}


def need_no_more(workers: Iterable[BaseProcess]) -> None:
    """Forget workers, which may end from now on."""
    for worker in workers:
        _needed.pop(worker, None)


def ended_too_soon(patience_s: float = 0.0, workers: Collection[BaseProcess] | None = None) -> ElasticTrainError | None:
    """Return what is wrong if one of some workers, by default all, has ended, or does in time, while it is needed."""
    asked = needed() if workers is None else workers
    ending = wait([worker.sentinel for worker in asked], patience_s)
    ended = [worker for worker in asked if worker.sentinel in ending]
    if not ended:
        return None
    ended[0].join(NOTICED_S)  # its connections are closed a moment before it has ended
    code = ended[0].exitcode
    if code == UNGUARDED_CODE:
        return ConfigError(UNGUARDED)
    how = "exited with 0" if code == 0 else described(code or 0, _needed[ended[0]])
    return UnfinishedError(
        f"a worker process of the loader (data.num_workers) {how} while its batches were needed: the task's collate or "
        "a library ended it, or the system did. With data.num_workers: 0 this process reads the data itself"
    )


def refuse_unguarded() -> None:
    """End a process that trains because it has imported a script to become a worker process of that script's own."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os.write(2, f"error: {UNGUARDED}\n".encode())
        os._exit(UNGUARDED_CODE)
