"""What is measured of the job: each function runs in a process of its own, with a device that nobody else uses."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import torch

from benchmarks.gpu.job import NUM_LANES, SIZES, PlainLoop, write_job
from elastic_train.config.sources import load_config
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job.plan import make_plan
from elastic_train.training.run import train
from elastic_train.training.session import Session

P = ParamSpec("P")
T = TypeVar("T")
WARM_TURNS, AFTER_SAVE = 2, 4


def in_process(measure: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Measure in a process that has done nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *args, **named).result()


class Watch:
    """Notes when the trainer asks for a step, with the device at rest, and lets a plain loop take the same one."""

    def __init__(self, device: torch.device, plain: PlainLoop | None = None) -> None:
        self._device, self._plain = device, plain
        self.ours_s: list[float] = []
        self.plain_s: list[float] = []

    def train(self, config: str) -> None:
        """Train a job to its end; no time is noted of its last step, which ends it."""
        steps = Session.steps
        with mock.patch.object(Session, "steps", lambda session: self._between(steps(session))):
            train(load_config(config))

    def _between(self, steps: Iterator[Sequence[LaneBatch]]) -> Iterator[Sequence[LaneBatch]]:
        began = self._now()
        for lanes in steps:
            yield lanes
            self.ours_s.append(self._now() - began)
            if self._plain is not None:
                self.plain_s.append(self._time(self._plain, lanes))
            began = self._now()

    def _time(self, plain: PlainLoop, lanes: Sequence[LaneBatch]) -> float:
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")  # as in a loop that asks for nothing
        began = self._now()
        plain.step([lane.tensors for lane in lanes if lane.tensors is not None])
        took_s = self._now() - began
        torch.set_deterministic_debug_mode(mode)
        return took_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def step_times(name: str, device: str, num_steps: int, reduction: str = "canonical") -> dict[str, float]:
    """Return medians: tokens a second, and the plain loop's time of a step over the trainer's, step by step."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = write_job(Path(folder), size, device, num_steps=num_steps + WARM_TURNS, reduction=reduction)
        plan = make_plan(load_config(config))
        watch = Watch(plan.device, PlainLoop(plan.task.build_model(), plan.device))
        watch.train(config)
    ours, plain = watch.ours_s[WARM_TURNS:], watch.plain_s[WARM_TURNS:]
    ratios = [theirs / mine for mine, theirs in zip(ours, plain, strict=True)]
    tokens = NUM_LANES * size.num_tokens
    return {"tokens_per_s": tokens / statistics.median(ours), "step_vs_plain": statistics.median(ratios)}


def peak_of_ours(name: str, device: str) -> int:
    """Return the most bytes of the device that the trainer has had, with lanes of one row."""
    with tempfile.TemporaryDirectory() as folder:
        train(load_config(write_job(Path(folder), SIZES[name], device, num_steps=4)))
    return _peak(device)


def peak_of_plain(name: str, device: str) -> int:
    """Return the same of the plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(load_config(write_job(Path(folder), SIZES[name], device, num_steps=4)))
        loop = PlainLoop(plan.task.build_model(), plan.device)
        for lanes in plan.feed.training(plan.order, range(NUM_LANES), Cursor(), 4):
            loop.step([lane.tensors for lane in lanes if lane.tensors is not None])
    return _peak(device)


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def save_stall(name: str, device: str, num_saves: int) -> float:
    """Return the milliseconds that training loses to a save in the background, for each GB of state.

    What the steps from the save on take longer than the median of the others; it is over by the next save.
    """
    every = 4 * AFTER_SAVE
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = {"every_steps": every, "every_s": None, "keep_last": 1}
        num_steps = every * (num_saves + 1)
        config = write_job(Path(folder), SIZES[name], device, num_steps=num_steps, checkpoint=checkpoint)
        watch = Watch(make_plan(load_config(config)).device)
        watch.train(config)
    times = watch.ours_s
    alone = statistics.median(times[turn] for turn in range(WARM_TURNS, len(times)) if turn % every >= AFTER_SAVE + 1)
    # The time noted of a step goes on to the request for the next one: a save begins at its end.
    saves = [
        sum(times[at - 1 : at - 1 + AFTER_SAVE]) - AFTER_SAVE * alone
        for at in range(every, num_saves * every + 1, every)
    ]
    return 1e3 * statistics.median(saves) / (12e-9 * SIZES[name].num_parameters)
