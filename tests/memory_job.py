"""Complete jobs in memory: each rank runs the product's command as a thread of one process, one thread at a time.

`start` has the arguments and result of `tests.conftest.start`. The whole product runs, from configuration to result:
data, steps, sums, commits to a real folder, restores, validations. Replaced is only what belongs to a process: its
environment (that of the running rank), signals, the watchdog, and gloo.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from elastic_train.checkpoint.saving import background_saves
from elastic_train.config.schema import Config
from elastic_train.job.optimizers.choice import OptimizerChoice
from elastic_train.parallel.group import Group
from elastic_train.system import failpoints
from elastic_train.system.preemption import LeaveRequest
from elastic_train.system.watchdog import Watchdog
from elastic_train.training import loop, supervisor
from elastic_train.training import run as product
from elastic_train.world import agreement, forming
from tests.conftest import Finished, environ_of
from tests.memory_machine import Machine, die, let_others_run, machine_here, rank_here, when_all_have_ended
from tests.memory_world import group_of

LOOK_EVERY_S = 1e-3
"""Seconds that a rank waits for its save before it lets other ranks run."""


class Loss(NamedTuple):
    """The loss of a rank after its `nth` exchange, or the `nth` time that it reaches a failpoint.

    With `part` it is lost later: after that many times the exchanges since it last reached the failpoint.
    """

    rank: int
    nth: int
    point: str | None = None
    part: float | None = None


AT_SECOND_COMMIT = Loss(0, 2, "commit")
"""When the first commit exists."""


def start(
    arguments: list[str],
    *,
    num_ranks: int | None = None,
    environ: Mapping[str, str] | None = None,
    lose: Loss | None = None,
    on_devices: bool = False,
) -> Finished:
    """Run `python -m elastic_train ...` as one rank, or as `num_ranks` ranks, in this process.

    `on_devices` gives ranks fake devices, as in `tests.memory_world`.
    """
    path, *overrides = arguments
    losses = () if lose is None else (lose,)
    with installed(losses) as output:
        environments = [{**place, **(environ or {})} for place in _places(num_ranks)]
        machine = Machine(num_ranks or 1, exchanges(losses), on_devices=on_devices, environments=environments)
        codes = machine.run(lambda rank: product.run(Path(path), overrides))
    found = tuple(-9 if code is None else code for code in codes)
    return Finished(next((code for code in found if code), 0), output.getvalue(), found)


def _places(num_ranks: int | None) -> list[dict[str, str]]:
    if num_ranks is None:
        return [{}]
    return [{"WORLD_SIZE": str(num_ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


class _Time(types.SimpleNamespace):
    """The clock of modules that wait for peers without an exchange."""

    monotonic, perf_counter = staticmethod(time.monotonic), staticmethod(time.perf_counter)

    @staticmethod
    def sleep(seconds: float) -> None:
        let_others_run()


class _NoSignals(LeaveRequest):
    """A leave request that never comes: signals belong to the main thread and the tests."""

    def __init__(self) -> None:
        with mock.patch("elastic_train.system.preemption.requests", tuple):
            super().__init__()


class _Unwatched(Watchdog):
    """A watchdog without a thread: a hanging rank is detected by the machine or by pytest."""

    def _start(self) -> None:
        """Start no thread."""


def _supervise(config: Config, leave: LeaveRequest, started_at: float, how_far: supervisor.HowFar) -> supervisor.Ended:
    """Supervise a rank; its threads and autograd hooks end with the job, as those of a process would."""
    try:
        return supervisor.supervise(config, leave, started_at, how_far)
    finally:
        if (state := how_far.state) is not None:
            when_all_have_ended(state.shards._close_sums)


def exchanges(losses: Iterable[Loss]) -> dict[int, int]:
    """Return the ranks that are lost at an exchange, with the exchange's number."""
    return {lose.rank: lose.nth for lose in losses if lose.point is None}


def _losing(losses: Iterable[Loss]) -> Callable[[Path, str], None]:
    """Return the handler of a failpoint that loses ranks."""
    places = {lose[:3]: lose.part for lose in losses}
    seen, last = Counter[tuple[int, str]](), Counter[tuple[int, str]]()

    def come(_: Path, point: str) -> None:
        if (rank := rank_here()) is None:
            return
        seen[rank, point] += 1
        now = machine_here().num_exchanges[rank]
        since, last[rank, point] = now - last[rank, point], now
        if (place := (rank, seen[rank, point], point)) in places:
            if (part := places[place]) is None:
                die()
            machine_here().lose_after(rank, int(part * since))

    return come


def _once(function: Callable[..., None]) -> Callable[..., None]:
    """Return a check that passes at once for arguments that have passed before: all ranks check the same."""
    passed = set[tuple[object, ...]]()

    def checked(owner: object, *arguments: Hashable, **options: Hashable) -> None:
        key = arguments, tuple(options.items())
        if key not in passed:
            function(owner, *arguments, **options)
            passed.add(key)

    return checked


def _connect(prefix: str, timeout_s: float, *_: object) -> Group:
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    return group_of(prefix, rank, size)


@contextlib.contextmanager
def installed(losses: Iterable[Loss]) -> Iterator[io.StringIO]:
    """Let the product run in this process and restore every process-wide change afterwards. Yields the output."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    turn_s = sys.getswitchinterval()
    with contextlib.ExitStack() as undo:
        for owner, name, stand_in in (
            (failpoints, "_folder", Path("in memory")),
            (failpoints, "_look", _losing(losses)),
            (product, "_begin", _NoSignals),
            (product, "supervise", _supervise),
            (product, "_is_launched", lambda: False),
            (supervisor, "Watchdog", _Unwatched),
            (forming, "connect", _connect),
            (OptimizerChoice, "rehearse", _once(OptimizerChoice.rehearse)),
            *((module, "time", _Time) for module in (agreement, loop)),
            (background_saves, "LOOK_EVERY_S", LOOK_EVERY_S),
        ):
            undo.enter_context(mock.patch.object(owner, name, stand_in))
        undo.enter_context(mock.patch.dict(os.environ, environ_of(), clear=True))
        undo.enter_context(contextlib.redirect_stdout(output))
        undo.enter_context(contextlib.redirect_stderr(output))
        logging.root.addHandler(handler)
        undo.callback(logging.root.removeHandler, handler)
        sys.setswitchinterval(product.TURN_S)
        undo.callback(sys.setswitchinterval, turn_s)
        undo.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        try:
            yield output
        except BaseException as error:
            error.add_note(output.getvalue())
            raise
