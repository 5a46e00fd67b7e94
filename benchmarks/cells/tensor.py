"""Tensor parallelism compared with torch's: forward and backward passes of the package's decoder on two ranks.

The peer is a loop of torch's own parts (`parallelize_module` with ColwiseParallel and RowwiseParallel, each block's
inputs shared by PrepareModuleInput, on a process group of gloo), at the same degree and on the same tokens. Both run in
the same processes, in turn.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, Sides, compared, run
from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Attention, Decoder, DecoderShape

SHAPE = DecoderShape(vocabulary=512, dim=256, depth=4, heads=8, kv_heads=4)
TASK = CausalLM(model={"dim": 256, "depth": 4, "heads": 8, "kv_heads": 4})
ROWS, TOKENS, DEGREE = 4, 256, 2
NAMES = ("tp2_vs_torch", "tp2_cpu_vs_torch")


def beside_torch(effort: Effort) -> dict[str, object]:
    """Run both sides in turn, in two processes."""
    return dict(compared(effort, NAMES, run(in_turn, DEGREE, 8 if effort.is_quick else 40)))


def in_turn(meeting: Meeting, rounds: int, num_tokens: int = TOKENS, untimed: int = 2) -> Sides:
    """Check that both sides compute the same, and time passes of rows of `num_tokens` tokens."""
    meeting.join_torch(any_algorithm=True)
    ours, peer = _our_model(meeting.group), _torch_model()
    tokens = torch.randint(0, SHAPE.vocabulary, (ROWS, num_tokens), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), peer(tokens), rtol=1e-4, atol=1e-5)
    return meeting.in_turn([lambda: _pass(ours, tokens), lambda: _pass(peer, tokens)], rounds, untimed)


def _our_model(group: Group) -> nn.Module:
    model, links = _whole(), CellLinks()
    parallel = ParallelConfig(tensor=DEGREE)
    plan = cell_plan_of(TASK, model, parallel)
    assert plan is not None, "the decoder has one"
    cut = CutModel(model, plan, parallel.cell, links)
    cut.bind(Mesh(group.rank, DEGREE, parallel.cell), group)
    cut.take_place(group.rank)
    return model


def _torch_model() -> nn.Module:
    """Shard the same model as in torch's documentation."""
    model, mesh = _whole(), init_device_mesh("cpu", (DEGREE,))
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
        others = len(inspect.signature(Attention.forward).parameters) - 2  # `self` and `x`
        inputs = (Replicate(), *[None] * others)
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
