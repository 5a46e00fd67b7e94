"""Activation memory of a lane's forward pass if each rank computes half of each row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.figures import Effort
from elastic_train.job.cells.context import lone_part
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape
from elastic_train.tasks.placements import loss_of
from elastic_train.tasks.task import LaneLoss

SHAPE = DecoderShape(vocabulary=8192, dim=256, depth=6, heads=8, kv_heads=2)
WIDTH, QUICK_WIDTH = 2048, 512


def kept_ratio(effort: Effort) -> dict[str, object]:
    """Compare part of one row with the whole row."""
    width = QUICK_WIDTH if effort.is_quick else WIDTH
    torch.manual_seed(0)
    model, task = Decoder(SHAPE), CausalLM(model={"dim": SHAPE.dim, "heads": SHAPE.heads})
    tokens = torch.randint(0, SHAPE.vocabulary, (1, width))
    batch = {"tokens": tokens, "places": torch.arange(width - 1), "targets": tokens[0, 1:]}
    whole = _kept_bytes(model, lambda: task.loss(model, batch))
    part = _kept_bytes(model, lambda: loss_of(task, model, batch, lone_part(2)))
    effort.say(f"{width} tokens: {whole / 2**20:.0f} MiB kept of the whole row, {part / 2**20:.0f} MiB of a half")
    return {"cp2_kept_ratio": round(part / whole, 3)}


def _kept_bytes(model: Decoder, compute: Callable[[], LaneLoss]) -> int:
    """Return the bytes kept for the backward pass, apart from the model's own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compute()  # keeps the activations alive until they are counted
        total = sum(kept.values())
    assert loss.total.requires_grad, "there is a backward pass"
    return total
