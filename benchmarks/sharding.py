"""What sharded state costs and saves: bits, memory, time of a step, and what moves when a rank is lost.

    python -m benchmarks.sharding [--json] [--quick]

one_hash              whether 1 to 4 ranks with one and two copies end with the weights of one that holds everything;
                      with the optimizer's state sharded, and with the gradients, too
live_ratio            bytes a parameter that a rank holds (weights, gradients, moments, sums put aside), over the 16 of
                      whole state; names are the mode, the ranks and the copies, as in gradients_w4_c1 (goal: 0.45)
step_vs_replicated    time of a step over that of whole state in the same processes, in turn (goals with two ranks: at
                      most 1.05 for optimizer, 1.15 for gradients)
sent_vs_all_reduce    bytes that a rank gives to a step's exchange over an all-reduce's 2n(W - 1)/W
move_gb_per_s         what the busiest rank receives when a rank of four is lost, over the time from the plan to the new
                      seat, and over that of a bare exchange of as many bytes between as many ranks (goal at least 0.7)

Steps are of a transformer encoder with AdamW and clipping, its lanes dealt to all ranks. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.config.schema import OptimizerConfig, ParallelConfig
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lanes import lane_seed
from elastic_train.core.order import Cursor
from elastic_train.job.reseating import bring, reseat, roll_forward
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.job.state import AppliedState, StepFacts, build_state
from elastic_train.parallel.group import Group
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder

SHAPE = EncoderShape(8192, 11, 128, 256, 4, 4, 0.1, 1, 1, 64)
NUM_LANES, MICRO_BATCH, TOKENS = 8, 4, 64
MODES: tuple[Literal["optimizer", "gradients"], ...] = ("optimizer", "gradients")


@dataclass(frozen=True)
class Case:
    """One measurement on so many ranks."""

    kind: str
    world_size: int
    copies: int = 1
    rounds: int = 1
    shards: Literal["none", "optimizer", "gradients"] = "optimizer"


def main() -> None:
    """Run all cases and print a table, then one JSON line."""
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.sharding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="print the last line only")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    chosen = arguments.parse_args()
    rounds = 6 if chosen.quick else 24
    found = {"one_hash": one_hash(), **steps(rounds), "move_gb_per_s": move(3 if chosen.quick else 9)}
    if not chosen.json:
        table = Table("figure", "case", "value")
        for name, values in found.items():
            for case, value in values.items() if isinstance(values, dict) else [("", values)]:
                table.add_row(name, case, str(value))
        Console().print(table)
    print(json.dumps(found))


def one_hash() -> bool:
    """Say whether all worlds end with the weights of one rank that holds everything."""
    (alone,) = run(Case("hash", 1, shards="none"))
    worlds = [
        Case("hash", size, copies, shards=shards) for shards in MODES for size in (1, 2, 3, 4) for copies in (1, 2)
    ]
    return all(of_rank == alone for case in worlds for of_rank in run(case))


def steps(rounds: int) -> dict[str, object]:
    """Return memory, time and bytes of a step beside those of whole state."""
    live, slower, sent = dict[str, float](), dict[str, float](), dict[str, float]()
    for shards, (size, copies) in itertools.product(MODES, ((2, 1), (2, 2), (4, 1), (4, 2))):
        name, found = f"{shards}_w{size}_c{copies}", run(Case("steps", size, copies, rounds, shards))
        slower[name] = round(statistics.median(one["ratio"] for one in found), 3)
        if size == 4:
            live[name] = round(max(one["live"] for one in found), 3)
            sent[name] = round(statistics.mean(one["sent"] for one in found), 3)
    return {"live_ratio": live, "step_vs_replicated": slower, "sent_vs_all_reduce": sent}


def move(rounds: int) -> dict[str, float]:
    """Return how fast the survivors of four ranks with two copies take over what the lost one held."""
    found = run(Case("move", 4, 2, rounds))[0]
    return {"gb_per_s": round(found["gb_per_s"], 3), "vs_bare": round(found["vs_bare"], 3)}


def run(case: Case) -> list:  # type: ignore[type-arg]  # what a case's ranks leave
    """Run a case on its ranks; return what each rank leaves."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_of_rank, (case, folder), case.world_size)  # type: ignore[no-untyped-call]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(case.world_size)]


def _of_rank(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    group = _meet(folder, "world", rank, case.world_size)
    measure: Callable[[Group, Case, str], object] = {"hash": _hash, "steps": _steps, "move": _move}[case.kind]
    found = measure(group, case, folder)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def _meet(folder: str, name: str, rank: int, size: int) -> Group:
    return Group(rank, size, FileStore(f"{folder}/{name}", size), 120)


class Job:
    """A state and how it takes steps."""

    def __init__(self, group: Group, case: Case) -> None:
        torch.manual_seed(1)
        parallel = ParallelConfig(shards=case.shards, copies=case.copies)
        config = OptimizerConfig(clip_norm=0.01, warmup_steps=2)
        model = TextEncoder(SHAPE).train()
        self.group = group
        self.state: AppliedState = build_state(model, config, 10_000, "cpu", is_fp16=False, parallel=parallel)
        if isinstance(self.state.shards, HeldState):
            brought = bring(group, self.state, self.state.shards, ("", str(group.rank)), counts=True)
            reseat(group, self.state, self.state.shards, brought)
        self.gradients = self.state.shards.sum_of(group, NUM_LANES)
        self.lanes = self.state.shards.assigned(group.size, NUM_LANES)[group.rank]

    def step(self) -> None:
        """Take one step as the training loop does."""
        state = self.state
        self.gradients.begin(self.lanes)
        for lane in self.lanes:
            with self.gradients.lane(lane):
                torch.manual_seed(lane_seed(1, state.step, lane))
                torch.autograd.backward(_loss(state.model))
        self.gradients.serve()
        self.gradients.finish(float(NUM_LANES * MICRO_BATCH))
        norm = state.shards.norm_of(self.group.all_gather(state.measure()))
        state.apply(StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount()), norm)
        state.shards.refresh(self.group)


def _loss(model: nn.Module) -> Tensor:
    """Return a loss of a drawn micro-batch."""
    tokens = torch.randint(1, SHAPE.vocabulary, (MICRO_BATCH, TOKENS))
    lengths = torch.full((MICRO_BATCH,), TOKENS)
    numbers, missing = torch.zeros(MICRO_BATCH, 1), torch.zeros(MICRO_BATCH, 1, dtype=torch.bool)
    logits: Tensor = model(tokens, lengths, numbers, missing, torch.zeros(MICRO_BATCH, 1, dtype=torch.int64))
    return nn.functional.cross_entropy(logits, tokens[:, 0] % SHAPE.num_classes, reduction="sum")


def _hash(group: Group, case: Case, folder: str) -> str:
    job = Job(group, case)
    for _ in range(4):
        job.step()
    return weights_digest(job.state.model)


def _steps(group: Group, case: Case, folder: str) -> dict[str, float]:
    """Time steps of whole and of sharded state in turn; count the bytes that a rank holds and gives to a step."""
    sharded = Job(group, case)
    sharded.step()
    num_parameters = sum(parameter.numel() for parameter in sharded.state.model.parameters())
    live = _live_bytes() / 16 / num_parameters
    whole = Job(group, replace(case, shards="none"))
    whole.step()
    ours, theirs = list[float](), list[float]()
    for _ in range(case.rounds):
        ours.append(_timed(group, sharded))
        theirs.append(_timed(group, whole))
    before = group.num_bytes
    sharded.step()
    all_reduce = 2 * 4 * num_parameters * (group.size - 1) / group.size
    # What is received is counted, too; a rank receives as much as it gives, over all ranks.
    return {
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "live": live,
        "sent": (group.num_bytes - before) / 2 / all_reduce,
    }


def _timed(group: Group, job: Job) -> float:
    group.barrier()
    started = time.perf_counter()
    job.step()
    return time.perf_counter() - started


def _live_bytes() -> int:
    """Return the bytes of all memory that tensors have, as far as Python reaches them."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _move(group: Group, case: Case, folder: str) -> dict[str, float]:
    """Let three of four ranks take over what the fourth held, again and again; time it beside a bare exchange."""
    rates, bare = list[float](), list[float]()
    for turn in range(case.rounds):
        job = Job(group, case)
        job.step()
        left = _meet(folder, f"left-{turn}", group.rank, 3) if group.rank < 3 else None
        if left is not None:
            rate, other = _moved(left, job)
            rates.append(rate)
            bare.append(other)
        group.barrier()
    if group.rank == 3:
        return {}
    return {"gb_per_s": statistics.median(rates), "vs_bare": statistics.median(rates) / statistics.median(bare)}


def _moved(left: Group, job: Job) -> tuple[float, float]:
    """Return the GB a second of taking seats, and of an exchange in a ring of as many bytes."""
    shards = job.state.shards
    assert isinstance(shards, HeldState), "the state is sharded"
    left.barrier()
    started = time.perf_counter()
    brought = bring(left, job.state, shards, ("", str(left.rank)), counts=True)
    brought = roll_forward(left, job.state, shards, brought)
    before = left.num_bytes
    taken = reseat(left, job.state, shards, brought)
    seconds = time.perf_counter() - started
    num_bytes = int(left.all_gather(torch.tensor(left.num_bytes - before)).max()) // 2
    assert not taken.lost.size, "three ranks hold everything"
    given, got = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    left.barrier()
    began = time.perf_counter()
    left.exchange([((left.rank + 1) % 3, given)], [((left.rank - 1) % 3, got)])
    return num_bytes / seconds / 1e9, num_bytes / (time.perf_counter() - began) / 1e9


if __name__ == "__main__":
    main()
