"""Run the whole trainer, with its reading, histories and tables, and other loops in turn, in one process."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import torch

from benchmarks.jobs import Batch, PlainLoop
from elastic_train.config.sources import load_config
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.training.run import train
from elastic_train.training.session import Session

P = ParamSpec("P")
T = TypeVar("T")
WARM_TURNS = 4
Lanes = Sequence[LaneBatch]
Loop = Callable[[Lanes], None]


def never() -> bool:
    return False


class Enough(BaseException):
    """Ends a job without its last commit."""


def in_process(measure: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run a measurement in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *args, **named).result()


def resident(name: str) -> int:
    """Return one of this process's memory figures, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"Linux says {name}"
    return 1024 * int(found[1])


def train_while(
    config: str,
    between: Callable[[Session, Iterator[Lanes]], Iterator[Lanes]],
    overrides: Mapping[str, object] | None = None,
) -> None:
    """Train a job whose steps pass through the generator `between`, until that raises Enough."""
    steps = Session.steps
    with mock.patch.object(Session, "steps", lambda session: between(session, steps(session))):
        try:
            train(load_config(config, dict(overrides or {})))
        except Enough:
            return
    raise AssertionError("the job has ended before what was to be measured of it")


def batches_of(lanes: Lanes) -> list[Batch]:
    """Return a plain loop's inputs for a step."""
    return [lane.tensors for lane in lanes if lane.tensors is not None]


def plainly(loop: PlainLoop) -> Loop:
    """Return the loop's step with torch free to choose any algorithm, as in a loop with default settings."""

    def step(lanes: Lanes) -> None:
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")
        loop.step(batches_of(lanes))
        torch.set_deterministic_debug_mode(mode)

    return step


class Watch:
    """Times a job's steps on a synchronized device, and after each the same step of other loops.

    On a CPU, what the trainer's threads compute beside the other loops is charged to the trainer.
    """

    def __init__(
        self, device: torch.device, loops: Mapping[str, Loop], num_steps: int, is_over: Callable[[], bool] = never
    ) -> None:
        """Once `is_over`, the steps timed so far are enough if there is one."""
        self._device, self._loops, self._num_steps, self._is_over = device, loops, num_steps, is_over
        self.times: dict[str, list[float]] = {name: [] for name in ("ours", *loops)}

    def between(self, session: Session, steps: Iterator[Lanes]) -> Iterator[Lanes]:
        """Yield the steps of a job; each is timed until the next one is requested."""
        began = now_of(self._device)
        for lanes in steps:
            yield lanes
            ours_s = now_of(self._device) - began
            for name, loop in self._loops.items():
                began, before_s = now_of(self._device), _threads_s()
                loop(lanes)
                self.times[name].append(now_of(self._device) - began)
                ours_s += _threads_s() - before_s if self._device.type == "cpu" else 0.0
            self.times["ours"].append(ours_s)
            num_timed = len(self.times["ours"]) - WARM_TURNS
            if num_timed == self._num_steps or (num_timed > 0 and self._is_over()):
                raise Enough
            began = now_of(self._device)

    def medians(self) -> dict[str, float]:
        """Return the median seconds per step, and for each loop the median ratio of its step time to the job's."""
        timed = {name: times[WARM_TURNS:] for name, times in self.times.items()}
        ratios = {
            f"over {name}": statistics.median(theirs / mine for mine, theirs in zip(timed["ours"], times, strict=True))
            for name, times in timed.items()
            if name != "ours"
        }
        return {**{name: statistics.median(times) for name, times in timed.items()}, **ratios}


def now_of(device: torch.device) -> float:
    """Return the time at which a device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _threads_s() -> float:
    """Return the CPU seconds of this process's other threads."""
    return time.process_time() - time.thread_time()
