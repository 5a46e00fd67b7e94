"""What a cell costs beside torch's own tensor parallelism: forward and backward passes of the package's decoder.

    python -m benchmarks.cells [--json] [--quick] [--only NAME]

`tp2_vs_torch`: passes a second of two ranks that hold the decoder as a cell, over those of a loop of torch's own parts
(`parallelize_module` with ColwiseParallel and RowwiseParallel, each block's inputs shared by PrepareModuleInput, on a
process group of gloo), at the same degree and on the same tokens. Both run in the same processes, in turn; the figure
is that of the medians (goal at least 0.95). `tp2_cpu_vs_torch` is the same of processor time, which other programs on
the machine change less.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn

from benchmarks.figures import Effort, measure_chosen
from elastic_train.config.parallel import ParallelConfig
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.models.decoder import Decoder, DecoderShape

SHAPE = DecoderShape(vocabulary=512, dim=256, depth=4, heads=8, kv_heads=4)
TASK = CausalLM(model={"dim": 256, "depth": 4, "heads": 8, "kv_heads": 4})
ROWS, TOKENS, DEGREE = 4, 256, 2
TIMEOUT_S = 120.0
Times = tuple[float, float]
"""Seconds of the clock, and of the processor."""


def main() -> None:
    """Measure what is asked for."""
    measure_chosen("benchmarks.cells", __doc__, {"tp2_vs_torch": beside_torch, "tp2_cpu_vs_torch": beside_torch})


def beside_torch(effort: Effort) -> dict[str, object]:
    """Run both in turn, in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = 8 if effort.is_quick else 40
        spawn(_rank, args=(rounds, folder), nprocs=DEGREE)  # type: ignore[no-untyped-call]
        ours, peer = json.loads((Path(folder) / "times.json").read_text())
    figures = {}
    for place, name in enumerate(("tp2_vs_torch", "tp2_cpu_vs_torch")):
        mine, theirs = (statistics.median(times[place] for times in side) for side in (ours, peer))
        effort.say(f"{name}: {1e3 * mine:.1f} ms a pass, torch's {1e3 * theirs:.1f} ms")
        figures[name] = round(theirs / mine, 3)
    return dict(figures)


def _rank(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", DEGREE)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("peer", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=DEGREE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = Group(rank, DEGREE, dist.PrefixStore("ours", store), TIMEOUT_S)  # type: ignore[attr-defined]
    ours, peer = _our_model(group), _torch_model()
    tokens = torch.randint(0, SHAPE.vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), peer(tokens), rtol=1e-4, atol=1e-5)
    times: list[list[Times]] = [[], []]
    for _ in range(rounds + 2):
        for side, model in enumerate((ours, peer)):
            group.barrier()
            times[side].append(_timed(lambda: _pass(model, tokens)))  # noqa: B023 - called at once
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps([side[2:] for side in times]))
    group.close()
    dist.barrier()
    dist.destroy_process_group()


def _our_model(group: Group) -> nn.Module:
    model, links = _whole(), CellLinks()
    links.bind(group)
    parallel = ParallelConfig(tensor=DEGREE)
    plan = cell_plan_of(TASK, model, parallel)
    assert plan is not None, "the decoder has one"
    CutModel(model, plan, parallel.cell, links).take_place(group.rank)
    return model


def _torch_model() -> nn.Module:
    """Cut the same model as torch's documentation does."""
    model, mesh = _whole(), init_device_mesh("cpu", (DEGREE,))
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
        inputs = (Replicate(), None, None, None)
        shared = {
            "attention": PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs),
            "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        }
        parallelize_module(block, mesh, {**shared, **plan})
    return model


def _whole() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPE)


def _pass(model: nn.Module, tokens: Tensor) -> None:
    model(tokens).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def _timed(act: Callable[[], None]) -> Times:
    started = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - started[0], time.process_time() - started[1]


if __name__ == "__main__":
    main()
