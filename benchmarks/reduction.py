"""Measure the cost of equal bits: the canonical sum against all_reduce, a step against a hand-written DDP loop.

    python -m benchmarks.reduction [--json] [--quick]

Both sides of a ratio run in the same processes, in turn (A B A B ...), on the same floats; figures are medians. The
last line is JSON: `allreduce_ratio`, time over gloo's all_reduce (goal at most 1.15; for three ranks with twelve lanes
at most 2), and `step_throughput_ratio`, samples a second over the hand-written loop's (goal at least 0.97).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lanes import contiguous, lane_seed, owned_lanes, parts_of
from elastic_train.core.mesh import Mesh
from elastic_train.core.order import Cursor
from elastic_train.job.build import build_state
from elastic_train.job.state import StepFacts
from elastic_train.parallel.exchange import Scratch, Subtrees, exchange
from elastic_train.parallel.gradient_sum import TreeSum, tree_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.step_tables import gather_tables, tree_sum
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder

SIZES = {"1M": 1_000_000, "25M": 25_000_000}
EXCHANGES = [("1M", 2, 8), ("1M", 4, 8), ("25M", 2, 8), ("25M", 3, 12), ("25M", 4, 8)]
SHAPE = EncoderShape(8192, 11, 128, 128, 2, 4, 0.1, 6, 4, 64)
MICRO_BATCH, TOKENS = 8, 128
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """One measurement: the code to run, the number of ranks, and the rounds."""

    kind: str
    world_size: int
    num_lanes: int
    num_floats: int
    rounds: int


def main() -> None:
    """Run all cases; print a table, then one JSON line."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.reduction", description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print the last line only")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    chosen = arguments.parse_args()
    share = 4 if chosen.quick else 1
    table = Table("case", "ours, median", "peer, median", "ratio", "goal")
    ratios: dict[str, float] = {}
    for size, world_size, num_lanes in EXCHANGES:
        rounds = max(5, (100 if size == "1M" else 24) // share)
        ours, peer = run(Case("exchange", world_size, num_lanes, SIZES[size], rounds))
        ratios[f"{size}_w{world_size}"] = round(ours / peer, 3)
        goal = "<= 2" if world_size == 3 else "<= 1.15"
        name = f"sum of {size} floats, {world_size} ranks, {num_lanes} lanes"
        table.add_row(name, f"{1e3 * ours:.1f} ms", f"{1e3 * peer:.1f} ms", f"{ours / peer:.3f}", goal)
    throughput: dict[str, float] = {}
    for world_size in (1, 2):
        ours, peer = run(Case("step", world_size, 4, 0, max(8, 60 // share)))
        throughput[f"w{world_size}"] = round(peer / ours, 3)
        name = f"training step, {world_size} ranks, 4 lanes of {MICRO_BATCH}x{TOKENS} tokens"
        table.add_row(
            name, f"{1e3 * ours:.1f} ms", f"{1e3 * peer:.1f} ms", f"{peer / ours:.3f} (throughput)", ">= 0.97"
        )
    if not chosen.json:
        Console().print(table)
    print(json.dumps({"allreduce_ratio": ratios, "step_throughput_ratio": throughput}))


def run(case: Case) -> tuple[float, float]:
    """Measure a case in fresh processes; return the medians of ours and of the peer, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(case, folder), nprocs=case.world_size)  # type: ignore[no-untyped-call]
        ours, peer = json.loads((Path(folder) / "times.json").read_text())
    return statistics.median(ours), statistics.median(peer)


def _rank(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", case.world_size)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("peer", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = Group(rank, case.world_size, dist.PrefixStore("ours", store), TIMEOUT_S)  # type: ignore[attr-defined]
    sides = _exchange_sides(case, group) if case.kind == "exchange" else _step_sides(case, group)
    times = _alternate(sides, case.rounds)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _alternate(sides: tuple[Callable[[], None], Callable[[], None]], rounds: int) -> list[list[float]]:
    """Time the two sides in turn, each after a barrier; the first rounds warm up and are not counted."""
    times: list[list[float]] = [[], []]
    for number in range(rounds + 3):
        for place in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            started = time.perf_counter()
            sides[place]()
            if number >= 3:
                times[place].append(time.perf_counter() - started)
    return times


def _exchange_sides(case: Case, group: Group) -> tuple[Callable[[], None], Callable[[], None]]:
    generator = torch.Generator().manual_seed(group.rank)
    layout = [parts_of(owned_lanes(rank, group.size, case.num_lanes), case.num_lanes) for rank in range(group.size)]
    mine = {part: [torch.randn(case.num_floats, generator=generator)] for part in layout[group.rank]}
    [flat] = next(iter(mine.values()))
    subtrees = Subtrees(flat, 0, 0, case.num_floats, mine, layout, case.num_lanes)
    theirs, scratch = flat.clone(), Scratch()

    def ours() -> None:
        exchange(subtrees, group, scratch)

    return ours, lambda: dist.all_reduce(theirs)


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


def _step_sides(case: Case, group: Group) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return our lane-wise step, and a well-written DDP loop with accumulation."""
    lanes = owned_lanes(group.rank, group.size, case.num_lanes)
    batches = {(lane, step): _batch(lane, step) for lane in lanes for step in range(7)}
    return _lane_step(case, group, lanes, batches), _ddp_step(case, lanes, batches)


def _lane_step(
    case: Case, group: Group, lanes: range, batches: dict[tuple[int, int], dict[str, Tensor]]
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = TextEncoder(SHAPE)
    state = build_state(model, OptimizerConfig(), 10_000, "cpu", is_fp16=False)
    gradients = TreeSum([tree_of("canonical", list(model.parameters()), group, contiguous(group.size, case.num_lanes))])

    def step() -> None:
        gradients.begin()
        rows: dict[int, list[float | int]] = {}
        for lane in lanes:
            with gradients.turn(lane):
                torch.manual_seed(lane_seed(0, state.step, lane))
                loss = _loss(model, batches[lane, state.step % 7])
                loss.backward()  # type: ignore[no-untyped-call]
            rows[lane] = [float(loss.detach()), float(MICRO_BATCH), MICRO_BATCH, 1, 2, 0]
        table = gather_tables(group, Mesh(group.rank, group.size), contiguous(group.size, case.num_lanes), rows).lanes
        gradients.finish(tree_sum([float(row[1]) for row in table]))
        norm = state.measure()
        group.all_gather(norm)
        state.apply(StepFacts(Cursor(), CoverageSums(), 1, SampleAccount()), norm)

    return step


def _ddp_step(case: Case, lanes: range, batches: dict[tuple[int, int], dict[str, Tensor]]) -> Callable[[], None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(TextEncoder(SHAPE))
    state = build_state(model.module, OptimizerConfig(), 10_000, "cpu", is_fp16=False)
    share = case.world_size / (case.num_lanes * MICRO_BATCH)

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
    main()
