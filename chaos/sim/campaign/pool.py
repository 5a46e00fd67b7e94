"""Run seeds on all cores: one process per core, outcomes in seed order."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from chaos.sim.campaign.simulate import Case, Outcome, simulate

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

DrawCase = Callable[[int], Case]
MOST_UNSEEN = 50_000
"""Number of allocations between two garbage collections."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def simulate_each(seeds: Sequence[int], draw: DrawCase, num_processes: int) -> Generator[Outcome, None, None]:
    """Yield the outcome of every seed in order, whatever the number of processes.

    Each process takes the next seed when it is free: some seeds take a hundred times as long as others.
    """
    if num_processes == 1:
        for seed in seeds:
            yield simulate(draw(seed))
        return
    import torch._dynamo  # noqa: F401 - the first optimizer imports it: once, and not in each process

    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as ends:
        answers, num_taken = list[Connection](), context.Value("q", 0)
        for _ in range(num_processes):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(sending, seeds, draw, num_taken), daemon=True)
            process.start()
            sending.close()
            ends.callback(process.join)
            ends.callback(process.terminate)
            answers.append(receiving)
        yield from _in_order(answers)


def _in_order(answers: list[Connection]) -> Iterator[Outcome]:
    early: dict[int, Outcome] = {}
    turn = 0
    while answers:
        for ready in wait(answers):
            assert isinstance(ready, Connection), "nothing else is waited for"
            answer = ready.recv()
            if answer is None:
                answers.remove(ready)
                continue
            place, early[place] = answer
            while turn in early:
                yield early.pop(turn)
                turn += 1


def _serve(answers: Connection, seeds: Sequence[int], draw: DrawCase, num_taken: Synchronized[int]) -> None:
    # The command's signal handlers are not for the workers: SIGTERM ends them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # imported objects stay: garbage collections need not scan them
    gc.set_threshold(MOST_UNSEEN)
    while (place := _take(num_taken)) < len(seeds):
        answers.send((place, simulate(draw(seeds[place]))))
    answers.send(None)


def _take(num_taken: Synchronized[int]) -> int:
    """Return the index of the next seed that no process has taken."""
    with num_taken.get_lock():
        num_taken.value += 1
        return num_taken.value - 1
