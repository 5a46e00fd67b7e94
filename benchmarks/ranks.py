"""Run measurements on several ranks, each in its own process, and collect their results.

They are forked from a process with all imports, so that a start takes milliseconds instead of seconds of CPU time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from benchmarks.figures import Effort
from elastic_train.parallel.group import Group

P = ParamSpec("P")
TIMEOUT_S = 300.0
_IMPORTED = ["torch._dynamo", "benchmarks.sharding.peers", "benchmarks.sharding.commits"]
Times = tuple[float, float]
"""Wall seconds and CPU seconds."""
Sides = Sequence[Sequence[Times]]
"""Each side's times, by turn."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rank's world, and a folder that all its ranks can write to."""

    group: Group
    folder: Path

    def of(self, members: Sequence[int], name: str, *, is_broken: Callable[[float], bool] | None = None) -> Group:
        """Form another world of some of these ranks, in their order; a live one if it has `is_broken`."""
        rank, size = list(members).index(self.group.rank), len(members)
        # A file store that was never written to waits for its file when it is destroyed.
        return Group(
            rank, size, FileStore(str(self.folder / name), size) if size > 1 else None, TIMEOUT_S, is_broken=is_broken
        )

    def timed(self, act: Callable[[], object]) -> float:
        """Return this rank's seconds for `act`, which all ranks start together."""
        self.group.barrier()
        started = time.perf_counter()
        act()
        return time.perf_counter() - started

    def join_torch(self, *, any_algorithm: bool = False) -> None:
        """Form torch's default group of the same ranks, for a peer; with `any_algorithm`, both sides may use any."""
        if any_algorithm:
            torch.set_deterministic_debug_mode("default")
        store = dist.FileStore(str(self.folder / "peer"), self.group.size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.group.rank, world_size=self.group.size)

    def in_turn(
        self,
        sides: Sequence[Callable[[], object]],
        rounds: int,
        untimed: int = 2,
        after: Callable[[], object] = lambda: None,
    ) -> Sides:
        """Return the times of sides that take turns (A B B A ...), all ranks together; `after` each turn is untimed."""
        times: list[list[Times]] = [[] for _ in sides]
        for number in range(rounds + untimed):
            for side, act in list(enumerate(sides))[:: 1 if number % 2 else -1]:
                self.group.barrier()
                began = time.perf_counter(), time.process_time()
                act()
                times[side].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            after()
        return [side[untimed:] for side in times]


def medians(ranks: Sequence[Sequence[Times]]) -> Times:
    """Return medians over turns: a turn's wall time is that of its slowest rank, its CPU time the sum over ranks."""
    turns = list(zip(*ranks, strict=True))
    clock = statistics.median(max(seconds for seconds, _ in turn) for turn in turns)
    return clock, statistics.median(sum(cpu for _, cpu in turn) for turn in turns)


def compared(effort: Effort, names: Sequence[str], ranks: Sequence[Sides], case: str = "") -> dict[str, float]:
    """Return the peer's time over ours, by the clock and, with a second name, by the processor."""
    ours, peer = (medians([rank[side] for rank in ranks]) for side in range(2))
    figures = {}
    for name, mine, theirs in zip(names, ours, peer, strict=False):
        effort.say(f"{name} {case}: {1e3 * mine:.1f} ms, the peer {1e3 * theirs:.1f} ms")
        figures[name] = round(theirs / mine, 3)
    return figures


def run(measure: Callable[Concatenate[Meeting, P], object], size: int, *args: P.args, **named: P.kwargs) -> list[Any]:
    """Run a measurement on `size` ranks; return each rank's result, which must be JSON-compatible."""
    assert not named, "a process is given its arguments by their places"
    multiprocessing.set_forkserver_preload([*_IMPORTED, *({measure.__module__} - {"__main__"})])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_begin, (size, folder, measure, args), size, start_method="forkserver")  # type: ignore[no-untyped-call]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def _begin(rank: int, size: int, folder: str, measure: Callable[..., object], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    group = Group(rank, size, FileStore(f"{folder}/world", size), TIMEOUT_S)
    found = measure(Meeting(group, Path(folder)), *args)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)
