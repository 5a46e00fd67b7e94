"""Run measurements on several ranks, each in its own process, and collect their results.

They are forked from a process with all imports, so that a start takes milliseconds instead of seconds of CPU time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from elastic_train.parallel.group import Group

P = ParamSpec("P")
TIMEOUT_S = 300.0
_IMPORTED = ["benchmarks.sharding.jobs", "benchmarks.sharding.peers", "benchmarks.sharding.commits", "torch._dynamo"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rank's world, and a folder that all its ranks can write to."""

    group: Group
    folder: Path

    def again(self, name: str, size: int) -> Group:
        """Form another world of the first `size` ranks."""
        return self.of(range(size), name)

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


def run(measure: Callable[Concatenate[Meeting, P], object], size: int, *args: P.args, **named: P.kwargs) -> list[Any]:
    """Run a measurement on `size` ranks; return each rank's result, which must be JSON-compatible."""
    assert not named, "a process is given its arguments by their places"
    multiprocessing.set_forkserver_preload(_IMPORTED)
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
