"""Measure the cost of equal bits: the canonical sum against all_reduce, a step against a hand-written DDP loop.

    python -m benchmarks.reduction [--json] [--quick] [--only NAME]

allreduce_ratio        time of the canonical sum over gloo's all_reduce, by floats and ranks (goal at most 1.15; for
                       three ranks with twelve lanes at most 2)
step_throughput_ratio  samples a second over the hand-written loop's, by ranks, four lanes (goal at least 0.97)

Both sides of a ratio run in the same processes, in turn, on the same floats; figures are of medians. The last line is
JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.figures import Effort, measure_chosen
from benchmarks.ranks import Meeting, Sides, compared, run
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.lanes import contiguous, lane_seed, owned_lanes, parts_of, tree_sum
from elastic_train.core.mesh import Mesh
from elastic_train.core.order import Cursor
from elastic_train.job.build import build_state
from elastic_train.job.state import StepFacts
from elastic_train.parallel.exchange import Scratch, Subtrees, exchange
from elastic_train.parallel.gradient_sum import TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder
from elastic_train.training.step_sums import gather_tables

SIZES = {"1M": 1_000_000, "25M": 25_000_000}
EXCHANGES = [("1M", 2, 8), ("1M", 4, 8), ("25M", 2, 8), ("25M", 3, 12), ("25M", 4, 8)]
SHAPE = EncoderShape(8192, 11, 128, 128, 2, 4, 0.1, 6, 4, 64)
NUM_LANES, MICRO_BATCH, TOKENS = 4, 8, 128
Batches = dict[tuple[int, int], dict[str, Tensor]]


Step = Callable[[], None]


def sums(effort: Effort) -> dict[str, object]:
    """Return the time of the canonical sum over gloo's all_reduce."""
    ratios = dict[str, float]()
    for size, num_ranks, num_lanes in EXCHANGES:
        rounds = max(5, (100 if size == "1M" else 24) // (4 if effort.is_quick else 1))
        found = run(_exchanges, num_ranks, num_lanes, SIZES[size], rounds)
        times = compared(effort, ("allreduce_ratio",), found, f"{size} floats, {num_ranks} ranks, {num_lanes} lanes")
        ratios[f"{size}_w{num_ranks}"] = round(1 / times["allreduce_ratio"], 3)
    return {"allreduce_ratio": ratios}


def steps(effort: Effort) -> dict[str, object]:
    """Return our samples/s over the hand-written loop's."""
    ratios = dict[str, float]()
    for num_ranks in (1, 2):
        found = run(_steps, num_ranks, 15 if effort.is_quick else 60)
        ratios |= {
            f"w{num_ranks}": ratio
            for ratio in compared(effort, ("step_throughput_ratio",), found, f"{num_ranks} ranks").values()
        }
    return {"step_throughput_ratio": ratios}


def _exchanges(meeting: Meeting, num_lanes: int, num_floats: int, rounds: int) -> Sides:
    meeting.join_torch(any_algorithm=True)
    group = meeting.group
    generator = torch.Generator().manual_seed(group.rank)
    layout = [parts_of(owned_lanes(rank, group.size, num_lanes), num_lanes) for rank in range(group.size)]
    mine = {part: [torch.randn(num_floats, generator=generator)] for part in layout[group.rank]}
    [flat] = next(iter(mine.values()))
    subtrees = Subtrees(flat, 0, 0, num_floats, mine, layout, num_lanes)
    theirs, scratch = flat.clone(), Scratch()
    sides = (lambda: exchange(subtrees, group, scratch)), (lambda: dist.all_reduce(theirs))
    return meeting.in_turn(sides, rounds, untimed=3)


def _batch(lane: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(lane_seed(0, step % 7, lane))
    return {
        "tokens": torch.randint(0, SHAPE.vocabulary, (MICRO_BATCH, TOKENS), generator=generator),
        "lengths": torch.randint(TOKENS // 2, TOKENS + 1, (MICRO_BATCH,), generator=generator),
        "numeric": torch.randn(MICRO_BATCH, SHAPE.num_numeric, generator=generator),
        "is_missing": torch.zeros(MICRO_BATCH, SHAPE.num_numeric, dtype=torch.bool),
        "categories": torch.zeros(MICRO_BATCH, SHAPE.num_categorical, dtype=torch.int64),
        "label": torch.randint(0, SHAPE.num_classes, (MICRO_BATCH,), generator=generator),
    }


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(*(batch[name] for name in ("tokens", "lengths", "numeric", "is_missing", "categories")))
    return nn.functional.cross_entropy(logits, batch["label"], reduction="sum")


def _steps(meeting: Meeting, rounds: int) -> Sides:
    """Time our lane-wise step, and that of a well-written DDP loop with accumulation."""
    meeting.join_torch(any_algorithm=True)
    lanes = owned_lanes(meeting.group.rank, meeting.group.size, NUM_LANES)
    batches = {(lane, step): _batch(lane, step) for lane in lanes for step in range(7)}
    sides = _lane_step(meeting.group, lanes, batches), _ddp_step(meeting.group.size, lanes, batches)
    return meeting.in_turn(sides, rounds, untimed=3)


def _lane_step(group: Group, lanes: range, batches: Batches) -> Step:
    torch.manual_seed(0)
    model = TextEncoder(SHAPE)
    state = build_state(model, OptimizerConfig(), 10_000, "cpu", is_fp16=False)
    gradients = TreeSum([tree_of("canonical", list(model.parameters()), group, contiguous(group.size, NUM_LANES))])

    def step() -> None:
        gradients.begin()
        rows: dict[int, list[float | int]] = {}
        for lane in lanes:
            with gradients.turn(lane):
                torch.manual_seed(lane_seed(0, state.step, lane))
                loss = _loss(model, batches[lane, state.step % 7])
                loss.backward()  # type: ignore[no-untyped-call]
            rows[lane] = [float(loss.detach()), float(MICRO_BATCH), MICRO_BATCH, 1, 2, 0]
        table = gather_tables(group, Mesh(group.rank, group.size), contiguous(group.size, NUM_LANES), rows).lanes
        gradients.finish(tree_sum([float(row[1]) for row in table]))
        norm = state.measure()
        group.all_gather(norm)
        state.apply(StepFacts(Cursor(), CoverageSums(), 1, SampleAccount()), norm)

    return step


def _ddp_step(size: int, lanes: range, batches: Batches) -> Step:
    torch.manual_seed(0)
    model = DistributedDataParallel(TextEncoder(SHAPE))
    state = build_state(model.module, OptimizerConfig(), 10_000, "cpu", is_fp16=False)
    share = size / (NUM_LANES * MICRO_BATCH)

    def step() -> None:
        state.optimizer.zero_grad()
        total = torch.zeros(1)
        for lane in lanes:
            with contextlib.nullcontext() if lane == lanes[-1] else model.no_sync():
                loss = _loss(model, batches[lane, state.step % 7])
                (loss * share).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        dist.all_reduce(total)
        state.apply(StepFacts(Cursor(), CoverageSums(), 1, SampleAccount()), state.measure())

    return step


if __name__ == "__main__":
    measure_chosen("benchmarks.reduction", __doc__, {"allreduce_ratio": sums, "step_throughput_ratio": steps})
