"""Run two sides in the same processes, in turn: their process groups, and the time of a pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from elastic_train.parallel.group import Group

TIMEOUT_S = 120.0
Times = tuple[float, float]
"""Wall seconds and CPU seconds."""


def meet(rank: int, size: int, folder: str) -> Group:
    """Form torch's default group for the peer, and return ours; computes with one thread."""
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", size)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("peer", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return Group(rank, size, dist.PrefixStore("ours", store), TIMEOUT_S)  # type: ignore[attr-defined]


def part_ways(group: Group) -> None:
    """Close both groups together on all ranks."""
    group.close()
    dist.barrier()
    dist.destroy_process_group()


def medians(ranks: Sequence[Sequence[Times]]) -> Times:
    """Return medians over turns: a turn's wall time is that of its slowest rank, its CPU time the sum over ranks."""
    turns = list(zip(*ranks, strict=True))
    clock = statistics.median(max(seconds for seconds, _ in turn) for turn in turns)
    return clock, statistics.median(sum(cpu for _, cpu in turn) for turn in turns)


def timed(act: Callable[[], None]) -> Times:
    started = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - started[0], time.process_time() - started[1]
