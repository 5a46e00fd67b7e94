"""Tasks slow enough that faults can be placed between steps; their results do not depend on the pace.

They inject faults that are impossible from outside: a flipped bit of a weight, wrong matrix products, or a NaN loss of
a lane. Both classes are mixins: `Paced`, and `PacedStages` for tasks that also run in stages or parts.
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
from elastic_train.core.keyed_random import SampleRandom
from elastic_train.tasks.placements import Piece
from elastic_train.tasks.task import Batch, LaneLoss

_BIT = 1 << 20
"""A fraction bit of a float: the weight changes by less than half."""
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
    """Adds `lane_ms` to each lane of each training step; validation is not slowed.

    `spoilt` lists (epoch, sample) pairs for which the lane's loss becomes NaN.
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
        """Sleep `lane_ms`, and execute orders to flip a bit of a weight or of the lane's gradient."""
        if self._lane_ms:
            time.sleep(self._lane_ms / 1000)
        if (said := self._orders.take("flip_memory")) is not None:
            name, weights = _first_held(model)
            said.write_text(_flip(name, weights.detach()))
        if (said := self._orders.take("flip_gradient")) is not None:
            _flip_gradient(model, said)

    def _spoils(self, batch: Batch) -> list[Path] | None:
        """Return None to keep a lane's loss, else the files to report the NaN loss to."""
        said = self._orders.take("nan_loss")
        return [said] if said is not None else [] if _SPOILT in batch else None


class PacedStages(Paced):
    """The same for a model that runs in stages, or rows in parts.

    Each piece is slowed, and the loss of the last stage, or of each part, can become NaN.
    """

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
    """Return the name and value of the first trained weight held by this rank."""
    held: Any = ((name, one) for name, one in model.named_parameters() if one.requires_grad and one.numel())
    return next(held)  # type: ignore[no-any-return]


def _flip_gradient(model: nn.Module, said: Path) -> None:
    """Flip a bit of the first gradient of the next backward pass."""
    name, weights = _first_held(model)

    def flip(gradient: Tensor) -> Tensor:
        hook.remove()
        wrong = gradient.detach().clone(memory_format=torch.contiguous_format)
        said.write_text(_flip(f"the gradient of {name}", wrong))
        return wrong

    hook = weights.register_hook(flip)  # type: ignore[no-untyped-call]


def _flip_products(said: Path) -> None:
    """Flip a bit of the first element of every float32 matrix product in this process from now on."""
    rightly = Tensor.__matmul__

    def wrongly(left: Tensor, right: Tensor) -> Tensor:
        product = rightly(left, right)
        if product.dtype == torch.float32:
            _flip("a product", product.detach())
        return product

    Tensor.__matmul__ = wrongly  # type: ignore[assignment]
    said.write_text(f"process {os.getpid()} computes wrongly")


def _flip(name: str, values: Tensor) -> str:
    """Flip a bit of the first value; return a description with the value before and after."""
    first = values.view(-1)[:1]
    before = float(first)
    first.view(torch.int32).bitwise_xor_(_BIT)
    return f"process {os.getpid()} flipped a bit of {name}: {before} became {float(first)}"
