"""Measurements of the job; each function runs in its own process, with exclusive use of the device."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.beside import (
    WARM_TURNS,
    Enough,
    Lanes,
    Watch,
    batches_of,
    never,
    now_of,
    plainly,
    resident,
    train_while,
)
from benchmarks.gpu.job import NUM_LANES, SIZES, Size, write_job
from benchmarks.gpu.limits import Limit, job_folder
from benchmarks.jobs import PlainLoop
from benchmarks.packed import packed_over_mask
from benchmarks.ranks import TIMEOUT_S, Meeting, run
from benchmarks.sharding.jobs import Job, Mode
from elastic_train.config.parallel import bucket_bytes
from elastic_train.config.sources import load_config
from elastic_train.core.lanes import contiguous
from elastic_train.core.order import Cursor
from elastic_train.errors import PeerLostError
from elastic_train.job.plan import Plan, make_plan
from elastic_train.parallel.devices.device import device_of
from elastic_train.parallel.gradient_sum import TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint, Work
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.training.session import Session

BETWEEN_SAVES = 8
Messages = Sequence[tuple[int, Tensor]]


def plain_loop(plan: Plan, *, is_compiled: bool = False) -> PlainLoop:
    """Return the loop of a job's model, in bf16."""
    options = plan.config.optimizer.model_dump()
    return PlainLoop(plan.task.build_model(), plan.device, options, is_bf16=True, is_compiled=is_compiled)


def step_times(
    limit: Limit,
    /,
    name: str,
    device: str,
    num_steps: int,
    beside: str,
    *,
    compile: bool = False,
    reduction: str = "canonical",
) -> dict[str, float]:
    """Return the medians of `Watch` for a job and one loop: "plain" (default settings) or "deterministic".

    Only one of them, because code compiled for one would be checked in calls of the other.
    """
    size = SIZES[name]
    with job_folder(size.commits_bytes) as folder:
        config = write_job(Path(folder), size, device, num_steps=10_000, reduction=reduction, compile=compile)
        plan = make_plan(load_config(config))
        loop = plain_loop(plan, is_compiled=compile)
        loops = {"plain": plainly(loop), "deterministic": lambda lanes: loop.step(batches_of(lanes))}
        watch = Watch(plan.device, {beside: loops[beside]}, num_steps, limit.is_near)
        train_while(config, watch.between)
    return watch.medians()


def alone(limit: Limit, /, name: str, device: str, num_steps: int, **changes: object) -> dict[str, float]:
    """Return seconds per step and peak device bytes of a job with changed keys, without a second loop."""
    size = SIZES[name]
    with job_folder(size.commits_bytes) as folder:
        config = write_job(Path(folder), size, device, num_steps=10_000, **changes)
        watch = Watch(make_plan(load_config(config)).device, {}, num_steps, limit.is_near)
        train_while(config, watch.between)
    return {"seconds": watch.medians()["ours"], "peak": float(peak_of(device))}


def plain_peak(limit: Limit, /, name: str, device: str) -> int:
    """Return the peak device bytes of the plain loop, with lanes of one row."""
    with job_folder(SIZES[name].commits_bytes) as folder:
        plan = make_plan(load_config(write_job(Path(folder), SIZES[name], device, num_steps=4)))
        loop = plain_loop(plan)
        for lanes in plan.feed.training(plan.order, range(NUM_LANES), Cursor(), 4):
            loop.step(batches_of(lanes))
    return peak_of(device)


def peak_of(device: str) -> int:
    """Return the peak device bytes of this process."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def overlap(limit: Limit, /, name: str, device: str, num_steps: int) -> float:
    """Return the wait of two ranks that share the device for the gradient with buckets, over that without."""
    return float(statistics.median(run(_overlap, 2, limit, name, device, num_steps)))


def first_of(device: str) -> torch.device:
    """Return the machine's first device: NCCL connects a device of a known number only."""
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def _sharing(
    meeting: Meeting, where: torch.device, name: str = "devices", is_broken: Callable[[float], bool] | None = None
) -> Group:
    """Return a group of two ranks that share a device."""
    torch.set_deterministic_debug_mode("default")
    rank, store = meeting.group.rank, FileStore(str(meeting.folder / name), 2)
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}  # NCCL lets ranks of two hosts share it
    return Group(rank, 2, store, TIMEOUT_S, device_of(where, "auto"), is_broken=is_broken)


def _computed_at(device: torch.device) -> float:
    """Return the time at which this thread's work on a device is done; exchanges beside it may still run."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _overlap(meeting: Meeting, limit: Limit, name: str, device: str, num_steps: int) -> float:
    """Return the ratio of this rank's median seconds from the end of the backward pass until it has the gradient."""
    rank, size, where, waits = meeting.group.rank, SIZES[name], first_of(device), list[float]()
    group = _sharing(meeting, where)
    model, tokens = Decoder(size.shape).to(where), torch.ones(1, size.num_tokens, dtype=torch.int64, device=where)
    for phase, least_bytes in enumerate((bucket_bytes("auto", on_cpu=device == "cpu"), None)):
        gradients = TreeSum([tree_of("canonical", list(model.parameters()), group, contiguous(2, 2))], least_bytes)
        seconds = []
        for _ in _turns(meeting, num_steps, limit.first(1 / (2 - phase))):
            gradients.begin()
            with gradients.turn(rank), torch.autocast(device, torch.bfloat16):
                model(tokens).float().square().mean().backward()
            began = _computed_at(where)
            gradients.finish(2.0)
            seconds.append(now_of(where) - began)
        gradients.close()
        waits.append(statistics.median(seconds[WARM_TURNS:]))
    return waits[0] / waits[1]


def shards_overlap(limit: Limit, /, name: str, device: str, num_steps: int, shards: Mode) -> float:
    """Return the part of exchanges of shards that no computation hides, on two ranks that share the device."""
    return float(statistics.median(run(_shards_overlap, 2, limit, name, device, num_steps, shards)))


def _shards_overlap(meeting: Meeting, limit: Limit, name: str, device: str, num_steps: int, shards: Mode) -> float:
    """Return what exchanges add to this rank's median step, over what they add while nothing is computed."""
    where = first_of(device)
    group, single = _sharing(meeting, where), Group(0, 1, None, TIMEOUT_S)
    turns = partial(_turns, meeting, num_steps)
    alone = _lanes_time(turns(limit.first(1 / 3)), Job(single, _Rows(SIZES[name], where, 2), shards))
    gc.collect()
    job = Job(group, _Rows(SIZES[name], where, 4), shards)
    beside = _lanes_time(turns(limit.first(1 / 2)), job)
    with mock.patch.object(Group, "begin_exchange", _exchange_now):
        after = _lanes_time(turns(limit), job)
    return (beside - alone) / (after - alone)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Lanes of one row."""

    size: Size
    device: torch.device
    num_lanes: int
    num_samples = 1

    def build(self) -> Decoder:
        torch.manual_seed(1)
        return Decoder(self.size.shape).to(self.device)

    def loss(self, model: nn.Module, step: int, lane: int) -> Tensor:
        tokens = torch.ones(1, self.size.num_tokens, dtype=torch.int64, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss: Tensor = model(tokens).float().square().mean()
        return loss


def _turns(meeting: Meeting, num_steps: int, limit: Limit) -> Iterator[int]:
    """Yield turns that all ranks begin together; near the limit, those so far are enough if one is timed."""
    for turn in range(WARM_TURNS + num_steps):
        if any(meeting.group.all_gather_objects(limit.is_near())) and turn > WARM_TURNS:
            return
        yield turn


def _lanes_time(turns: Iterator[int], job: Job) -> float:
    """Return the median seconds of a step's gradient."""
    seconds, where = list[float](), next(job.state.model.parameters()).device
    for _ in turns:
        began = now_of(where)
        job.compute()
        seconds.append(now_of(where) - began)
    return statistics.median(seconds[WARM_TURNS:])


def _exchange_now(group: Group, sends: Messages, receives: Messages) -> tuple[list[Work], list[Work]]:
    """Exchange while nothing is computed."""
    now_of(group.device.torch_device)
    arriving, leaving = PointToPoint.begin_exchange(group, sends, receives)
    group.wait(arriving + leaving)
    return [], []


class Saving:
    """Requests one save after another from a job, and times its steps during saves and without."""

    def __init__(self, device: torch.device, num_saves: int, is_over: Callable[[], bool] = never) -> None:
        """Once `is_over`, the saves timed so far are enough if there is one."""
        self._device, self._num_saves, self._is_over = device, num_saves, is_over
        self.alone: list[float] = []
        self.beside: list[list[float]] = []

    def between(self, session: Session, steps: Iterator[Lanes]) -> Iterator[Lanes]:
        """Yield the steps of a job; a save begins at the end of the step in which it is requested."""
        for turn in itertools.count(1):
            is_asked = turn > WARM_TURNS and turn % BETWEEN_SAVES == 0 and len(self.beside) < self._num_saves
            for kind in ("save", "alone") if is_asked else ("alone",):
                if kind == "save":
                    session.commits.is_asked = True
                    self.beside.append([])
                while True:
                    began = now_of(self._device)
                    yield next(steps)
                    took_s = now_of(self._device) - began
                    (self.beside[-1] if kind == "save" else self.alone).append(took_s)
                    if kind == "alone" or not (session.commits.is_asked or session.commits.is_busy):
                        break
            has_all = len(self.beside) == self._num_saves and turn % BETWEEN_SAVES == BETWEEN_SAVES - 1
            if has_all or (self.beside and self._is_over()):
                raise Enough

    def stalls(self) -> list[float]:
        """Return the cost of each save in seconds: the excess time of steps during it over steps without."""
        alone = statistics.median(self.alone[WARM_TURNS:])
        return [sum(times) - alone * len(times) for times in self.beside]


def saves(limit: Limit, /, name: str, device: str, num_saves: int) -> dict[str, float]:
    """Return the milliseconds that a save costs training per GB of state, and the peak memory in bytes."""
    size = SIZES[name]
    with job_folder(size.commits_bytes) as folder:
        checkpoint = {"every": None, "keep_last": 1}
        config = write_job(Path(folder), size, device, num_steps=10_000, checkpoint=checkpoint)
        saving = Saving(make_plan(load_config(config)).device, num_saves, limit.is_near)
        train_while(config, saving.between)
    stalls = [1e3 * stall_s / (12e-9 * size.num_parameters) for stall_s in saving.stalls()]
    return {
        "first": stalls[0],
        "median": statistics.median(stalls),
        "steps during": statistics.median(map(len, saving.beside)),
        "peak": float(peak_of(device)),
    }


def packed(limit: Limit, /, name: str, device: str, num_steps: int) -> float:
    """Return the time of passes of a packed row of 32 documents over that with a mask."""
    return packed_over_mask(SIZES[name].shape, SIZES[name].num_tokens, 32, device, num_steps, limit.is_near)


def memory_of_worlds(limit: Limit, /, device: str, num_worlds: int) -> dict[str, float]:
    """Return by how many bytes the memory in use has grown from the first world of two ranks to the last."""
    used: list[int] = run(_memory_of_worlds, 2, limit, device, num_worlds)[0]
    return {"worlds": len(used), "bytes": used[-1] - used[0]}


def _memory_of_worlds(meeting: Meeting, limit: Limit, device: str, num_worlds: int) -> list[int]:
    """Form worlds one after another, each of which ends in an operation that the second rank does not join.

    Return the memory in use after each: the device's, or this process's.
    """
    where, used = first_of(device), list[int]()
    for number in range(num_worlds):
        group = _sharing(meeting, where, f"world-{number}", is_broken=lambda waited_s: waited_s > 0.2)
        group.all_reduce(torch.ones(1 << 20, device=where))
        if group.rank == 0:
            try:
                group.all_reduce(torch.ones(1 << 20, device=where))
            except PeerLostError:
                pass
            else:
                raise AssertionError("an operation without one of its ranks has ended")
        meeting.group.barrier()  # the other rank keeps its connections until then: no peer is lost, only silent
        group.abandon()
        meeting.group.barrier()
        now_of(where)
        used.append(_bytes_in_use(where))
        if any(meeting.group.all_gather_objects(limit.is_near())):
            break
    return used


def _bytes_in_use(device: torch.device) -> int:
    if device.type != "cuda":
        return resident("VmRSS")
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
