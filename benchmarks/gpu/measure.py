"""Measurements of the job; each function runs in its own process, with exclusive use of the device."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.beside import WARM_TURNS, Enough, Lanes, Watch, batches_of, now_of, plainly, train_while
from benchmarks.gpu.job import NUM_LANES, SIZES, Size, write_job
from benchmarks.jobs import PlainLoop
from benchmarks.ranks import TIMEOUT_S, Meeting, run
from benchmarks.sharding.jobs import Job, Mode
from elastic_train.config.parallel import bucket_bytes
from elastic_train.config.sources import load_config
from elastic_train.core.lanes import contiguous
from elastic_train.core.order import Cursor
from elastic_train.job.plan import Plan, make_plan
from elastic_train.parallel.devices.device import device_of
from elastic_train.parallel.gradient_sum import TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint, Work
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.training.session import Session

BETWEEN_SAVES = 8
Messages = Sequence[tuple[int, Tensor]]
MEMORY = Path("/dev/shm")


def scratch(size: Size) -> str | None:
    """Return a folder in memory if it has room for three commits, else None, as a disk would distort the figures."""
    needed = 3 * 12 * size.num_parameters
    return str(MEMORY) if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else None


def plain_loop(plan: Plan, *, is_compiled: bool = False) -> PlainLoop:
    """Return the loop of a job's model, in bf16."""
    options = plan.config.optimizer.model_dump()
    return PlainLoop(plan.task.build_model(), plan.device, options, is_bf16=True, is_compiled=is_compiled)


def step_times(
    name: str, device: str, num_steps: int, beside: str, *, compile: bool = False, reduction: str = "canonical"
) -> dict[str, float]:
    """Return the medians of `Watch` for a job and one loop: "plain" (default settings) or "deterministic".

    Only one of them, because code compiled for one would be checked in calls of the other.
    """
    size = SIZES[name]
    with tempfile.TemporaryDirectory(dir=scratch(size)) as folder:
        config = write_job(Path(folder), size, device, num_steps=10_000, reduction=reduction, compile=compile)
        plan = make_plan(load_config(config))
        loop = plain_loop(plan, is_compiled=compile)
        loops = {"plain": plainly(loop), "deterministic": lambda lanes: loop.step(batches_of(lanes))}
        watch = Watch(plan.device, {beside: loops[beside]}, num_steps)
        train_while(config, watch.between)
    return watch.medians()


def alone(name: str, device: str, num_steps: int, **changes: object) -> dict[str, float]:
    """Return seconds per step and peak device bytes of a job with changed keys, without a second loop."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory(dir=scratch(size)) as folder:
        config = write_job(Path(folder), size, device, num_steps=10_000, **changes)
        watch = Watch(make_plan(load_config(config)).device, {}, num_steps)
        train_while(config, watch.between)
    return {"seconds": watch.medians()["ours"], "peak": float(peak_of(device))}


def plain_peak(name: str, device: str) -> int:
    """Return the peak device bytes of the plain loop, with lanes of one row."""
    with tempfile.TemporaryDirectory(dir=scratch(SIZES[name])) as folder:
        plan = make_plan(load_config(write_job(Path(folder), SIZES[name], device, num_steps=4)))
        loop = plain_loop(plan)
        for lanes in plan.feed.training(plan.order, range(NUM_LANES), Cursor(), 4):
            loop.step(batches_of(lanes))
    return peak_of(device)


def peak_of(device: str) -> int:
    """Return the peak device bytes of this process."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def overlap(name: str, device: str, num_steps: int) -> float:
    """Return the wait of two ranks that share the device for the gradient with buckets, over that without."""
    return float(statistics.median(run(_overlap, 2, name, device, num_steps)))


def _sharing(meeting: Meeting, where: torch.device) -> Group:
    """Return the group of two ranks that share a device."""
    torch.set_deterministic_debug_mode("default")
    rank, store = meeting.group.rank, FileStore(str(meeting.folder / "devices"), 2)
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}  # NCCL lets ranks of two hosts share it
    return Group(rank, 2, store, TIMEOUT_S, device_of(where, "auto"))


def _overlap(meeting: Meeting, name: str, device: str, num_steps: int) -> float:
    """Return the ratio of this rank's median seconds from the end of the backward pass until it has the gradient."""
    rank, size, where, waits = meeting.group.rank, SIZES[name], torch.device(device), list[float]()
    group = _sharing(meeting, where)
    model, tokens = Decoder(size.shape).to(where), torch.ones(1, size.num_tokens, dtype=torch.int64, device=where)
    for least_bytes in (bucket_bytes("auto", on_cpu=device == "cpu"), None):
        gradients = TreeSum([tree_of("canonical", list(model.parameters()), group, contiguous(2, 2))], least_bytes)
        seconds = []
        for _ in range(WARM_TURNS + num_steps):
            meeting.group.barrier()
            gradients.begin()
            with gradients.turn(rank), torch.autocast(device, torch.bfloat16):
                model(tokens).float().square().mean().backward()
            began = now_of(where)
            gradients.finish(2.0)
            seconds.append(now_of(where) - began)
        gradients.close()
        waits.append(statistics.median(seconds[WARM_TURNS:]))
    return waits[0] / waits[1]


def shards_overlap(name: str, device: str, num_steps: int, shards: Mode) -> float:
    """Return the part of exchanges of shards that no computation hides, on two ranks that share the device."""
    return float(statistics.median(run(_shards_overlap, 2, name, device, num_steps, shards)))


def _shards_overlap(meeting: Meeting, name: str, device: str, num_steps: int, shards: Mode) -> float:
    """Return what exchanges add to this rank's median step, over what they add while nothing is computed."""
    where, group = torch.device(device), _sharing(meeting, torch.device(device))
    alone = _lanes_time(meeting, Job(Group(0, 1, None, TIMEOUT_S), _Rows(SIZES[name], where, 2), shards), num_steps)
    gc.collect()
    job = Job(group, _Rows(SIZES[name], where, 4), shards)
    beside = _lanes_time(meeting, job, num_steps)
    with mock.patch.object(Group, "begin_exchange", _exchange_now):
        after = _lanes_time(meeting, job, num_steps)
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


def _lanes_time(meeting: Meeting, job: Job, num_steps: int) -> float:
    """Return the median seconds of a step's gradient."""
    seconds, where = list[float](), next(job.state.model.parameters()).device
    for _ in range(WARM_TURNS + num_steps):
        meeting.group.barrier()
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

    def __init__(self, device: torch.device, num_saves: int) -> None:
        self._device, self._num_saves = device, num_saves
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
            if len(self.beside) == self._num_saves and turn % BETWEEN_SAVES == BETWEEN_SAVES - 1:
                raise Enough

    def stalls(self) -> list[float]:
        """Return the cost of each save in seconds: the excess time of steps during it over steps without."""
        alone = statistics.median(self.alone[WARM_TURNS:])
        return [sum(times) - alone * len(times) for times in self.beside]


def saves(name: str, device: str, num_saves: int) -> dict[str, float]:
    """Return the milliseconds that a save costs training per GB of state, and the peak memory in bytes."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory(dir=scratch(size)) as folder:
        checkpoint = {"every": None, "keep_last": 1}
        config = write_job(Path(folder), size, device, num_steps=10_000, checkpoint=checkpoint)
        saving = Saving(make_plan(load_config(config)).device, num_saves)
        train_while(config, saving.between)
    stalls = [1e3 * stall_s / (12e-9 * size.num_parameters) for stall_s in saving.stalls()]
    return {
        "first": stalls[0],
        "median": statistics.median(stalls),
        "steps during": statistics.median(map(len, saving.beside)),
        "peak": float(peak_of(device)),
    }
