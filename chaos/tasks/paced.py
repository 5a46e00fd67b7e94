"""Tasks slow enough for faults to be placed between their steps; their numbers do not depend on the pace.

They do to themselves what nobody could do to them from outside: a bit of their weights flips, products of matrices are
wrong, or a lane's loss is not a number. Both classes are mixed into a task: `Paced`, and `PacedStages` where that runs
in pieces, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from chaos.tasks.orders import Orders
from elastic_train.core.sample_random import SampleRandom
from elastic_train.tasks.placements import Piece
from elastic_train.tasks.task import Batch, LaneLoss

_BIT = 1 << 20
"""Of a float's fraction: the weight changes by less than half."""
_SPOILT = "has no loss"

if TYPE_CHECKING:

    class _Task:
        def __init__(self, **params: object) -> None: ...

        def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch: ...

        def loss(self, model: nn.Module, batch: Batch) -> LaneLoss: ...

        def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss: ...

else:
    _Task = object


class Paced(_Task):
    """Takes `lane_ms` longer for every lane of every step; validation is as quick as ever.

    `spoilt` are samples, each with its epoch, whose lane's loss is not a number.
    """

    def __init__(self, lane_ms: float = 0.0, spoilt: Sequence[tuple[int, int]] = (), **params: object) -> None:
        super().__init__(**params)
        self._lane_ms, self._spoilt, self._orders = lane_ms, spoilt, Orders()
        if (said := self._orders.take("flip_product") or self._orders.heed("unfit_node")) is not None:
            _flip_products(said)

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64], draw: SampleRandom) -> Batch:  # type: ignore[override]
        batch = super().collate(rows, ids)
        if any(((ids == sample) & (draw.epoch == epoch)).any() for epoch, sample in self._spoilt):
            batch[_SPOILT] = torch.ones(())
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        if not model.training:
            return super().loss(model, batch)
        self._begin_lane(model)
        found = super().loss(model, batch)
        return found if (said := self._spoils(batch)) is None else _spoilt(found, said)

    def _begin_lane(self, model: nn.Module) -> None:
        """Take one's time, and have a bit flip if that is asked for, now or in the lane's gradient."""
        if self._lane_ms:
            time.sleep(self._lane_ms / 1000)
        if (said := self._orders.take("flip_memory")) is not None:
            name, weights = _first_held(model)
            said.write_text(_flip(name, weights.detach()))
        if (said := self._orders.take("flip_gradient")) is not None:
            _flip_gradient(model, said)

    def _spoils(self, batch: Batch) -> list[Path] | None:
        """Return None for a lane whose loss is left as it is, else where to say that it is not."""
        said = self._orders.take("nan_loss")
        return [said] if said is not None else [] if _SPOILT in batch else None


class PacedStages(Paced):
    """Does the same where a model is run in stages, or rows in parts: each takes that long, and the loss of the last
    stage, or of each part, can be spoilt."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        return super(Paced, self).loss(model, batch)  # calls `run`

    def run(self, model: nn.Module, batch: Batch, piece: Piece) -> Tensor | LaneLoss:
        if not model.training:
            return super().run(model, batch, piece)
        self._begin_lane(model)
        made = super().run(model, batch, piece)
        if isinstance(made, Tensor) or (said := self._spoils(batch)) is None:
            return made
        return _spoilt(made, said)


def _spoilt(loss: LaneLoss, said: Sequence[Path]) -> LaneLoss:
    for one in said:
        one.write_text(f"process {os.getpid()} gave nan in place of a loss of {float(loss.total)}")
    return LaneLoss(loss.total * torch.nan, loss.weight, loss.predictions, loss.targets)


def _first_held(model: nn.Module) -> tuple[str, Tensor]:
    """Return the first weights that are trained and held here, and their name."""
    held: Any = ((name, one) for name, one in model.named_parameters() if one.requires_grad and one.numel())
    return next(held)  # type: ignore[no-any-return]


def _flip_gradient(model: nn.Module, said: Path) -> None:
    """Have a bit flip of the first gradient that the next backward pass gives."""
    name, weights = _first_held(model)

    def flip(gradient: Tensor) -> Tensor:
        hook.remove()
        wrong = gradient.detach().clone(memory_format=torch.contiguous_format)
        said.write_text(_flip(f"the gradient of {name}", wrong))
        return wrong

    hook = weights.register_hook(flip)  # type: ignore[no-untyped-call]


def _flip_products(said: Path) -> None:
    """Have a bit flip of the first element of each product of matrices of floats in this process, from now on."""
    rightly = Tensor.__matmul__

    def wrongly(left: Tensor, right: Tensor) -> Tensor:
        product = rightly(left, right)
        if product.dtype == torch.float32:
            _flip("a product", product.detach())
        return product

    Tensor.__matmul__ = wrongly  # type: ignore[assignment]
    said.write_text(f"process {os.getpid()} computes wrongly")


def _flip(name: str, values: Tensor) -> str:
    """Flip a bit of the first of values; say of which, and what it was and is."""
    first = values.view(-1)[:1]
    before = float(first)
    first.view(torch.int32).bitwise_xor_(_BIT)
    return f"process {os.getpid()} flipped a bit of {name}: {before} became {float(first)}"
