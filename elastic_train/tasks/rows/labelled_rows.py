"""Rows of tokens with a class and metadata: columns, tensors, and a weighted loss."""

from __future__ import annotations

import logging
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
from torch import Tensor

from elastic_train.data.arrow.numbers import first_incomplete, numbers_of, pad_lists, plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.rows.classes import (
    check_columns,
    check_label,
    check_same_classes,
    class_names,
    count_classes,
    label_of,
    labels_of,
    predicted,
    unfit_labels,
)
from elastic_train.tasks.rows.token_rows import (
    check_lists,
    check_same_tokens,
    check_token_ids,
    unfit_tokens,
)
from elastic_train.tasks.task import Batch, LaneLoss

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger(__name__)
_WIDTH_MULTIPLE = 8
_NUMBERS = re.compile(r"u?int\d+|halffloat|float|double|bool|null|decimal\d+\(.*\)")
_NESTED = re.compile(r"\w+<|\w*binary")
_SPELT_ALIKE = re.compile(r"u?int\d+|(large_)?string")
"""Types whose equal categories have equal spellings; 1 is not 1.0, nor true True."""
Ids = npt.NDArray[np.int64]


class LabelledRows:
    """Token ids, the class to predict, and metadata columns, which may have missing values.

    `label`, `numeric` and `categorical` default to the manifest's. `class_weights` is "balanced", which weighs each
    sample by the inverse share of its class in the training set, or a weight for each class.
    """

    def __init__(
        self,
        tokens: str,
        label: str | None,
        numeric: Sequence[str] | None,
        categorical: Sequence[str] | None,
        category_buckets: int,
        class_weights: str | Sequence[float] | None,
    ) -> None:
        if category_buckets < 2:
            raise ValueError(f"category_buckets must be at least 2, not {category_buckets}")
        is_named = isinstance(class_weights, str) or not isinstance(class_weights, Sequence)
        if class_weights not in (None, "balanced") and is_named:
            raise ValueError(f"class_weights must be null, balanced, or a weight for each class, not {class_weights!r}")
        self.tokens, self.category_buckets = tokens, category_buckets
        self.label, self.num_classes = "", 2
        self.numeric, self.categorical = list(numeric or ()), list(categorical or ())
        self._label, self._numeric, self._categorical = label, numeric, categorical
        self._class_weights, self._weights = class_weights, None if class_weights is None else torch.empty(0)
        self._has_labels, self._absent = True, list[str]()

    def prepare(self, manifest: Manifest) -> None:
        """Take columns, classes and weights from the training set; raise DataError or ConfigError if unfit."""
        self.label = label_of(manifest, self._label)
        self.numeric = list(manifest.numeric_columns if self._numeric is None else self._numeric)
        self.categorical = list(manifest.categorical_columns if self._categorical is None else self._categorical)
        self._check_columns(manifest)
        self.known, self.num_classes = manifest, count_classes(manifest, self.label)
        if self._class_weights is not None:
            self._weights = self._weights_for(manifest.label_counts or ())

    def _weights_for(self, label_counts: Sequence[int]) -> Tensor:
        if not isinstance(self._class_weights, str):
            weights = torch.tensor(list(self._class_weights or ()), dtype=torch.float32)
            if len(weights) != self.num_classes or not (weights >= 0).all() or not weights.any():
                raise ConfigError(
                    f"task.params.class_weights: give {self.num_classes} numbers of at least 0, one for each class of "
                    f"'{self.label}', not {self._class_weights}"
                )
            return weights
        counts = torch.zeros(self.num_classes)
        counts[: len(label_counts)] = torch.tensor(label_counts, dtype=torch.float32)
        counts.clamp_(min=1)
        return counts.sum() / (len(counts) * counts)

    def check_held_out(self, manifest: Manifest) -> None:
        """Reject a validation set with other columns, classes or tokens than the training set."""
        self._check_columns(manifest)
        self._check_categories(manifest)
        if self._has_labels:
            check_same_classes(self.known, manifest, self.label, self.num_classes)
        check_same_tokens(self.known, manifest)

    @property
    def class_names(self) -> Sequence[str]:
        return class_names(self.known, self.num_classes)

    def unfit_rows(self, rows: pa.Table, vocabulary: int) -> Sequence[tuple[int, str]]:
        """Return the rows with an unknown token id or invalid class, with reasons."""
        tokens = unfit_tokens(rows, self.tokens, vocabulary)
        return sorted([*tokens, *unfit_labels(rows, self.label, self.num_classes)])

    def names(self) -> Sequence[str]:
        metadata = [name for name in (*self.numeric, *self.categorical) if name not in self._absent]
        return [self.tokens, *([self.label] if self._has_labels else []), *metadata]

    def collate(self, rows: pa.Table, ids: Ids, max_tokens: int, *, has_fixed_width: bool = False) -> Batch:
        """Return `tokens` (rows, width), padded with 0, `lengths` (rows,) >= 1, metadata, and `label` (rows,).

        The width is the longest row's, or with `has_fixed_width` always `max_tokens`.
        """
        if (row := first_incomplete(rows.column(self.tokens))) is not None:
            raise DataError(
                f"column '{self.tokens}': a value is missing (null) in sample {ids[row]}; write the data again without "
                "missing tokens"
            )
        for name in self._absent:
            rows = rows.append_column(name, pa.nulls(len(rows), pa.float64()))
        multiple = max_tokens if has_fixed_width else _WIDTH_MULTIPLE
        tokens, lengths = pad_lists(rows.column(self.tokens), max_width=max_tokens, multiple=multiple)
        numeric, is_missing = _numeric(rows, self.numeric)
        return {
            "tokens": torch.from_numpy(tokens),
            "lengths": torch.from_numpy(np.maximum(lengths, 1)),
            "numeric": torch.from_numpy(numeric),
            "is_missing": torch.from_numpy(is_missing),
            "categories": torch.from_numpy(_categories(rows, self.categorical, self.category_buckets)),
            "label": torch.from_numpy(self._labels(rows, ids)),
        }

    def _labels(self, rows: pa.Table, ids: Ids) -> npt.NDArray[np.int64]:
        """Return each row's class; 0 if labels are not read."""
        return labels_of(rows, ids, self.label, self.num_classes) if self._has_labels else np.zeros(len(ids), np.int64)

    def loss(self, logits: Tensor, label: Tensor) -> LaneLoss:
        """Return the weighted sum over rows; its predictions are probabilities, (rows, classes)."""
        weights = None if self._weights is None else self._weights.to(label.device)
        total = F.cross_entropy(logits, label, weight=weights, reduction="sum")
        weight = float(len(label)) if weights is None else float(weights[label].sum())
        return LaneLoss(total, weight, logits.detach().softmax(dim=-1), label)

    def begin_predicting(self, manifest: Manifest) -> None:
        """Read no labels, and treat metadata columns missing from the dataset as missing values, with a warning."""
        self._has_labels = False
        self._absent = [name for name in (*self.numeric, *self.categorical) if name not in manifest.columns]
        if self._absent:
            log.warning(
                "%s: lacks %s, which the model was trained with: they count as missing in every row, so predictions "
                "are less certain",
                manifest.url,
                ", ".join(self._absent),
            )

    def _check_columns(self, manifest: Manifest) -> None:
        """Reject a dataset that lacks a column or has it in an unusable type."""
        check_columns(manifest, *self.names())
        check_lists(manifest, self.tokens)
        if self._has_labels:
            check_label(manifest, self.label)
        for name in filter(manifest.columns.__contains__, self.numeric):
            if not _NUMBERS.fullmatch(manifest.columns[name]):
                raise DataError(
                    f"{manifest.url}: column '{name}' is {manifest.columns[name]}, not numbers: leave it out of "
                    "task.params.numeric, or name it in task.params.categorical"
                )
        for name in filter(manifest.columns.__contains__, self.categorical):
            if _NESTED.match(plain_name(manifest.columns[name])):
                raise DataError(
                    f"{manifest.url}: column '{name}' is {manifest.columns[name]}, not one value a row: leave it out "
                    "of task.params.categorical"
                )

    def _check_categories(self, manifest: Manifest) -> None:
        """Reject a dataset whose categories are spelt otherwise than in training, so that none is known."""
        for name in self.categorical:
            known, found = (plain_name(each.columns.get(name, "null")) for each in (self.known, manifest))
            is_alike = _SPELT_ALIKE.fullmatch(known) and _SPELT_ALIKE.fullmatch(found)
            if known != found and "null" not in (known, found) and not is_alike:
                raise DataError(
                    f"{manifest.url}: column '{name}' is {found}, and {known} in {self.known.url}, so its categories "
                    f"are spelt otherwise, such as 1.0 for 1: write it with that type (--types {name}={known})"
                )


class ClassifiesRows:
    """The part of a task that its `rows` answer, of which up to `max_tokens` tokens are read."""

    rows: LabelledRows
    max_tokens: int
    vocabulary: int | None
    """Number of token ids; known once `prepare` was called."""

    def check_held_out(self, manifest: Manifest) -> None:
        assert self.vocabulary is not None, "prepare comes first"
        self.rows.check_held_out(manifest)
        check_token_ids(manifest, self.rows.tokens, self.vocabulary)

    def columns(self) -> Sequence[str]:
        return self.rows.names()

    def longest(self) -> Mapping[str, int]:
        return {self.rows.tokens: self.max_tokens}

    def inspected_columns(self) -> Sequence[str]:
        return [self.rows.tokens, self.rows.label]

    def unfit_rows(self, rows: pa.Table) -> Sequence[tuple[int, str]]:
        assert self.vocabulary is not None, "prepare comes first"
        return self.rows.unfit_rows(rows, self.vocabulary)

    def begin_predicting(self, manifest: Manifest) -> None:
        self.rows.begin_predicting(manifest)

    def predictions(self, loss: LaneLoss, batch: Batch) -> Mapping[str, Tensor | Sequence[str]]:
        """Return the columns that `predict` writes for a micro-batch."""
        assert loss.predictions is not None, "`loss` has returned probabilities"
        return predicted(loss.predictions, self.rows.class_names)

    def metrics(self) -> Mapping[str, Metric]:
        from elastic_train.tasks.classification_metrics import classification_metrics

        return classification_metrics(self.rows.class_names)


def _numeric(rows: pa.Table, names: Sequence[str]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return (rows, columns) log-compressed values, 0 where missing, and a mask of missing ones.

    Non-finite values count as missing: one of them would spoil all weights.
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
        column = rows.column(name)
        if pa.types.is_float16(column.type):  # for which Arrow finds no distinct values
            column = column.cast(pa.float32())
        encoded = column.combine_chunks().dictionary_encode()
        table = np.array([_bucket(str(value), buckets) for value in encoded.dictionary.to_pylist()] + [0])
        codes[:, place] = table[numbers_of(encoded.indices, missing=len(table) - 1)]
    return codes


@lru_cache(maxsize=65536)
def _bucket(value: str, buckets: int) -> int:
    """Return a value's bucket in [1, buckets): a frozen hash, so that no vocabulary must be stored."""
    return 1 + zlib.crc32(value.encode()) % (buckets - 1)
