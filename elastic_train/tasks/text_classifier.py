"""Text classification over tokenised Parquet with metadata: the *quality* and *policy* schemas, or a user's own.

Rows become padded tensors without a Python loop over rows; the padded width is the longest row of the micro-batch,
rounded up, so a lane has the same shapes whatever rank computes it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.data.manifest import Manifest
from elastic_train.data.numbers import numbers_of
from elastic_train.data.padding import pad_lists
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.encoder import EncoderShape, TextEncoder
from elastic_train.tasks.task import Batch, LaneLoss

if TYPE_CHECKING:
    from torchmetrics import Metric

_WIDTH_MULTIPLE = 8


class TextClassifier:
    """Classify `input_ids` and metadata columns into the classes of the label column.

    `numeric` and `categorical` name the metadata columns (default: all of the schema's). `class_weights="balanced"`
    weighs each sample by the inverse share of its class in the training set. `vocabulary` counts the token ids; it is
    needed only for data without a tokenizer.
    """

    def __init__(
        self,
        max_tokens: int = 256,
        dim: int = 128,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        class_weights: str | None = None,
        label: str | None = None,
        tokens: str = "input_ids",
        numeric: Sequence[str] | None = None,
        categorical: Sequence[str] | None = None,
        category_buckets: int = 64,
        vocabulary: int | None = None,
    ) -> None:
        for name, value, least in (("heads", heads, 1), ("category_buckets", category_buckets, 2)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if dim % heads:
            raise ValueError(f"dim {dim} is no multiple of heads {heads}")
        if class_weights not in (None, "balanced"):
            raise ValueError(f"class_weights must be null or balanced, not {class_weights!r}")
        self.max_tokens, self.dim, self.depth, self.heads, self.dropout = max_tokens, dim, depth, heads, dropout
        self.class_weights, self.category_buckets = class_weights, category_buckets
        self._label, self._tokens, self._numeric, self._categorical = label, tokens, numeric, categorical
        self.vocabulary = vocabulary
        self._weights: Tensor | None = None

    def prepare(self, manifest: Manifest) -> None:
        self._label = self._label or manifest.label_column
        if self._label is None:
            raise ConfigError(f"task.params.label: the manifest of {manifest.url} names no label column; give one")
        self._numeric = manifest.numeric_columns if self._numeric is None else self._numeric
        self._categorical = manifest.categorical_columns if self._categorical is None else self._categorical
        _check_columns(manifest, self._tokens, self._label, [*self._numeric, *self._categorical])
        if not manifest.label_counts:
            raise DataError(
                f"{manifest.url}: no labels were counted; build the manifest with label_column={self._label!r}"
            )
        self.num_classes = max(2, len(manifest.label_counts))
        self.vocabulary = self.vocabulary or manifest.vocabulary_size
        if self.vocabulary is None:
            raise ConfigError(f"task.params.vocabulary: {manifest.url} has no tokenizer; say how many token ids it has")
        if self.class_weights == "balanced":
            counts = torch.tensor(manifest.label_counts, dtype=torch.float32).clamp(min=1)
            self._weights = counts.sum() / (len(counts) * counts)

    def columns(self) -> Sequence[str]:
        assert self._label is not None, "prepare comes first"
        return [self._tokens, self._label, *(self._numeric or ()), *(self._categorical or ())]

    def longest(self) -> Mapping[str, int]:
        return {self._tokens: self.max_tokens}

    def build_model(self) -> nn.Module:
        assert self.vocabulary is not None, "prepare comes first"
        return TextEncoder(
            EncoderShape(
                vocabulary=self.vocabulary,
                num_classes=self.num_classes,
                max_tokens=self.max_tokens,
                dim=self.dim,
                depth=self.depth,
                num_heads=self.heads,
                dropout=self.dropout,
                num_numeric=len(self._numeric or ()),
                num_categorical=len(self._categorical or ()),
                category_buckets=self.category_buckets,
            )
        )

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        tokens, lengths = pad_lists(rows.column(self._tokens), max_width=self.max_tokens, multiple=_WIDTH_MULTIPLE)
        numeric, is_missing = _numeric(rows, self._numeric or ())
        label = numbers_of(rows.column(self._label)).astype(np.int64)
        return {
            "tokens": torch.from_numpy(tokens),
            "lengths": torch.from_numpy(np.maximum(lengths, 1)),
            "numeric": torch.from_numpy(numeric),
            "is_missing": torch.from_numpy(is_missing),
            "categories": torch.from_numpy(_categories(rows, self._categorical or (), self.category_buckets)),
            "label": torch.from_numpy(label),
        }

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        logits = model(
            batch["tokens"], batch["lengths"], batch["numeric"], batch["is_missing"], batch["categories"]
        ).float()
        label = batch["label"]
        weights = None if self._weights is None else self._weights.to(label.device)
        total = F.cross_entropy(logits, label, weight=weights, reduction="sum")
        weight = float(len(label)) if weights is None else float(weights[label].sum())
        return LaneLoss(total, weight, logits.detach().softmax(dim=-1), label)

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.classification_metrics import classification_metrics

        return classification_metrics(self.num_classes)


def _check_columns(manifest: Manifest, tokens: str, label: str, others: Sequence[str]) -> None:
    """Refuse a training set that lacks a column or has it in a type that cannot be collated."""
    missing = [name for name in (tokens, label, *others) if name not in manifest.columns]
    if missing:
        raise DataError(
            f"{manifest.url}: no column {', '.join(map(repr, missing))}; it has {', '.join(manifest.columns)}"
        )
    if "list" not in manifest.columns[tokens] or "int" not in manifest.columns[tokens]:
        raise DataError(f"{manifest.url}: column '{tokens}' is {manifest.columns[tokens]}, not a list of integers")
    if "int" not in manifest.columns[label]:
        raise DataError(f"{manifest.url}: label column '{label}' is {manifest.columns[label]}, not an integer")


def _numeric(rows: pa.Table, names: Sequence[str]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return (rows, columns) log-compressed values, 0 where missing, and where they are missing."""
    values = np.zeros((len(rows), len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        values[:, place] = numbers_of(rows.column(name).cast(pa.float64()), missing=math.nan)
    is_missing = np.isnan(values)
    values[is_missing] = 0.0
    return (np.sign(values) * np.log1p(np.abs(values))).astype(np.float32), is_missing


def _categories(rows: pa.Table, names: Sequence[str], buckets: int) -> npt.NDArray[np.int64]:
    """Return (rows, columns) bucket numbers; bucket 0 is a missing value."""
    codes = np.zeros((len(rows), len(names)), dtype=np.int64)
    for place, name in enumerate(names):
        encoded = rows.column(name).combine_chunks().dictionary_encode()
        table = np.array([_bucket(str(value), buckets) for value in encoded.dictionary.to_pylist()] + [0])
        codes[:, place] = table[numbers_of(encoded.indices, missing=len(table) - 1)]
    return codes


@lru_cache(maxsize=65536)
def _bucket(value: str, buckets: int) -> int:
    """Return a value's bucket in [1, buckets): a frozen hash, so that no vocabulary has to be stored."""
    return 1 + zlib.crc32(value.encode()) % (buckets - 1)
