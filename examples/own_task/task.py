"""A task of your own over a Parquet schema of your own: regress a price on two columns. Nothing here is special.

python examples/own_task/make_data.py data/prices
PYTHONPATH=examples/own_task elastic-train train examples/own_task/config.yaml
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn
from torchmetrics import Metric

import elastic_train as et

COLUMNS = ("area", "rooms", "price")


class Prices:
    """Fit price = f(area, rooms) with a small perceptron and a squared error."""

    def __init__(self, width: int = 16) -> None:
        self.width = width

    def prepare(self, manifest: et.Manifest) -> None:
        missing = [name for name in COLUMNS if name not in manifest.columns]
        if missing:
            raise et.DataError(f"{manifest.url}: no column {missing}; it has {list(manifest.columns)}")

    def columns(self) -> Sequence[str]:
        return COLUMNS

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        features = np.stack([rows.column(name).to_numpy() for name in ("area", "rooms")], axis=1).astype(np.float32)
        return {
            "features": torch.from_numpy(features),
            "price": torch.from_numpy(rows.column("price").to_numpy().copy()),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> et.LaneLoss:
        error = model(batch["features"]).squeeze(1) - batch["price"]
        return et.LaneLoss(total=error.square().sum(), weight=float(len(error)))

    def metrics(self) -> Mapping[str, Metric]:
        return {}
