"""Measurements of the jobs; each function runs in its own process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import torch

from benchmarks.beside import Watch, batches_of, plainly, resident, train_while
from benchmarks.jobs import PlainLoop
from benchmarks.models.jobs import JOBS, LARGE, Job, write_job
from elastic_train.config.sources import load_config
from elastic_train.core.order import Cursor
from elastic_train.job.plan import Plan, make_plan
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.language import language_model
from elastic_train.training.run import train

MEMORY_STEPS = 6
VOCABULARY, DIM, NUM_PASSES = 50_304, 512, 3


def plain_loop(job: Job, plan: Plan) -> PlainLoop:
    """Return the plain loop of a job."""
    return PlainLoop(plan.task.build_model(), plan.device, plan.config.optimizer.model_dump(), job.loss)


def throughput(name: str, num_steps: int, overrides: Mapping[str, object]) -> float:
    """Return the ratio of the trainer's samples/s to the plain loop's: the median over steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_job(Path(folder), JOBS[name])
        torch.set_num_threads(1)
        plan = make_plan(load_config(config))
        watch = Watch(plan.device, {"plain": plainly(plain_loop(JOBS[name], plan))}, num_steps)
        train_while(config, watch.between, overrides)
    return watch.medians()["over plain"]


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
        plan = make_plan(load_config(write_job(Path(folder), LARGE[name], num_lanes=1, max_steps=MEMORY_STEPS)))
        torch.set_num_threads(1)
        steps = list(plan.feed.training(plan.order, range(1), Cursor(), MEMORY_STEPS))
        base = resident("VmRSS")
        loop = plain_loop(LARGE[name], plan)
        for lanes in steps:
            loop.step(batches_of(lanes))
        return resident("VmHWM") - base


def passes_of(num_tokens: int, *, in_chunks: bool) -> tuple[int, float]:
    """Return the peak bytes of a row's passes above weights and gradients, and the fewest CPU seconds of one pass."""
    torch.set_num_threads(1)
    task = CausalLM(model={"dim": DIM, "depth": 2, "heads": 8, "vocabulary": VOCABULARY}, max_tokens=num_tokens)
    model = task.build_model().train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, VOCABULARY, (1, num_tokens))
    batch = {"tokens": tokens, "places": torch.arange(num_tokens - 1), "targets": tokens[0, 1:]}
    base, seconds = resident("VmRSS"), list[float]()
    with mock.patch.object(language_model, "FEWEST_ROWS", language_model.FEWEST_ROWS if in_chunks else num_tokens):
        for _ in range(NUM_PASSES):
            began = time.process_time()
            torch.autograd.backward(task.loss(model, batch).total)
            seconds.append(time.process_time() - began)
    return resident("VmHWM") - base, min(seconds)
