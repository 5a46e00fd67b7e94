"""Measurements of `benchmarks.checkpoint`, in a process of their own."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver

from benchmarks.checkpoint.savers import OURS, Training, all_sides, committed, evict, open_saves, train
from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.reader import load
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.stores.open import open_store

HUGE_GB, ROUNDS = 2.0, 3
Times = defaultdict[str, list[float]]


def medians(size_gb: float, folder: str) -> dict[tuple[str, str], float]:
    """Return the median of each figure, by case, with a state of this size."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    training, num_bytes = train(size_gb)
    stalls, wholes = _saves(training, Path(folder), can_stage_twice=size_gb <= HUGE_GB)
    wholes["ours, without training"], loads = _commits_and_loads(training, Path(folder))
    found = {("stall_ms_per_gb", name): 1e12 * median(times) / num_bytes for name, times in stalls.items()}
    found |= {("whole_s", name): median(times) for name, times in wholes.items()}
    found["load_vs_dcp", "cached"] = median(loads["dcp cached"]) / median(loads[f"{OURS} cached"])
    found["load_vs_dcp_from_disk", "cold"] = median(loads["dcp cold"]) / median(loads[f"{OURS} cold"])
    dist.destroy_process_group()
    return found


def _saves(training: Training, folder: Path, *, can_stage_twice: bool) -> tuple[Times, Times]:
    """Save with all sides in turn; return stalls and whole saves. The first round warms up and is not counted."""
    sides = dict(all_sides(training, can_stage_twice=can_stage_twice))
    stalls, wholes = Times(list), Times(list)
    for number in range(ROUNDS + 1):
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
                stalls[name].append(stall)
                wholes[name].append(whole)
            shutil.rmtree(target)
    return stalls, wholes


def _commits_and_loads(training: Training, folder: Path) -> tuple[list[float], Times]:
    """Commit without training; then load the state with ours and with dcp, in turn, from page cache and disk.

    The commits belong to one run: they go to one store, one after the other, and only the newest is kept.
    """
    store, state = open_store(str(folder / "commits")), training.state.shards.share.held()
    saves, wholes, loads = open_saves(store, SaveMemory()), list[float](), Times(list)
    for number in range(ROUNDS + 1):
        started = time.perf_counter()
        is_still = training.state.pieces.only_update_changes()
        saves.begin(state, replace(training.facts(), step=number + 1), is_still=is_still)
        record = committed(saves)
        wholes.append(time.perf_counter() - started)
        prune(store, Retention.of(last=1), newest=record)
    del saves
    saver.save(state, checkpoint_id=folder / "dcp")
    commit, other = folder / "commits" / record.attempt, folder / "dcp"
    sides = {OURS: (commit, partial(load, store, record)), "dcp": (other, partial(loader.load, checkpoint_id=other))}
    for number in range(ROUNDS + 1):
        for name, (files, read) in sides.items():
            if number:
                loads[f"{name} cached"].append(_timed(read, state))
            evict(files)
            loads[f"{name} cold"].append(_timed(read, state))
    return wholes[1:], loads


def _timed(read: Callable[[dict[str, object]], object], state: dict[str, object]) -> float:
    started = time.perf_counter()
    read(state)
    return time.perf_counter() - started
