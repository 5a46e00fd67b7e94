"""Compare saves with torch.save, dcp.save and dcp.async_save: stall of training, write speed, read speed.

    python -m benchmarks.checkpoint [--json] [--sizes 0.1,1,4] [--rounds 5]

All sides save the same state (a model's weights and AdamW's moments, sizes in GB) in the same process, in turn. A stall
is the time that the training thread spends in a save: in the call at the step boundary, and, where a copy runs
beside forward and backward, waiting for it before the update. A whole save ends when its files are there: with the
call itself, or, where it runs in the background, after the step beside it at the earliest. States of more than 1 GB
get 3 rounds, and of more than 2 GB `dcp.async_save` is measured with kept memory only: 4 GB need about 14 GB of memory
(the state, gradients, and two staged copies). The last line is JSON:

* `stall_ms_per_gb_p50`: ours, the worst of the sizes (goal at most 110);
* `stall_vs_best_peer`: ours over the quickest peer's, `dcp.async_save` with kept memory included (at most 0.25);
* `write_vs_disk`: bytes a second of a whole save, hashed and published, over a bare write of as many with a commit's
  syncs, past the page cache or through it, whichever is quicker (see `bare`); the worst of the sizes (at least 0.9);
* `load_vs_dcp`: time of dcp.load over ours, which checks every block (at least 1.0);
* `by_size`: all of it, and p99, the share of a step, and loads from the disk instead of the page cache, by size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.multiprocessing.spawn import spawn

from benchmarks.checkpoint.bare import WAYS, evict, write_bare
from benchmarks.checkpoint.savers import OURS, Training, all_sides, committed, open_saves, train
from elastic_train.checkpoint import Retention, SaveMemory, load, open_store, prune

GOALS = {"stall": 110.0, "vs_peer": 0.25, "write": 0.9, "load": 1.0}
FEW_ROUNDS, LARGE_GB, HUGE_GB = 3, 1.0, 2.0


@dataclass
class Figures:
    """Measurements of one size in seconds, by side and in order; `cold_loads` are read from the disk."""

    num_bytes: int = 0
    steps: list[float] = field(default_factory=list)
    stalls: dict[str, list[float]] = field(default_factory=dict)
    wholes: dict[str, list[float]] = field(default_factory=dict)
    disk: dict[str, list[float]] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)
    cold_loads: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    """Run all sizes; print a table, then one JSON line."""
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
    training, num_bytes = train(size_gb)
    figures = Figures(num_bytes)
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
    """Save with all sides in turn; the first round warms up and is not counted."""
    sides = dict(all_sides(training, can_stage_twice=figures.num_bytes <= HUGE_GB * 1e9))
    for number in range(rounds + 1):
        for name, prepare in sides.items():
            target = folder / f"{name}-{number}".replace(" ", "-")
            begin = prepare(target)
            started = time.perf_counter()
            await_copy, wait = begin()
            stall = whole = time.perf_counter() - started
            training.compute()
            before = time.perf_counter()
            await_copy()
            stall += time.perf_counter() - before
            training.update()
            if wait is not None:
                wait()
                whole = time.perf_counter() - started
            if number:
                figures.stalls.setdefault(name, []).append(stall)
                figures.wholes.setdefault(name, []).append(whole)
            shutil.rmtree(target)


def _measure_disk_and_loads(training: Training, figures: Figures, rounds: int, folder: Path) -> None:
    """Write the state's bytes bare and as a commit without training, in turn; then load it with ours and with dcp.

    The commits belong to one run: they go to one store, one after the other, and only the newest is kept.
    """
    store, state = open_store(str(folder / "commits")), training.state.shards.share.held()
    saves = open_saves(store, SaveMemory())
    for number in range(rounds + 1):
        for way in WAYS if number else ():
            figures.disk.setdefault(way, []).append(write_bare(folder, figures.num_bytes, way))
        started = time.perf_counter()
        saves.begin(
            training.state.shards.share.held(),
            replace(training.facts(), step=number + 1),
            is_still=training.state.pieces.only_update_changes(),
        )
        record = committed(saves)
        whole = time.perf_counter() - started
        prune(store, Retention.of(last=1), newest=record)
        if number:
            figures.wholes.setdefault("alone", []).append(whole)
    del saves
    saver.save(state, checkpoint_id=folder / "dcp")
    commit, other = folder / "commits" / record.attempt, folder / "dcp"
    sides = {OURS: (commit, partial(load, store, record)), "dcp": (other, partial(loader.load, checkpoint_id=other))}
    for number in range(rounds + 1):
        for name, (files, read) in sides.items():
            if number:
                figures.loads.setdefault(name, []).append(_timed(read, state))
            evict(files)
            figures.cold_loads.setdefault(name, []).append(_timed(read, state))


def _timed(read: Callable[[dict[str, object]], object], state: dict[str, object]) -> float:
    started = time.perf_counter()
    read(state)
    return time.perf_counter() - started


def _summary(figures: Figures) -> dict[str, object]:
    gigabytes = figures.num_bytes / 1e9
    stalls = {name: statistics.median(times) for name, times in figures.stalls.items()}
    best = min(seconds for name, seconds in stalls.items() if name != OURS)
    step, whole = statistics.median(figures.steps), statistics.median(figures.wholes["alone"])
    disk = {way: statistics.median(times) for way, times in figures.disk.items()}
    return {
        "stall_ms_per_gb_p50": round(1e3 * stalls[OURS] / gigabytes, 1),
        "stall_ms_per_gb_p99": round(1e3 * _p99(figures.stalls[OURS]) / gigabytes, 1),
        "stall_share_of_step": round(stalls[OURS] / step, 3),
        "stall_vs_best_peer": round(stalls[OURS] / best, 3),
        "peers_ms_per_gb_p50": {
            name: round(1e3 * seconds / gigabytes, 1) for name, seconds in stalls.items() if name != OURS
        },
        "write_vs_disk": round(min(disk.values()) / whole, 3),
        "write_vs_disk_by_way": {way: round(seconds / whole, 3) for way, seconds in disk.items()},
        "write_gb_per_s": round(gigabytes / whole, 2),
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
    return {**highest, **{name: min(values(name)) for name in ("write_vs_disk", "load_vs_dcp")}}


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
