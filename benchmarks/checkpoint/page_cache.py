"""Compare writing commits past the page cache (O_DIRECT) with buffered writes.

    python -m benchmarks.checkpoint.page_cache [--sizes 0.25,1] [--rounds 7] [--folder DIR]

Both sides save the same state (sizes in GB) in the same process, in turn, each into a store of its own of which the
newest commit is kept. Per save: wall seconds until it is published and CPU seconds of the process (user + system);
then the seconds that a restart on the same node needs to load it, as the save has left the page cache, and the same
with the files evicted from it (a restart on another node). The last line is JSON: the medians per GB of each side, and
the ratio of buffered to direct.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint.bare import evict
from benchmarks.checkpoint.savers import Training, committed, open_saves, train
from elastic_train.checkpoint import CommitRecord, Retention, SaveMemory, Saves, Store, load, prune
from elastic_train.checkpoint.stores.disk import RealDisk
from elastic_train.checkpoint.stores.local import LocalStore

Figures = dict[str, dict[str, list[float]]]
MEASURES = ("save_s", "save_cpu_s", "restart_s", "restart_cpu_s", "cold_restart_s")


class BufferedDisk(RealDisk):
    """The same disk, written through the page cache."""

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb")


def main() -> None:
    """Run all sizes; print a table for each, then one JSON line."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.page_cache", description=__doc__)
    arguments.add_argument("--sizes", default="0.25,1", help="sizes of the state in GB (default: 0.25,1)")
    arguments.add_argument("--rounds", type=int, default=7, help="saves of each side (default: 7)")
    arguments.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    by_size = {}
    for size in chosen.sizes.split(","):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            by_size[size] = _summary(*_measure(float(size), chosen.rounds, Path(folder)))
        _show(size, by_size[size])
    print(json.dumps(by_size))


def _measure(size_gb: float, rounds: int, folder: Path) -> tuple[Figures, float]:
    """Return the figures of both sides, and the size of the state in GB; the first round warms up."""
    training, num_bytes = train(size_gb)
    stores = {
        "direct": LocalStore(folder / "direct"),
        "buffered": LocalStore(folder / "buffered", BufferedDisk()),
    }
    saves = {side: open_saves(store, SaveMemory()) for side, store in stores.items()}
    figures: Figures = {side: {name: [] for name in MEASURES} for side in stores}
    for number in range(rounds + 1):
        for side in sorted(stores, reverse=bool(number % 2)):
            times = _round(training, stores[side], saves[side], folder / side, number)
            for name, seconds in times.items() if number else ():
                figures[side][name].append(seconds)
    return figures, num_bytes / 1e9


def _round(training: Training, store: Store, saves: Saves, folder: Path, number: int) -> dict[str, float]:
    """Save, load with the page cache as it is, and load from the disk."""
    state = training.state.shards.share.held()
    records: list[CommitRecord] = []

    def save() -> None:
        facts = replace(training.facts(), step=number + 1)
        saves.begin(state, facts, is_still=training.state.pieces.only_update_changes())
        records.append(committed(saves))

    def restart() -> None:
        load(store, records[0], state)

    save_s, save_cpu_s = _timed(save)
    restart_s, restart_cpu_s = _timed(restart)
    evict(folder / records[0].attempt)
    cold_restart_s, _ = _timed(restart)
    prune(store, Retention.of(last=1), newest=records[0])
    os.sync()  # so that freed space and dirty pages do not slow the next side
    return dict(zip(MEASURES, (save_s, save_cpu_s, restart_s, restart_cpu_s, cold_restart_s), strict=True))


def _timed(act: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds and CPU seconds (user + system, all threads) of a call."""
    cpu, started = _cpu_s(), time.perf_counter()
    act()
    return time.perf_counter() - started, _cpu_s() - cpu


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _summary(figures: Figures, gigabytes: float) -> dict[str, dict[str, float]]:
    middles = {
        side: {name: statistics.median(times) / gigabytes for name, times in by_name.items()}
        for side, by_name in figures.items()
    }
    ratios = {
        name: statistics.median(
            mine / other for mine, other in zip(figures["buffered"][name], figures["direct"][name], strict=True)
        )
        for name in MEASURES
    }
    return {
        side: {name: round(value, 3) for name, value in by_name.items()}
        for side, by_name in {**middles, "buffered_vs_direct": ratios}.items()
    }


def _show(size: str, summary: dict[str, dict[str, float]]) -> None:
    table = Table("seconds a GB (median)", *summary, title=f"{size} GB")
    for name in MEASURES:
        table.add_row(name, *(f"{by_name[name]:.3f}" for by_name in summary.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
