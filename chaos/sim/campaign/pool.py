"""Seeds over the machine's cores: one process for each, the outcomes in the order of the seeds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection

from chaos.sim.campaign.simulate import Case, Outcome, simulate

DrawCase = Callable[[int], Case]


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def simulate_each(seeds: Sequence[int], draw: DrawCase, num_processes: int) -> Generator[Outcome, None, None]:
    """Yield the outcome of every seed, in their order, whatever the number of processes."""
    if num_processes == 1:
        for seed in seeds:
            yield simulate(draw(seed))
        return
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as ends:
        answers = []
        for place in range(num_processes):
            receiving, sending = context.Pipe(duplex=False)
            mine = seeds[place::num_processes]
            process = context.Process(target=_serve, args=(sending, mine, draw), daemon=True)
            process.start()
            sending.close()
            ends.callback(process.join)
            ends.callback(process.terminate)
            answers.append(receiving)
        for turn in range(len(seeds)):
            yield answers[turn % num_processes].recv()


def _serve(answers: Connection, seeds: Sequence[int], draw: DrawCase) -> None:
    # What the command does on a signal is not for these: it ends them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for seed in seeds:
        answers.send(simulate(draw(seed)))
