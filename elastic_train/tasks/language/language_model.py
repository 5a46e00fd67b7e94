"""The interface between the next-token task and the model that it trains, and the loss of the model's last layer.

`LastLayer` computes the loss of tokens from the input of a model's last linear layer, in chunks of tokens. Only one
chunk's logits are in memory. The forward pass computes a chunk's gradients together with its loss, as Liger Kernel does
(Hsu et al. 2024), so no product is computed twice. Chunks depend on the number of targets and the vocabulary only;
weight gradients are summed at least in fp32, in chunk order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elastic_train.data.dataset.manifest import Manifest
from elastic_train.tasks.placements import Degrees, Piece, Placements
from elastic_train.tasks.rows.token_rows import TokenColumns
from elastic_train.tasks.task import Batch, LaneLoss

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Yields a model's initial weights by name, as `Deferring.initial_weights` does."""

MOST_LOGITS = 1 << 25
"""Most logits of a chunk (128 MiB in fp32), unless it would have so few rows that products are slow."""
FEWEST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Logits:
    """Output of a model's last module, (rows, width, vocabulary), and terms to add to the training loss."""

    values: Tensor
    added: Sequence[Tensor] = ()


class LanguageModel(Protocol):
    """A kind of model that predicts the next token.

    `vocabulary` is its number of token ids once prepared; `folder` is its own folder, if any; `max_positions` the
    longest row that it accepts, None for any.
    """

    vocabulary: int

    @property
    def folder(self) -> Path | None: ...

    @property
    def max_positions(self) -> int | None: ...

    def prepare(self, manifest: Manifest, rows: TokenColumns) -> None:
        """Take from the training set what building the model needs; raise ConfigError if they do not fit."""

    def build(self) -> nn.Module:
        """Build the model, as `Task.build_model` does."""

    def sketch(self) -> tuple[nn.Module, Weights] | None:
        """Return the model without weights (`Deferring.sketch_model`), and its weights; None if these cannot be made
        one by one."""

    def placements(self, model: nn.Module, degrees: Degrees) -> Placements:
        """Return the model's placements (`Placing.placements`)."""

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | Logits:
        """Run a piece of the model on a micro-batch, or on the piece's part of it (`part_of`)."""

    def head(self, model: nn.Module) -> nn.Linear | None:
        """Return the linear layer whose unchanged output is the logits; None if there may be none."""

    def begin_export(self, folder: Path) -> Mapping[str, str] | None:
        """Begin a transformers folder, as `ExportingByName.begin_export` does, except for the tokenizer."""


@dataclass(frozen=True, slots=True)
class LastLayer:
    """The linear layer that produces a model's logits; `z_loss` is as in `CausalLM`."""

    head: nn.Linear
    z_loss: float

    def takes_chunks(self, num_tokens: int) -> bool:
        """Return True if the logits of this many tokens are too many to be in memory at once.

        Not in fp16, whose gradients need the loss scale, which is known only in the backward pass.
        """
        return num_tokens > self._rows and self._dtype(self.head.weight) != torch.float16

    @property
    def _rows(self) -> int:
        return max(FEWEST_ROWS, MOST_LOGITS // self.head.out_features)

    def _dtype(self, x: Tensor) -> torch.dtype:
        device = x.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

    def loss(self, hidden: Tensor, targets: Tensor, *, is_training: bool) -> LaneLoss:
        """Compute the loss of targets from the layer's input for each; shape (targets, in_features)."""
        x, weight, bias = hidden.to(self._dtype(hidden)), self.head.weight, self.head.bias
        needed = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (x, weight, bias)]
        total, *fed = _ByChunks.apply(x, weight, bias, targets, self, needed, is_training)  # type: ignore[no-untyped-call]
        return LaneLoss(total, float(len(targets)), *fed)

    def chunks(self, x: Tensor, targets: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        number = max(1, -(-len(targets) // self._rows))
        return list(zip(x.chunk(number), targets.chunk(number), strict=True))


class _ByChunks(torch.autograd.Function):
    """Computes the summed loss, and the gradients of the layer and its input for an incoming gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        layer: LastLayer,
        needed: Sequence[bool],
        is_training: bool,
    ) -> tuple[Tensor, ...]:
        sums, totals, fed = _Gradients(x, weight, bias, needed), list[Tensor](), list[tuple[Tensor, Tensor]]()
        with torch.autocast(x.device.type, enabled=False):
            rounded = weight.to(x.dtype)
            offset = None if bias is None else bias.to(x.dtype)
            for given, wanted in layer.chunks(x, targets):
                logits = F.linear(given, rounded, offset)
                judged = _Judged(logits, wanted, layer.z_loss)
                totals.append(judged.total)
                if not is_training:
                    fed.append((judged.likelihoods, logits.argmax(-1) == wanted))
                del logits
                if any(needed):
                    sums.add(given, rounded, judged.gradient().to(x.dtype))
        ctx.gradients = sums.ended()
        of_each = [torch.cat(each) for each in zip(*fed, strict=True)]
        ctx.mark_non_differentiable(*of_each)
        return torch.stack(totals).sum(), *of_each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "a backward pass of chunks uses their gradients up"
        return *(None if one is None else one.mul_(factor) for one in gradients), None, None, None, None


class _Judged:
    """The summed loss of some targets, and each target's negative log-likelihood, from their logits."""

    def __init__(self, logits: Tensor, targets: Tensor, z_loss: float) -> None:
        self._at, self._z_loss = (torch.arange(len(targets), device=targets.device), targets), z_loss
        self._likely = F.log_softmax(logits, -1, dtype=torch.float32)
        self.likelihoods = -self._likely[self._at]
        self._spread = logits[self._at].float() + self.likelihoods
        """Log-sum-exp of the logits."""
        total = self.likelihoods.sum()
        self.total = total + z_loss * self._spread.square().sum() if z_loss else total

    def gradient(self) -> Tensor:
        """Return the logits' gradient; callable once, as it reuses their memory."""
        found = self._likely.exp_()
        if self._z_loss:
            found *= (1 + 2 * self._z_loss * self._spread)[:, None]
        found[self._at] -= 1
        return found


class _Gradients:
    """The gradients of a layer and its input, chunk by chunk; unneeded ones are None."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        self._types = weight.dtype, None if bias is None else bias.dtype
        self._needed, self._own = needed, torch.promote_types(x.dtype, torch.float32)
        self._hidden: list[Tensor] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def add(self, x: Tensor, weight: Tensor, logits: Tensor) -> None:
        """Add a chunk's gradients, given its input, the weight and the gradient of its logits."""
        if self._needed[0]:
            self._hidden.append(logits @ weight)
        if self._needed[1]:
            if self._weight is None:
                self._weight = (logits.T @ x).to(self._own)
            elif x.dtype == self._own:
                self._weight.addmm_(logits.T, x)
            else:
                self._weight.add_(logits.T @ x)
        if self._needed[2]:
            found = logits.sum(0, dtype=self._own)
            self._bias = found if self._bias is None else self._bias.add_(found)

    def ended(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_weight, of_bias = self._types
        return (
            torch.cat(self._hidden) if self._hidden else None,
            None if self._weight is None else self._weight.to(of_weight),
            None if self._bias is None else self._bias.to(of_bias),
        )
