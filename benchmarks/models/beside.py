"""Run the trainer and a plain loop in turn, in one process on one rank: steps/s, and peak memory.

The trainer is complete (`train`), with its reading, histories and tables. Between its steps, the plain loop takes as
many with the same tensors. CPU time of the trainer's threads during the plain loop's steps is charged to the trainer.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar
from unittest import mock

import torch
from torch import nn

from benchmarks.models.jobs import JOBS, LARGE, write_job
from benchmarks.models.plain import PlainLoop
from elastic_train.config.sources import load_config
from elastic_train.core.order import Cursor
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job.plan import Plan, make_plan
from elastic_train.training.run import train
from elastic_train.training.session import Session

P = ParamSpec("P")
T = TypeVar("T")
_IMPORTED = [
    "elastic_train.preload",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.resnet.modeling_resnet",
    "benchmarks.models.beside",
]
MEMORY_STEPS = 6


def in_process(measure: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run a measurement in a fresh process that has only imported what it needs."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, *args, **named).result()


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds on three clocks: wall time, this thread's CPU time, and the process's CPU time."""

    wall_s: float
    thread_s: float
    process_s: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def since(self, before: Spent) -> Spent:
        return Spent(self.wall_s - before.wall_s, self.thread_s - before.thread_s, self.process_s - before.process_s)

    @property
    def beside_s(self) -> float:
        """CPU seconds of other threads."""
        return max(0.0, self.process_s - self.thread_s)


class Turns:
    """Lets a plain loop repeat every few steps of the trainer."""

    def __init__(self, name: str, steps_a_turn: int) -> None:
        self._name, self._steps_a_turn = name, steps_a_turn
        self.plain: PlainLoop | None = None
        self.ours_s: list[float] = []
        self.plain_s: list[float] = []

    def between(self, session: Session, steps: Iterator[Sequence[LaneBatch]]) -> Iterator[Sequence[LaneBatch]]:
        """Yield the trainer's steps, and let the plain loop repeat them, except the last one, which ends the job."""
        plain = self.plain = plain_loop(self._name, session.plan, session.state.model)
        taken, began = list[Sequence[LaneBatch]](), Spent.now()
        for lanes in steps:
            taken.append(lanes)
            yield lanes
            if len(taken) < self._steps_a_turn:
                continue
            ours = Spent.now().since(began)
            with as_by_default():
                began = Spent.now()
                for each in taken:
                    plain.step([batch.tensors for batch in each if batch.tensors is not None])
                theirs = Spent.now().since(began)
            self.ours_s.append(ours.wall_s + theirs.beside_s)
            self.plain_s.append(theirs.wall_s)
            taken.clear()
            began = Spent.now()


class as_by_default:  # noqa: N801 - a context, which reads as one
    """Let torch choose any algorithm, as in a loop with default settings."""

    def __enter__(self) -> None:
        self._mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")

    def __exit__(self, *error: object) -> None:
        torch.set_deterministic_debug_mode(self._mode)


def plain_loop(name: str, plan: Plan, model: nn.Module) -> PlainLoop:
    """Return a plain loop over a copy of the trainer's model."""
    own = plan.task.build_model()
    own.load_state_dict(model.state_dict())
    return PlainLoop(name, own.train(), plan.config.optimizer.model_dump())


class Between(Protocol):
    """An object that runs between the trainer's steps."""

    def between(self, session: Session, steps: Iterator[Sequence[LaneBatch]]) -> Iterator[Sequence[LaneBatch]]:
        """Yield the trainer's steps, and do other work after some of them."""


def train_beside(config: str, turns: Between, overrides: Mapping[str, object]) -> None:
    """Train a job to its end, with a plain loop in turn."""
    steps = Session.steps
    with mock.patch.object(Session, "steps", lambda session: turns.between(session, steps(session))):
        train(load_config(config, dict(overrides)))


def throughput(name: str, num_turns: int, steps_a_turn: int, overrides: Mapping[str, object]) -> float:
    """Return the ratio of the trainer's samples/s to the plain loop's: the median over turns after the first."""
    with tempfile.TemporaryDirectory() as folder:
        num_steps = (num_turns + 1) * steps_a_turn + 1
        config = write_job(Path(folder), JOBS[name], max_steps=num_steps)
        turns = Turns(name, steps_a_turn)
        train_beside(config, turns, overrides)
    ratios = [plain_s / ours_s for plain_s, ours_s in zip(turns.plain_s, turns.ours_s, strict=True)]
    return statistics.median(ratios[1:])


def peak_of_ours(name: str, overrides: Mapping[str, object]) -> int:
    """Return the trainer's peak bytes with one lane, above those of its process before."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_job(Path(folder), LARGE[name], num_lanes=1, max_steps=MEMORY_STEPS)
        base = resident("VmRSS")
        train(load_config(config, dict(overrides)))
        return resident("VmHWM") - base


def peak_of_plain(name: str) -> int:
    """Return the same for a plain loop, whose tensors are allocated before."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(write_job(Path(folder), LARGE[name], num_lanes=1, max_steps=MEMORY_STEPS))
        torch.set_num_threads(1)
        plan = make_plan(config)
        steps = list(plan.feed.training(plan.order, range(1), Cursor(), MEMORY_STEPS))
        base = resident("VmRSS")
        loop = PlainLoop(name, plan.task.build_model().train(), config.optimizer.model_dump())
        for [batch] in steps:
            assert batch.tensors is not None
            loop.step([batch.tensors])
        return resident("VmHWM") - base


def resident(name: str) -> int:
    """Return one of this process's memory figures, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"Linux says {name}"
    return 1024 * int(found[1])
