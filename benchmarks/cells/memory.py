"""Activation memory of a forward pass on ranks that share tokens or layers, over that of a rank that has them all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.cells.stage import lone_part
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder, DecoderShape
from elastic_train.tasks.placements import loss_of

LONG = DecoderShape(vocabulary=8192, dim=256, depth=6, heads=8, kv_heads=2)
WIDTH, QUICK_WIDTH = 2048, 512
SIZES = {"dim": 256, "depth": 6, "heads": 8, "kv_heads": 4}
SHAPE = DecoderShape(vocabulary=512, **SIZES)  # type: ignore[arg-type]
DEGREE, TOKENS = 2, 512


def of_context(effort: Effort) -> dict[str, object]:
    """Compare a rank that computes half of a row with one that computes the whole row."""
    width = QUICK_WIDTH if effort.is_quick else WIDTH
    torch.manual_seed(0)
    model, task = Decoder(LONG), CausalLM(model={"dim": LONG.dim, "heads": LONG.heads})
    tokens = torch.randint(0, LONG.vocabulary, (1, width))
    batch = {"tokens": tokens, "places": torch.arange(width - 1), "targets": tokens[0, 1:]}
    whole = _kept_bytes(model, lambda: task.loss(model, batch).total)
    part = _kept_bytes(model, lambda: loss_of(task, model, batch, lone_part(2)).total)
    effort.say(f"{width} tokens: {whole / 2**20:.0f} MiB kept of the whole row, {part / 2**20:.0f} MiB of a half")
    return {"cp2_kept_ratio": round(part / whole, 3)}


def of_tensor(effort: Effort) -> dict[str, object]:
    """Compare tensor ranks, with and without sequence parallelism, with a rank that holds the whole model."""
    whole, plain, shared = run(_of_blocks, DEGREE)[0]
    effort.say(
        f"{TOKENS} tokens: {whole / 2**20:.1f} MiB kept of all blocks by one rank, {plain / 2**20:.1f} MiB by one of "
        f"{DEGREE} tensor ranks, {shared / 2**20:.1f} MiB where they share out tokens"
    )
    return {"sp2_kept_ratio": round(shared / whole, 3), "tp2_kept_ratio": round(plain / whole, 3)}


def _of_blocks(meeting: Meeting) -> list[int]:
    found = []
    for sequence, num_own in ((None, TOKENS), (False, TOKENS), (True, TOKENS // DEGREE)):
        model = _model(sequence, meeting.group)
        blocks = [name for name in model.parts if "blocks" in name]
        row = torch.zeros(1, TOKENS, dtype=torch.int64), None, None, torch.randn(1, num_own, SHAPE.dim)
        found.append(_kept_bytes(model, lambda model=model, blocks=blocks, row=row: model.run(blocks, *row)))  # type: ignore[misc]
    return found


def _model(sequence: bool | None, group: Group) -> Decoder:
    """Return a model that is sharded with or without sequence parallelism; the whole model for None."""
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    if sequence is not None:
        parallel = ParallelConfig(tensor=DEGREE, sequence=sequence)
        plan = cell_plan_of(CausalLM(model=SIZES), model, parallel)
        assert plan is not None, "the decoder can be cut"
        cut = CutModel(model, plan, parallel.cell, CellLinks())
        cut.bind(Mesh(group.rank, DEGREE, parallel.cell), group)
        cut.take_place(group.rank)
    return model


def _kept_bytes(model: Decoder, compute: Callable[[], Tensor]) -> int:
    """Return the bytes kept for the backward pass, apart from the model's own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = compute()  # keeps the activations alive until they are counted
        total = sum(kept.values())
    assert made.requires_grad, "there is a backward pass"
    return total
