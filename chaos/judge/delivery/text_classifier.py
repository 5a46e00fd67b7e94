"""The text classifier in float64, from its definition in the task's documentation, without its code.

A pre-norm transformer encoder, averaged over tokens; metadata are added before the last layer. Categories are hashed
into buckets by CRC-32, numbers compressed logarithmically; missing values have their own vectors.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chaos.judge.evidence.run_files import Line, whole
from chaos.judge.evidence.stored_weights import Tensors
from chaos.judge.findings import Unknown

Floats = npt.NDArray[np.float64]
_AT_ONCE = 256
_EPSILON = 1e-5
_METADATA = ("numeric", "categorical")
_PATHS = ("elastic_train.tasks.text_classifier:TextClassifier", "chaos.tasks.paced_classifier:PacedClassifier")
_DEFAULTS: dict[str, Any] = {"max_tokens": 256, "heads": 4, "tokens": "input_ids", "category_buckets": 64}

if TYPE_CHECKING:
    Tensor = Any


def is_classifier(path: object) -> bool:
    """Return True if a task is the text classifier, or its paced variant."""
    return path in _PATHS


@dataclass(frozen=True, slots=True)
class Classifier:
    """A trained text classifier: parameters by name, task settings, and input columns."""

    weights: Tensors
    params: Line
    label: str
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]

    @classmethod
    def of(cls, weights: Tensors, params: Line, manifest: Line) -> Classifier:
        label = params.get("label") or manifest.get("label_column")
        numeric, categorical = (_names(params.get(kind), manifest.get(f"{kind}_columns")) for kind in _METADATA)
        return cls(weights, {**_DEFAULTS, **params}, str(label), numeric, categorical)

    @property
    def columns(self) -> list[str]:
        return [str(self.params["tokens"]), self.label, *self.numeric, *self.categorical]

    def logits(self, rows: pa.Table) -> Floats:
        lists = [list(tokens or ()) for tokens in rows.column(str(self.params["tokens"])).to_pylist()]
        most = whole(self.params, "max_tokens")
        found = [
            self._logits([tokens[:most] for tokens in lists[lo : lo + _AT_ONCE]], rows.slice(lo, _AT_ONCE))
            for lo in range(0, len(lists), _AT_ONCE)
        ]
        return np.concatenate(found)

    def labels(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        return np.asarray(rows.column(self.label).to_numpy(), np.int64)

    def _logits(self, lists: list[list[int]], rows: pa.Table) -> Floats:
        lengths = np.maximum([len(tokens) for tokens in lists], 1)
        ids = np.zeros((len(lists), int(lengths.max())), np.int64)
        for row, tokens in enumerate(lists):
            ids[row, : len(tokens)] = tokens
        is_real = np.arange(ids.shape[1]) < lengths[:, None]
        embedding = self._weight("tokens.weight")
        mask = embedding.new_tensor(np.where(is_real, 0.0, -np.inf))
        x = embedding[ids] + self._weight("positions")[: ids.shape[1]]
        depth = sum(name.endswith(".qkv.weight") for name in self.weights)
        for block in range(depth):
            x = self._block(x, f"blocks.{block}", mask)
        x = self._norm(x, "norm") * embedding.new_tensor(is_real.astype(np.float64))[:, :, None]
        pooled = x.sum(1) / embedding.new_tensor(lengths.astype(np.float64))[:, None]
        found: Floats = self._linear(pooled + self._metadata(rows, embedding), "head").numpy()
        return found

    def _block(self, x: Tensor, name: str, mask: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        heads = whole(self.params, "heads")
        qkv = self._linear(self._norm(x, f"{name}.norm_attention"), f"{name}.qkv")
        query, key, value = qkv.view(batch, tokens, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (dim // heads) ** 0.5 + mask[:, None, None, :]
        attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, dim)
        x = x + self._linear(attended, f"{name}.out")
        hidden = self._linear(self._norm(x, f"{name}.norm_mlp"), f"{name}.mlp.0")
        return x + self._linear(hidden * 0.5 * (1.0 + (hidden / 2**0.5).erf()), f"{name}.mlp.2")

    def _metadata(self, rows: pa.Table, like: Tensor) -> Tensor:
        numbers = np.array([_numbers(rows.column(name)) for name in self.numeric]).reshape(len(self.numeric), -1).T
        is_missing = ~np.isfinite(numbers)
        numbers = np.where(is_missing, 0.0, numbers)
        compressed = (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32).astype(np.float64)
        vector = like.new_tensor(compressed) @ self._weight("metadata.scale")
        vector = vector + like.new_tensor(is_missing.astype(np.float64)) @ self._weight("metadata.missing")
        buckets = whole(self.params, "category_buckets")
        for column, name in enumerate(self.categorical):
            codes = [
                0 if value is None else 1 + zlib.crc32(str(value).encode()) % (buckets - 1)
                for value in rows.column(name).to_pylist()
            ]
            vector = vector + self._weight(f"metadata.categories.{column}.weight")[np.array(codes)]
        return vector

    def _weight(self, name: str) -> Tensor:
        if name not in self.weights:
            raise Unknown(f"the commit holds no {name}: it is not a text classifier that can be evaluated here")
        return self.weights[name].double()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._weight(f"{name}.weight").T + self._weight(f"{name}.bias")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + _EPSILON).sqrt()
        return scaled * self._weight(f"{name}.weight") + self._weight(f"{name}.bias")


def _names(chosen: object, known: object) -> tuple[str, ...]:
    """Return the columns that a task names; by default all that the manifest lists."""
    named = known if chosen is None else chosen
    return tuple(map(str, named)) if isinstance(named, list) else ()


def _numbers(column: pa.ChunkedArray) -> Floats:
    return np.array([np.nan if value is None else float(value) for value in column.to_pylist()])
