"""Seeds over the machine's cores: one process for each, the outcomes in the order of the seeds.

Threads that pass a baton run faster where they share a core, so every process keeps to one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection

from chaos.sim.simulate import Case, Outcome, simulate

DrawCase = Callable[[int], Case]


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def simulate_each(seeds: Sequence[int], draw: DrawCase, num_processes: int) -> Generator[Outcome, None, None]:
    """Yield the outcome of every seed, in their order, whatever the number of processes."""
    if num_processes == 1:
        with keeping_to(cores()[0]):
            for seed in seeds:
                yield simulate(draw(seed))
        return
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as ends:
        answers = []
        for place in range(num_processes):
            receiving, sending = context.Pipe(duplex=False)
            mine = seeds[place::num_processes]
            core = cores()[place % len(cores())]
            process = context.Process(target=_serve, args=(sending, mine, draw, core), daemon=True)
            process.start()
            sending.close()
            ends.callback(process.join)
            ends.callback(process.terminate)
            answers.append(receiving)
        for turn in range(len(seeds)):
            yield answers[turn % num_processes].recv()


@contextlib.contextmanager
def keeping_to(core: int) -> Iterator[None]:
    """Let this process run on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _serve(answers: Connection, seeds: Sequence[int], draw: DrawCase, core: int) -> None:
    # What the command does when it is told to end is not for these: it ends them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with keeping_to(core):
        for seed in seeds:
            answers.send(simulate(draw(seed)))
