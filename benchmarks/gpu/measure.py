"""Measurements of the job; each function runs in its own process, with exclusive use of the device."""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import torch

from benchmarks.gpu.job import NUM_LANES, SIZES, PlainLoop, Size, write_job
from elastic_train.config.sources import load_config
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job.plan import make_plan
from elastic_train.training.run import train
from elastic_train.training.session import Session

P = ParamSpec("P")
T = TypeVar("T")
WARM_TURNS, BETWEEN_SAVES = 4, 8
MEMORY = Path("/dev/shm")
Lanes = Sequence[LaneBatch]


class Enough(BaseException):
    """Ends a job without its last commit."""


def in_process(measure: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run a measurement in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *args, **named).result()


def scratch(size: Size) -> str | None:
    """Return a folder in memory if it has room for three commits, else None, as a disk would distort the figures."""
    needed = 3 * 12 * size.num_parameters
    return str(MEMORY) if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else None


def train_while(config: str, between: Callable[[Session, Iterator[Lanes]], Iterator[Lanes]]) -> None:
    """Train a job whose steps pass through the generator `between`, until that raises Enough."""
    steps = Session.steps
    with mock.patch.object(Session, "steps", lambda session: between(session, steps(session))):
        try:
            train(load_config(config))
        except Enough:
            return
    raise AssertionError("the job has ended before what was to be measured of it")


class Watch:
    """Times a job's steps on a synchronized device, and after each the same step of other loops."""

    def __init__(self, device: torch.device, loops: Mapping[str, Callable[[Lanes], None]], num_steps: int) -> None:
        self._device, self._loops, self._num_steps = device, loops, num_steps
        self.times: dict[str, list[float]] = {name: [] for name in ("ours", *loops)}

    def between(self, session: Session, steps: Iterator[Lanes]) -> Iterator[Lanes]:
        """Yield the steps of a job; each is timed until the next one is requested."""
        began = self._now()
        for lanes in steps:
            yield lanes
            self.times["ours"].append(self._now() - began)
            for name, loop in self._loops.items():
                began = self._now()
                loop(lanes)
                self.times[name].append(self._now() - began)
            if len(self.times["ours"]) == self._num_steps + WARM_TURNS:
                raise Enough
            began = self._now()

    def medians(self) -> dict[str, float]:
        """Return the median seconds per step, and for each loop the median ratio of its step time to the job's."""
        timed = {name: times[WARM_TURNS:] for name, times in self.times.items()}
        ratios = {
            f"over {name}": statistics.median(theirs / mine for mine, theirs in zip(timed["ours"], times, strict=True))
            for name, times in timed.items()
            if name != "ours"
        }
        return {**{name: statistics.median(times) for name, times in timed.items()}, **ratios}

    def _now(self) -> float:
        return now_of(self._device)


def now_of(device: torch.device) -> float:
    """Return the time at which a device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
        loop = PlainLoop(plan.task.build_model(), plan.device, compile=compile)

        def plainly(lanes: Lanes) -> None:
            mode = torch.get_deterministic_debug_mode()
            torch.set_deterministic_debug_mode("default")
            loop.step(batches_of(lanes))
            torch.set_deterministic_debug_mode(mode)

        loops = {"plain": plainly, "deterministic": lambda lanes: loop.step(batches_of(lanes))}
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


def batches_of(lanes: Lanes) -> list[Mapping[str, torch.Tensor]]:
    """Return a plain loop's inputs for a step."""
    return [lane.tensors for lane in lanes if lane.tensors is not None]


def plain_peak(name: str, device: str) -> int:
    """Return the peak device bytes of the plain loop, with lanes of one row."""
    with tempfile.TemporaryDirectory(dir=scratch(SIZES[name])) as folder:
        plan = make_plan(load_config(write_job(Path(folder), SIZES[name], device, num_steps=4)))
        loop = PlainLoop(plan.task.build_model(), plan.device)
        for lanes in plan.feed.training(plan.order, range(NUM_LANES), Cursor(), 4):
            loop.step(batches_of(lanes))
    return peak_of(device)


def peak_of(device: str) -> int:
    """Return the peak device bytes of this process."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


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
