"""The classes of a label column: the column, their number, and whether a validation set has the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.data.arrow.numbers import numbers_of, plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.value_ranges import first_outside, outside
from elastic_train.errors import ConfigError, DataError

_INTEGERS = re.compile(r"u?int(8|16|32|64)")


def label_of(manifest: Manifest, wanted: str | None) -> str:
    """Return the label column: the requested one, or the manifest's; raise ConfigError if there is none."""
    label = wanted or manifest.label_column
    if label is None:
        raise ConfigError(f"task.params.label: the manifest of {manifest.url} names no label column; give one")
    return label


def check_columns(manifest: Manifest, *names: str) -> None:
    """Raise DataError if a dataset lacks a column."""
    missing = [name for name in names if name not in manifest.columns]
    if missing:
        raise DataError(
            f"{manifest.url}: no column {', '.join(map(repr, missing))}; it has {', '.join(manifest.columns)}"
        )


def check_label(manifest: Manifest, label: str) -> None:
    """Raise DataError if a label column does not hold integers."""
    if not _INTEGERS.fullmatch(plain_name(manifest.columns[label])):
        raise DataError(f"{manifest.url}: label column '{label}' is {manifest.columns[label]}, not an integer")


def count_classes(manifest: Manifest, label: str) -> int:
    """Return the number of classes in the training set, at least two; raise DataError if they were not counted."""
    if not manifest.label_counts or manifest.label_column != label:
        raise DataError(
            f"{manifest.url}: no labels were counted in column '{label}'; build the manifest with "
            f"label_column={label!r}"
        )
    return max(2, len(manifest.label_counts))


def check_same_classes(known: Manifest, held_out: Manifest, label: str, num_classes: int) -> None:
    """Reject a validation set or mixture source with other classes than the training set `known`."""
    if held_out.label_column != label or held_out.label_counts is None:
        if (found := first_outside(held_out, label, 0, num_classes)) is not None:
            raise DataError(f"{held_out.url}: {found} has {_not_a_class(found.value, label, num_classes)}")
        return
    if len(held_out.label_counts) > num_classes:
        raise DataError(
            f"{held_out.url}: has labels up to {len(held_out.label_counts) - 1}, but {known.url} only {num_classes} "
            "classes; describe both with the same `labels`"
        )
    if known.labels is not None and held_out.labels is not None and known.labels != held_out.labels:
        raise DataError(
            f"{held_out.url}: its labels differ from those of {known.url}, so what was learned there means something "
            "else here; give both the same `labels`, in one order, or import them together, by "
            "`elastic-train data import` with --validation"
        )


def class_names(known: Manifest, num_classes: int) -> list[str]:
    """Return the names of the training set's classes; their numbers if it has none."""
    names = list(known.labels or ())
    return names + [str(number) for number in range(len(names), num_classes)]


def predicted(probabilities: Tensor, names: Sequence[str]) -> Mapping[str, Tensor | Sequence[str]]:
    """Return each row's likeliest class, its probability, and all classes' probabilities, by class number."""
    highest, likeliest = probabilities.max(dim=-1)
    classes = [names[number] for number in likeliest.tolist()]
    return {"prediction": classes, "probability": highest, "probabilities": probabilities}


def unfit_labels(rows: pa.Table, label: str, num_classes: int) -> Iterator[tuple[int, str]]:
    """Yield the rows with a missing or invalid label, and the reason."""
    column = rows.column(label)
    for row in np.flatnonzero(numbers_of(column.is_null().cast(pa.uint8()))):
        yield int(row), f"its label in column '{label}' is missing (null): {_REMEDY}"
    for row, value in zip(*outside(column, 0, num_classes), strict=True):
        yield int(row), f"it has {_not_a_class(int(value), label, num_classes)}"


def labels_of(rows: pa.Table, ids: Int64s, label: str, num_classes: int) -> Int64s:
    """Return the class of each row; raise DataError with a sample of `ids` if one is missing or invalid."""
    column = rows.column(label)
    if not column.null_count:
        classes = numbers_of(column).astype(np.int64)
        if not len(classes) or (classes.min() >= 0 and classes.max() < num_classes):
            return classes
    row, why = next(unfit_labels(rows, label, num_classes))
    raise DataError(f"sample {ids[row]}: {why}")


_REMEDY = "write the data again without it, or leave the row out, and build the manifest again"


def _not_a_class(value: int, label: str, num_classes: int) -> str:
    return (
        f"label {value} in column '{label}', and the training set has the classes 0 to {num_classes - 1}: correct the "
        "label, or leave the row out, and build the manifest again"
    )
