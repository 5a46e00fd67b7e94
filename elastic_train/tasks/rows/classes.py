"""The classes of a label column: which column, how many there are, and whether a validation set has the same ones."""

from __future__ import annotations

import re

from elastic_train.data.arrow.plain_types import plain_name
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError, DataError

_INTEGERS = re.compile(r"u?int(8|16|32|64)")


def label_of(manifest: Manifest, wanted: str | None) -> str:
    """Return the label column: the one that is wanted, or the manifest's; ConfigError if there is none."""
    label = wanted or manifest.label_column
    if label is None:
        raise ConfigError(f"task.params.label: the manifest of {manifest.url} names no label column; give one")
    return label


def check_columns(manifest: Manifest, *names: str) -> None:
    """Refuse a dataset that lacks a column."""
    missing = [name for name in names if name not in manifest.columns]
    if missing:
        raise DataError(
            f"{manifest.url}: no column {', '.join(map(repr, missing))}; it has {', '.join(manifest.columns)}"
        )


def check_label(manifest: Manifest, label: str) -> None:
    """Refuse a label column that holds no whole numbers."""
    if not _INTEGERS.fullmatch(plain_name(manifest.columns[label])):
        raise DataError(f"{manifest.url}: label column '{label}' is {manifest.columns[label]}, not an integer")


def count_classes(manifest: Manifest, label: str) -> int:
    """Return how many classes the training set has, two at least; DataError if they were not counted."""
    if not manifest.label_counts or manifest.label_column != label:
        raise DataError(
            f"{manifest.url}: no labels were counted in column '{label}'; build the manifest with "
            f"label_column={label!r}"
        )
    return max(2, len(manifest.label_counts))


def check_same_classes(known: Manifest, held_out: Manifest, label: str, num_classes: int) -> None:
    """Refuse a validation set, or a source of a mixture, of other classes than those of the training set `known`."""
    if held_out.label_column != label or held_out.label_counts is None:
        return
    if len(held_out.label_counts) > num_classes:
        raise DataError(
            f"{held_out.url}: has labels up to {len(held_out.label_counts) - 1}, but {known.url} only {num_classes} "
            "classes; describe both with the same `labels`"
        )
    if known.labels is not None and held_out.labels is not None and known.labels != held_out.labels:
        raise DataError(
            f"{held_out.url}: its labels differ from those of {known.url}, so what was learned there means something "
            "else here; give both the same `labels`, in one order, or import them together"
        )
