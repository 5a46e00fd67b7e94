"""Plans compared with measurements: step time and memory per rank, of three models with 1, 2 and 4 ranks.

The network is a wire of known alpha and beta (`benchmarks.sharding.overlap`). Each round first times a rank's lanes
while all ranks compute theirs, which calibrates the plan, and then a whole step, which the plan has to predict, so that
disturbances affect both equally.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.figures import Effort
from benchmarks.models.jobs import Job as Description
from benchmarks.models.jobs import write_job
from benchmarks.sharding.jobs import Job, Mode
from benchmarks.sharding.overlap import put_on_wire
from benchmarks.sharding.ranks import Meeting, run
from elastic_train.config.sources import load_config
from elastic_train.core.lanes import lane_seed
from elastic_train.core.order import Cursor
from elastic_train.job.plan import Plan, make_plan
from elastic_train.planning.arithmetic.catalogue import Cluster, Link, shipped
from elastic_train.planning.arithmetic.layouts import Layout
from elastic_train.planning.arithmetic.memory import memory_of
from elastic_train.planning.arithmetic.step_time import crowding, passes_of, step_time
from elastic_train.planning.calibrating import measure_device
from elastic_train.planning.reading import Read, read_config

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of <malloc.h>."""
ALPHA_S, BYTES_PER_S = 2e-3, 0.1e9
WORLDS, NUM_LANES = (1, 2, 4), 4
_TEXT = {"max_tokens": 128, "vocabulary": 2048, "numeric": [], "categorical": []}
MODELS: Mapping[str, Description] = {
    "decoder": Description(
        "elastic_train.tasks.causal_lm:CausalLM",
        {"max_tokens": 128, "model": {"dim": 128, "depth": 4, "heads": 4, "vocabulary": 2048}},
        2,
    ),
    "classifier": Description(
        "elastic_train.tasks.text_classifier:TextClassifier", {**_TEXT, "dim": 128, "depth": 4, "heads": 4}, 2
    ),
    "resnet": Description(
        "elastic_train.tasks.image_classifier:ImageClassifier",
        {"size": 64, "crop": "shift", "model": {"width": 16}},
        8,
    ),
}
"""Models for step times; memory is measured with four times the samples, or Python's own would dominate."""
MORE = 4
CASES: tuple[tuple[str, Mode, int], ...] = (
    *((name, "none", world) for name in MODELS for world in WORLDS),
    ("decoder", "optimizer", 4),
    ("decoder", "gradients", 4),
    ("decoder", "parameters", 4),
)


@dataclass(frozen=True, slots=True)
class OfTask:
    """A configured task's lanes over the first micro-batches of its data."""

    plan: Plan
    batches: Mapping[int, dict[str, Tensor]]

    @property
    def num_lanes(self) -> int:
        return self.plan.num_lanes

    @property
    def num_samples(self) -> int:
        return self.plan.num_lanes * self.plan.micro_batch

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        return self.plan.task.build_model().train()

    def loss(self, model: nn.Module, step: int, lane: int) -> Tensor:
        torch.manual_seed(lane_seed(1, step, lane))
        return self.plan.task.loss(model, self.batches[lane]).total


def errors(effort: Effort) -> dict[str, object]:
    """Return the plans' relative errors, the largest and by case."""
    rounds = 3 if effort.is_quick else 9
    steps, memories = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        jobs = {name: _read(Path(folder) / name, one) for name, one in MODELS.items()}
        larger = {
            name: _read(Path(folder) / f"{name}-larger", replace(one, micro_batch=MORE * one.micro_batch))
            for name, one in MODELS.items()
        }
        for name, shards, world in CASES:
            case = f"{name}_{shards}_w{world}"
            path, facts = jobs[name]
            timed = run(_steps, world, path, shards, rounds)
            steps[case] = _off(_foreseen_s(facts, shards, world, timed), _slowest(timed))
            path, facts = larger[name]
            taken = [one["bytes"] for one in run(_peak, world, path, shards)]
            memories[case] = _off(_foreseen_bytes(facts, shards, world), max(taken))
            effort.say(
                f"{case}: step {_slowest(timed):.3f} s, plan off by {steps[case]:+.1%}; "
                f"memory {max(taken) / 1e6:.0f} MB, plan off by {memories[case]:+.1%}"
            )
    return {
        "plan_step_error": round(max(map(abs, steps.values())), 3),
        "plan_memory_error": round(max(map(abs, memories.values())), 3),
        "plan_step_errors": {case: round(value, 3) for case, value in steps.items()},
        "plan_memory_errors": {case: round(value, 3) for case, value in memories.items()},
    }


def _read(folder: Path, description: Description) -> tuple[str, Read]:
    folder.mkdir()
    path = write_job(folder, description, num_lanes=NUM_LANES)
    return path, read_config(load_config(path))


def _off(planned: float, measured: float) -> float:
    return planned / measured - 1


def _slowest(timed: list[dict[str, float]]) -> float:
    return max(one["step_s"] for one in timed)


def _foreseen_s(read: Read, shards: Mode, world: int, timed: list[dict[str, float]]) -> float:
    """Return the planned step time on devices as fast as these ranks were while all of them computed."""
    slowest = max(timed, key=lambda one: one["lane_s"])
    device = replace(
        shipped().device("CPU"),
        tflops_fp32=slowest["tflops"],
        memory_gb_per_s=slowest["memory_gb_per_s"],
        call_s=slowest["call_s"],
        matmul_share=1.0,
        memory_share=1.0,
        node=len(os.sched_getaffinity(0)),
    )
    wire = Link("wire", BYTES_PER_S / 1e9, ALPHA_S)
    passes = passes_of(read.facts, Layout(), device, crowding(Cluster(device, wire, wire, 1, world), threads=1))
    device = replace(device, pace=slowest["lane_s"] / (passes.forward_s + passes.backward_s))
    layout = replace(read.layout, shards=shards, copies=1)
    return step_time(read.facts, layout, read.batch, Cluster(device, wire, wire, 1, world)).total_s


def _foreseen_bytes(read: Read, shards: Mode, world: int) -> float:
    """Return the planned bytes of a rank, without saves."""
    link = shipped().link("Loopback")
    cluster = Cluster(shipped().device("CPU"), link, link, 1, world)
    memory = memory_of(read.facts, replace(read.layout, shards=shards, copies=1), read.batch, cluster)
    return memory.total - memory.staging


def _work(path: str) -> OfTask:
    plan = make_plan(load_config(path))
    [batches] = plan.feed.training(plan.order, range(plan.num_lanes), Cursor(), num_steps=1)
    return OfTask(plan, {one.lane: one.tensors for one in batches if one.tensors is not None})


def _steps(meeting: Meeting, path: str, shards: Mode, rounds: int) -> dict[str, float]:
    """Time a rank's lanes and whole steps, in turn."""
    put_on_wire(BYTES_PER_S, ALPHA_S)
    work = _work(path)
    job = Job(meeting.group, work, shards, 1)
    model = work.build()
    meeting.group.barrier()
    device = measure_device(rounds)
    lanes, steps = list[float](), list[float]()
    for number in range(rounds + 1):
        lane_s = meeting.timed(lambda: _all_pass(meeting, work, model, job.lanes)) / max(1, len(job.lanes))
        step_s = meeting.timed(job.step)
        if number:
            lanes.append(lane_s)
            steps.append(step_s)
    return {
        "lane_s": statistics.median(lanes),
        "step_s": statistics.median(steps),
        "tflops": device.tflops_fp32,
        "memory_gb_per_s": device.memory_gb_per_s,
        "call_s": device.call_s,
    }


def _all_pass(meeting: Meeting, work: OfTask, model: nn.Module, lanes: range) -> None:
    """Compute lanes until all ranks are done, since a step takes as long as its slowest rank."""
    _passes(work, model, lanes)
    meeting.group.barrier()


def _passes(work: OfTask, model: nn.Module, lanes: range) -> None:
    """Compute lanes as in a step, without exchanges; gradients accumulate in place, as in flat buffers."""
    for lane in lanes:
        torch.autograd.backward(work.loss(model, 0, lane))


def _peak(meeting: Meeting, path: str, shards: Mode) -> dict[str, float]:
    """Return a rank's peak resident bytes during some steps, above those before it built its model."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # so that freed memory is no longer resident
    work = _work(path)
    _passes(work, work.build(), range(1))  # excludes kernels, tables and threads of any process
    gc.collect()
    meeting.group.barrier()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    job = Job(meeting.group, work, shards, 1)
    for _ in range(3):
        job.step()
    return {"bytes": float(_resident("VmHWM") - before)}


def _resident(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
