"""Text classification over tokenised Parquet with metadata: the *quality* and *policy* schemas, or a user's own.

Rows become padded tensors without a Python loop over rows; the padded width is the longest row of the micro-batch,
rounded up, so a lane has the same shapes whatever rank computes it.
"""

from __future__ import annotations

import math
import re
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

from elastic_train.data.arrow.lists import pad_lists
from elastic_train.data.arrow.numbers import numbers_of, whole
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.models.text_encoder import EncoderShape, TextEncoder
from elastic_train.tasks.task import Batch, LaneLoss, ParameterGroup

if TYPE_CHECKING:
    from torchmetrics import Metric

_WIDTH_MULTIPLE = 8
_INTEGERS = re.compile(r"u?int(8|16|32|64)")
_INTEGER_LISTS = re.compile(rf"(large_)?list<.*: {_INTEGERS.pattern}( not null)?>")


class TextClassifier:
    """Classify `input_ids` and metadata columns into the classes of the label column.

    `numeric` and `categorical` name the metadata columns (default: all of the schema's). `class_weights="balanced"`
    weighs each sample by the inverse share of its class in the training set. `vocabulary` counts the token ids; it is
    needed only for data without a tokenizer. With `decay_biases_and_norms=False` weight decay leaves out biases and the
    weights of norms.
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
        decay_biases_and_norms: bool = True,
    ) -> None:
        sizes = {"max_tokens": (max_tokens, 1), "dim": (dim, 1), "depth": (depth, 0), "heads": (heads, 1)}
        sizes |= {"category_buckets": (category_buckets, 2), "vocabulary": (1 if vocabulary is None else vocabulary, 1)}
        for name, (value, least) in sizes.items():
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        if class_weights not in (None, "balanced"):
            raise ValueError(f"class_weights must be null or balanced, not {class_weights!r}")
        self.max_tokens, self.dim, self.depth, self.heads, self.dropout = max_tokens, dim, depth, heads, dropout
        self.class_weights, self.category_buckets = class_weights, category_buckets
        self._label, self._tokens, self._numeric, self._categorical = label, tokens, numeric, categorical
        self.vocabulary, self.decay_biases_and_norms = vocabulary, decay_biases_and_norms
        self._weights: Tensor | None = None
        self._known: Manifest | None = None

    def prepare(self, manifest: Manifest) -> None:
        self._label = self._label or manifest.label_column
        if self._label is None:
            raise ConfigError(f"task.params.label: the manifest of {manifest.url} names no label column; give one")
        self._numeric = manifest.numeric_columns if self._numeric is None else self._numeric
        self._categorical = manifest.categorical_columns if self._categorical is None else self._categorical
        _check_columns(manifest, self._tokens, self._label, [*self._numeric, *self._categorical])
        if not manifest.label_counts or manifest.label_column != self._label:
            raise DataError(
                f"{manifest.url}: no labels were counted in column '{self._label}'; build the manifest with "
                f"label_column={self._label!r}"
            )
        self._known = manifest
        self.num_classes = max(2, len(manifest.label_counts))
        self.vocabulary = self.vocabulary or manifest.vocabulary_size
        if self.vocabulary is None:
            raise ConfigError(f"task.params.vocabulary: {manifest.url} has no tokenizer; say how many token ids it has")
        if self.class_weights == "balanced":
            counts = torch.zeros(self.num_classes)
            counts[: len(manifest.label_counts)] = torch.tensor(manifest.label_counts, dtype=torch.float32)
            counts.clamp_(min=1)
            self._weights = counts.sum() / (len(counts) * counts)

    def check_held_out(self, manifest: Manifest) -> None:
        known = self._known
        assert known is not None and self._label is not None, "prepare comes first"
        _check_columns(manifest, self._tokens, self._label, [*(self._numeric or ()), *(self._categorical or ())])
        is_counted = manifest.label_column == self._label and manifest.label_counts is not None
        if is_counted and len(manifest.label_counts or ()) > self.num_classes:
            raise DataError(
                f"{manifest.url}: has labels up to {len(manifest.label_counts or ()) - 1}, but {known.url} only "
                f"{self.num_classes} classes; describe both with the same `labels`"
            )
        for what, mine, theirs in (
            ("its labels", known.labels, manifest.labels if is_counted else None),
            ("its token ids", known.tokenizer_sha256, manifest.tokenizer_sha256),
        ):
            if mine is not None and theirs is not None and mine != theirs:
                raise DataError(
                    f"{manifest.url}: {what} differ from those of {known.url}, so what was learned there means "
                    "something else here; import both as one dataset, of which a part is kept for validation"
                )

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

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        if self.decay_biases_and_norms:
            return ()
        # In this model these are the parameters of one dimension.
        names = [name for name, parameter in model.named_parameters() if parameter.ndim == 1]
        return [ParameterGroup(names, weight_decay=0.0)]

    def collate(self, rows: pa.Table, ids: npt.NDArray[np.int64]) -> Batch:
        _check_whole(rows, self._tokens, str(self._label), ids)
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
    if not _INTEGER_LISTS.fullmatch(manifest.columns[tokens]):
        raise DataError(f"{manifest.url}: column '{tokens}' is {manifest.columns[tokens]}, not a list of integers")
    if not _INTEGERS.fullmatch(manifest.columns[label]):
        raise DataError(f"{manifest.url}: label column '{label}' is {manifest.columns[label]}, not an integer")


def _check_whole(rows: pa.Table, tokens: str, label: str, ids: npt.NDArray[np.int64]) -> None:
    """Refuse a missing label, and a missing token among others; a row without tokens is an empty one."""
    for name, column in ((tokens, whole(rows.column(tokens)).values), (label, rows.column(label))):
        if column.null_count:
            raise DataError(
                f"column '{name}': a value is missing in one of the rows around sample {ids[0]}; write the data again "
                "without missing tokens and labels"
            )


def _numeric(rows: pa.Table, names: Sequence[str]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return (rows, columns) log-compressed values, 0 where missing, and where they are missing.

    What is not finite counts as missing: one such value would spoil all weights.
    """
    values = np.zeros((len(rows), len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        values[:, place] = numbers_of(rows.column(name).cast(pa.float64(), safe=False), missing=math.nan)
    is_missing = ~np.isfinite(values)
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
