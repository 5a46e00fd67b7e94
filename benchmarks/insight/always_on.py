"""The cost of measuring phases and memory, in CPU time per step, which is robust on a shared machine.

The extra work of phases is done alone, as often as in the loop, alternating with a step of a small encoder's lanes, so
that changes of the clock frequency affect both.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import MagicMock

import torch
from torch import nn

from benchmarks.figures import Effort
from elastic_train.checkpoint import SaveMemory
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.coverage import CoverageSums
from elastic_train.insight.phases import RankFacts, StepClock
from elastic_train.insight.totals import PhaseTotals
from elastic_train.job.build import build_state
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.parallel.step_tables import _packed
from elastic_train.training.memory.meter import Meter, held_by
from elastic_train.training.memory.watching import MemoryWatch
from elastic_train.training.step_sums import StepSums
from elastic_train.training.watch import Watch

RANKS = LANES = 8
BATCH, TOKENS, DIM = 8, 128, 96
EVERY_STEPS, STEPS = 50, 200
"""Repetitions of the extra work per step of the model, as it takes only microseconds."""


class _Peers(PointToPoint):
    """The counters of a group, without a group."""

    def round_trip_s(self) -> float:
        return 0.0

    def wait(self, works: object) -> None: ...
    def backend(self, tensor: object) -> object:  # type: ignore[override]
        raise AssertionError("nothing is sent")


def overhead(effort: Effort) -> dict[str, object]:
    """Return the overhead as a share of a step's CPU time, the median of several rounds."""
    step, watched = _model_step(), _watched_step()
    step()
    rounds = [(_cpu_s(watched, STEPS), _cpu_s(step, 1)) for _ in range(3 if effort.is_quick else 15)]
    ours, whole = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {
        "overhead_always_on": round(statistics.median(a / b for a, b in rounds), 6),
        "always_on_us": {"phases": round(ours * 1e6, 1), "step": round(whole * 1e6)},
    }


def _watched_step() -> Callable[[], None]:
    """Return a function that does the extra work of phases in one step."""
    clock = StepClock(_Peers())
    watch = Watch(MagicMock(), None, PhaseTotals(), EVERY_STEPS, [LANES] * RANKS, {}, lambda rank: None, str)
    state = build_state(_model(), OptimizerConfig(), STEPS, "cpu", is_fp16=False)
    held = partial(held_by, state, state.shards.sum_of(Group(0, 1, None, 60), LANES), SaveMemory())
    memory = MemoryWatch(Meter(torch.device("cpu")), held, MagicMock(), EVERY_STEPS)
    facts = RankFacts._make([*[0.01] * 10, 1 << 20, 0.0001])
    steps = itertools.count(1)
    sums = StepSums(0.0, 1.0, CoverageSums(), 0, 0, 0, 0, ranks=(facts,) * RANKS)

    def step() -> None:
        clock.mark("data")
        for _ in range(LANES):
            clock.mark("rest")
            clock.mark("to_device")
            clock.mark("forward")
            clock.mark("backward")
        _packed(clock.row())
        for phase in ("wait", "exchange", "rest", "save", "rest", "optimizer", "wait", "optimizer", "rest", "save"):
            clock.mark(phase)
        watch.step(number := next(steps), sums, 1.0, 0)
        memory.step(number)

    return step


def _model_step() -> Callable[[], None]:
    """Return a function that runs one step of an encoder's lanes: forward and backward, without an optimizer."""
    torch.set_num_threads(1)
    model = _model()
    rows = torch.randn(BATCH, TOKENS, DIM)

    def step() -> None:
        for _ in range(LANES):
            torch.autograd.backward(model(rows).square().mean())

    return step


def _model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _cpu_s(act: Callable[[], None], times: int) -> float:
    started = time.process_time()
    for _ in range(times):
        act()
    return (time.process_time() - started) / times
