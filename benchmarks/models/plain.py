"""The peer: a usual training loop in plain PyTorch with the same model, optimizer and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
MEAN, STD = (torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
WARMUP_STEPS = 10


def next_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of all tokens except the first of each row."""
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def classes(model: nn.Module, batch: Batch) -> Tensor:
    """Return transformers' loss of a classifier."""
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return model(**given, labels=batch["label"]).loss  # type: ignore[no-any-return]


def images(model: nn.Module, batch: Batch) -> Tensor:
    """Return transformers' loss of images."""
    pixels = (batch["pixels"].float() / 255 - MEAN) / STD
    return model(pixel_values=pixels, labels=batch["label"]).loss  # type: ignore[no-any-return]


LOSSES: Mapping[str, Loss] = {
    "lm": next_tokens,
    "classifier": classes,
    "resnet": images,
}


class PlainLoop:
    """A loop that accumulates gradients over micro-batches, clips, and applies AdamW with a warm-up."""

    def __init__(self, name: str, model: nn.Module, options: Mapping[str, Any]) -> None:
        self.model, self._loss, self._clip_norm = model, LOSSES[name], options["clip_norm"]
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        rates = {key: options[key] for key in ("lr", "weight_decay")}
        self.optimizer = torch.optim.AdamW(groups, **rates, **options["options"])
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
        self.losses: list[float] = []

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one step."""
        total = torch.zeros(())
        for batch in batches:
            loss = self._loss(self.model, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(float(total))
