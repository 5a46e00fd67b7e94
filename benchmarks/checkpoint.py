"""What a save costs training, and how fast it is written and read: against torch.save, dcp.save and dcp.async_save.

    python -m benchmarks.checkpoint [--json] [--sizes 0.1,1,4] [--rounds 5]

All sides save the same state (a model's weights and AdamW's moments, sizes in GB) in the same process, in turn. A stall
is the time that the training thread spends in a save: in the call at the step boundary, and, where a copy goes on
beside forward and backward, waiting for it before the update. States of more than 1 GB get 3 rounds, and of more than
2 GB `dcp.async_save` is measured with kept memory only: 4 GB need about 14 GB of memory (the state, gradients, and two
staged copies). The last line is JSON:

* `stall_ms_per_gb_p50`: ours, the worst of the sizes (goal at most 110);
* `stall_vs_best_peer`: ours over the quickest peer's, `dcp.async_save` with kept memory included (at most 0.25);
* `write_vs_disk`: bytes a second of a whole save, hashed and published, over a bare write of as many, synced with its
  folder, at the largest size (at least 0.9; few bytes go to the disk faster than a core hashes them);
* `load_vs_dcp`: time of dcp.load over ours, which checks every block (at least 1.0);
* `by_size`: all of it, and p99, the share of a step, and loads from the disk instead of the page cache, by size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.multiprocessing.spawn import spawn

from elastic_train.account import Account
from elastic_train.checkpoint import (
    CommitFacts,
    CommitRecord,
    CommitWriter,
    Retention,
    Role,
    SaveMemory,
    Saves,
    load,
    open_store,
    prune,
)
from elastic_train.checkpoint.stores import Store
from elastic_train.config import OptimizerConfig
from elastic_train.coverage import CoverageSums
from elastic_train.fencing import StoreFence
from elastic_train.order import Cursor
from elastic_train.state import AppliedState, build_state

WIDTH, ROWS = 1024, 64
BYTES_OF_LAYER = 3 * 4 * (WIDTH * WIDTH + WIDTH)
GOALS = {"stall": 110.0, "vs_peer": 0.25, "write": 0.9, "load": 1.0}
CHUNK_BYTES = 8 << 20
FEW_ROUNDS, LARGE_GB, HUGE_GB = 3, 1.0, 2.0
OURS = "elastic_train"


@dataclass
class Figures:
    """What one size gave, in seconds, by side and in the order measured; `cold_loads` are read from the disk."""

    num_bytes: int = 0
    steps: list[float] = field(default_factory=list)
    stalls: dict[str, list[float]] = field(default_factory=dict)
    wholes: dict[str, list[float]] = field(default_factory=dict)
    disk: list[float] = field(default_factory=list)
    loads: dict[str, list[float]] = field(default_factory=dict)
    cold_loads: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Training:
    """A training loop to be stalled: AdamW over linear layers, one thread."""

    state: AppliedState
    batch: torch.Tensor

    def compute(self) -> None:
        """Run forward and backward."""
        self.state.model(self.batch).square().mean().backward()

    def update(self) -> None:
        self.state.apply(Cursor(), CoverageSums(), 1, Account())
        self.state.optimizer.zero_grad(set_to_none=False)

    def facts(self) -> CommitFacts:
        return CommitFacts(
            step=self.state.step,
            cursor=self.state.cursor,
            coverage=self.state.coverage,
            rng={},
            metrics={},
            config_digest="",
            manifest_digest="",
            world_size=1,
        )


Waits = tuple[Callable[[], None], Callable[[], None]]
"""What waits until the state may change, and what waits for the end of the save."""
Side = Callable[[Path], Callable[[], Waits]]
"""Prepares a folder for a save, and returns what begins it."""


def main() -> None:
    """Run all sizes and print a table, then one JSON line."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print the last line only")
    arguments.add_argument("--sizes", default="0.1,1,4", help="sizes of the state in GB (default: 0.1,1,4)")
    arguments.add_argument("--rounds", type=int, default=5, help="saves of each side (default: 5)")
    arguments.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    chosen = arguments.parse_args()
    by_size: dict[str, dict[str, object]] = {}
    for size in chosen.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            rounds = min(chosen.rounds, FEW_ROUNDS) if float(size) > LARGE_GB else chosen.rounds
            spawn(_measure, args=(float(size), rounds, folder))  # type: ignore[no-untyped-call]
            figures = Figures(**json.loads((Path(folder) / "figures.json").read_text()))
        by_size[size] = _summary(figures)
        if not chosen.json:
            _show(size, figures, by_size[size])
    print(json.dumps({**_worst(by_size), "by_size": by_size}))


def _measure(rank: int, size_gb: float, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    layers = max(1, round(size_gb * 1e9 / BYTES_OF_LAYER))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    training = Training(build_state(model, OptimizerConfig(), 10_000, "cpu", is_fp16=False), torch.randn(ROWS, WIDTH))
    figures = Figures(num_bytes=layers * BYTES_OF_LAYER)
    for _ in range(2):
        training.compute()
        training.update()
    _measure_steps(training, figures, rounds)
    _measure_saves(training, figures, rounds, Path(folder))
    _measure_disk_and_loads(training, figures, rounds, Path(folder))
    (Path(folder) / "figures.json").write_text(json.dumps(figures.__dict__))
    dist.destroy_process_group()


def _measure_steps(training: Training, figures: Figures, rounds: int) -> None:
    for _ in range(rounds):
        started = time.perf_counter()
        training.compute()
        training.update()
        figures.steps.append(time.perf_counter() - started)


def _measure_saves(training: Training, figures: Figures, rounds: int, folder: Path) -> None:
    """Save with all sides in turn; the first round warms up, and is not counted."""
    sides = dict(_sides(training, can_stage_twice=figures.num_bytes <= HUGE_GB * 1e9))
    for number in range(rounds + 1):
        for name, prepare in sides.items():
            target = folder / f"{name}-{number}".replace(" ", "-")
            begin = prepare(target)
            started = time.perf_counter()
            await_copy, wait = begin()
            stall = time.perf_counter() - started
            training.compute()
            before = time.perf_counter()
            await_copy()
            stall += time.perf_counter() - before
            training.update()
            wait()
            if number:
                figures.stalls.setdefault(name, []).append(stall)
                figures.wholes.setdefault(name, []).append(time.perf_counter() - started)
            shutil.rmtree(target)


def _sides(training: Training, *, can_stage_twice: bool) -> Iterator[tuple[str, Side]]:
    memory = SaveMemory()

    def ours(target: Path) -> Callable[[], Waits]:
        saves = _saves(open_store(str(target)), memory)

        def wait() -> None:
            _check(saves)

        def begin() -> Waits:
            saves.begin(training.state.tensors(), training.facts(), is_still=training.state.stillness())
            return saves.await_staging, wait

        return begin

    def torch_save(target: Path) -> Callable[[], Waits]:
        target.mkdir()

        def begin() -> Waits:
            torch.save(training.state.tensors(), target / "state.pt")
            return _nothing, _nothing

        return begin

    def dcp_save(target: Path) -> Callable[[], Waits]:
        def begin() -> Waits:
            saver.save(training.state.tensors(), checkpoint_id=target)
            return _nothing, _nothing

        return begin

    def dcp_async_save(stager: DefaultStager | None, target: Path) -> Callable[[], Waits]:
        def begin() -> Waits:
            promise = saver.async_save(training.state.tensors(), checkpoint_id=target, async_stager=stager)
            return _nothing, _ended(promise)

        return begin

    kept = DefaultStager(StagingOptions(False, False, False, False))
    yield OURS, ours
    yield "torch.save", torch_save
    yield "dcp.save", dcp_save
    if can_stage_twice:
        yield "dcp.async_save", partial(dcp_async_save, None)
    yield "dcp.async_save, kept memory", partial(dcp_async_save, kept)


def _saves(store: Store, memory: SaveMemory) -> Saves:
    fence = StoreFence(store)
    term = fence.claim()
    return Saves(store, CommitWriter(store, fence, term, None), term, Role(0, 1, "benchmark"), memory)


def _check(saves: Saves) -> CommitRecord:
    ended = saves.wait()
    assert ended is not None and ended.commit is not None, f"the save failed: {ended}"
    return ended.commit


def _ended(promise: object) -> Callable[[], None]:
    assert isinstance(promise, Future), "dcp.async_save returns a future of the upload"

    def wait() -> None:
        promise.result()

    return wait


def _nothing() -> None:
    pass


def _measure_disk_and_loads(training: Training, figures: Figures, rounds: int, folder: Path) -> None:
    """Write the state's bytes bare, and as a commit with nothing beside it, in turn; then load it, and with dcp.

    The commits are those of a run that goes on: one behind the other in one store, of which the newest is kept.
    """
    store, state = open_store(str(folder / "commits")), training.state.tensors()
    saves = _saves(store, SaveMemory())
    chunk = torch.randint(0, 255, (CHUNK_BYTES,), dtype=torch.uint8).numpy().data
    for number in range(rounds + 1):
        disk = _write_bare(folder / "bare", chunk, figures.num_bytes)
        started = time.perf_counter()
        saves.begin(
            training.state.tensors(), replace(training.facts(), step=number + 1), is_still=training.state.stillness()
        )
        record = _check(saves)
        whole = time.perf_counter() - started
        prune(store, Retention.of(last=1), verified=record.key)
        if number:
            figures.disk.append(disk)
            figures.wholes.setdefault("alone", []).append(whole)
    del saves
    saver.save(state, checkpoint_id=folder / "dcp")
    commit, other = folder / "commits" / record.attempt, folder / "dcp"
    sides = {OURS: (commit, partial(load, store, record)), "dcp": (other, partial(loader.load, checkpoint_id=other))}
    for number in range(rounds + 1):
        for name, (files, read) in sides.items():
            if number:
                figures.loads.setdefault(name, []).append(_timed(read, state))
            _evict(files)
            figures.cold_loads.setdefault(name, []).append(_timed(read, state))


def _timed(read: Callable[[dict[str, object]], object], state: dict[str, object]) -> float:
    started = time.perf_counter()
    read(state)
    return time.perf_counter() - started


def _evict(folder: Path) -> None:
    """Take a folder's files, which are on the disk, out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _write_bare(path: Path, chunk: memoryview, num_bytes: int) -> float:
    """Write so many bytes, and make them and their name durable."""
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, num_bytes, CHUNK_BYTES):
            file.write(chunk[: num_bytes - at])
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def _summary(figures: Figures) -> dict[str, object]:
    gigabytes = figures.num_bytes / 1e9
    stalls = {name: statistics.median(times) for name, times in figures.stalls.items()}
    best = min(seconds for name, seconds in stalls.items() if name != OURS)
    step = statistics.median(figures.steps)
    return {
        "stall_ms_per_gb_p50": round(1e3 * stalls[OURS] / gigabytes, 1),
        "stall_ms_per_gb_p99": round(1e3 * _p99(figures.stalls[OURS]) / gigabytes, 1),
        "stall_share_of_step": round(stalls[OURS] / step, 3),
        "stall_vs_best_peer": round(stalls[OURS] / best, 3),
        "peers_ms_per_gb_p50": {
            name: round(1e3 * seconds / gigabytes, 1) for name, seconds in stalls.items() if name != OURS
        },
        "write_vs_disk": round(statistics.median(figures.disk) / statistics.median(figures.wholes["alone"]), 3),
        "write_gb_per_s": round(gigabytes / statistics.median(figures.wholes["alone"]), 2),
        "load_vs_dcp": round(_ratio(figures.loads), 3),
        "load_vs_dcp_from_disk": round(_ratio(figures.cold_loads), 3),
        "load_gb_per_s": round(gigabytes / statistics.median(figures.loads[OURS]), 2),
    }


def _ratio(loads: dict[str, list[float]]) -> float:
    return statistics.median(loads["dcp"]) / statistics.median(loads[OURS])


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def _worst(by_size: dict[str, dict[str, object]]) -> dict[str, float]:
    def values(name: str) -> list[float]:
        return [float(str(summary[name])) for summary in by_size.values()]

    highest = {name: max(values(name)) for name in ("stall_ms_per_gb_p50", "stall_vs_best_peer")}
    largest = max(by_size, key=float)
    write = float(str(by_size[largest]["write_vs_disk"]))
    return {**highest, "write_vs_disk": write, "load_vs_dcp": min(values("load_vs_dcp"))}


def _show(size: str, figures: Figures, summary: dict[str, object]) -> None:
    gigabytes, step = figures.num_bytes / 1e9, statistics.median(figures.steps)
    table = Table("side", "stall p50", "p99", "of a step", "whole save", title=f"{size} GB, a step takes {step:.2f} s")
    for name, times in figures.stalls.items():
        middle, whole = statistics.median(times), statistics.median(figures.wholes[name])
        table.add_row(
            name,
            f"{1e3 * middle / gigabytes:.0f} ms/GB",
            f"{1e3 * _p99(times) / gigabytes:.0f} ms/GB",
            f"{100 * middle / step:.1f} %",
            f"{whole:.2f} s",
        )
    Console().print(table)
    Console().print(
        f"stall over the best peer's: {summary['stall_vs_best_peer']} (goal <= {GOALS['vs_peer']}); "
        f"write over the disk's: {summary['write_vs_disk']} (>= {GOALS['write']}); "
        f"load over dcp.load's: {summary['load_vs_dcp']} (>= {GOALS['load']})"
    )


if __name__ == "__main__":
    main()
