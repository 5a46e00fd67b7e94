"""Columns of every type that Parquet delivers are read right, or refused by name."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.data.arrow.columns import Rows, gather
from elastic_train.data.arrow.numbers import plain, plain_name
from elastic_train.data.dataset.encoded_images import check_images
from elastic_train.data.dataset.manifest import Manifest, build_manifest
from elastic_train.data.dataset.row_groups import RowGroups
from elastic_train.errors import DataError
from elastic_train.tasks.text_classifier import TextClassifier

LISTS = [[1, 2], [3, 4], [5, 6], [7, 8]]
TEXTS = ["a", "a longer text than a view holds", "", "a"]
INTEGER_LISTS = [
    pa.list_(pa.int32()),
    pa.large_list(pa.uint8()),
    pa.list_(pa.int64(), 2),
    pa.list_view(pa.int32()),
    pa.large_list_view(pa.uint16()),
    pa.list_(pa.dictionary(pa.int8(), pa.int64())),
]
NUMBERS = [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.decimal128(10, 2), pa.decimal32(5, 1), pa.bool_()]
ONE_VALUE = [pa.string(), pa.string_view(), pa.large_string(), pa.dictionary(pa.int16(), pa.string())]


def described(folder: Path, **columns: pa.Array) -> Manifest:
    folder.mkdir()
    pq.write_table(pa.table({"label": pa.array([0, 1, 0, 1], pa.uint64()), **columns}), folder / "rows.parquet")
    return build_manifest(str(folder), label_column="label")


def read(manifest: Manifest, *columns: str) -> pa.Table:
    """Read all rows as training does, the last first."""
    groups = RowGroups(manifest, list(columns))
    rows = {number: Rows(groups.decode(number)) for number in range(len(manifest.group_rows))}
    return gather(rows.__getitem__, manifest.group_first_id, np.array([3, 2, 1, 0]))[0]


def as_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values).dictionary_encode().cast(kind)
    exact = {pa.bool_(): bool}.get(kind, Decimal if pa.types.is_decimal(kind) else lambda value: value)
    return pa.array([None if value is None else exact(value) for value in values], kind)


@pytest.mark.parametrize("kind", INTEGER_LISTS, ids=str)
def test_lists_of_integers_are_tokens_whatever_their_type(tmp_path: Path, kind: pa.DataType) -> None:
    manifest = described(tmp_path / "rows", input_ids=pa.array(LISTS, kind))
    task = TextClassifier(vocabulary=9, dim=8, heads=1)
    task.prepare(manifest)
    batch = task.collate(read(manifest, "input_ids", "label"), np.arange(4))
    assert batch["tokens"][:, :2].tolist() == LISTS[::-1] and batch["label"].tolist() == [1, 0, 1, 0]
    assert batch["lengths"].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32(), 2), pa.list_view(pa.int32()), pa.large_list_view(pa.int16())])
@pytest.mark.parametrize("cut", [slice(0, 5), slice(1, 5), slice(2, 4), slice(4, 5), slice(0, 0)])
def test_nulls_and_slices_are_those_of_the_column(kind: pa.DataType, cut: slice) -> None:
    """Arrow's own cast gives nulls in place of the numbers of a sliced view."""
    values = [[1, 2], None, [3, None], [5, 6], [7, 8]]
    found = plain(pa.table({"x": pa.array(values, kind)[cut]})).column("x")
    assert found.to_pylist() == values[cut]
    assert str(found.type).startswith(plain_name(str(kind)).split("<")[0] + "<")


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_numbers_of_any_type_are_metadata(tmp_path: Path, kind: pa.DataType) -> None:
    size = as_array([1, 0, None, 1], kind)
    manifest = described(tmp_path / "rows", input_ids=pa.array(LISTS), size=size)
    task = TextClassifier(vocabulary=9, dim=8, heads=1, numeric=["size"])
    task.prepare(manifest)
    batch = task.collate(read(manifest, *task.columns()), np.arange(4))
    assert batch["is_missing"][:, 0].tolist() == [False, True, False, False]
    assert batch["numeric"][:, 0].tolist() == pytest.approx([np.log(2), 0.0, 0.0, np.log(2)])


@pytest.mark.parametrize("kind", ONE_VALUE, ids=str)
def test_text_of_any_type_is_a_category(tmp_path: Path, kind: pa.DataType) -> None:
    manifest = described(tmp_path / "rows", input_ids=pa.array(LISTS), kind=as_array(list(TEXTS), kind))
    task = TextClassifier(vocabulary=9, dim=8, heads=1, categorical=["kind"])
    task.prepare(manifest)
    rows = read(manifest, *task.columns())
    assert rows.column("kind").to_pylist() == TEXTS[::-1]
    categories = task.collate(rows, np.arange(4))["categories"][:, 0].tolist()
    assert categories[0] == categories[3] and len(set(categories)) == 3


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.binary_view(), pa.large_binary(), pa.dictionary(pa.int8(), pa.binary())]
)
def test_bytes_of_any_type_are_images(tmp_path: Path, kind: pa.DataType) -> None:
    contents = [text.encode() for text in TEXTS]
    manifest = described(tmp_path / "rows", image=as_array(list(contents), kind))
    check_images(manifest, "image")
    assert read(manifest, "image").column("image").to_pylist() == contents[::-1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": pa.array([[True]] * 4)}, "column 'input_ids' is list<element: bool>, not a list of integers"),
        ({"input_ids": pa.array([[1.0]] * 4, pa.list_(pa.float16()))}, "not a list of integers"),
        ({"input_ids": pa.array([["a"]] * 4)}, "not a list of integers"),
        ({"size": pa.array([1] * 4, pa.timestamp("us"))}, r"column 'size' is timestamp\[us\], not numbers"),
        ({"size": pa.array(TEXTS)}, "column 'size' is string, not numbers"),
        ({"kind": pa.array([[1]] * 4)}, "column 'kind' is list<element: int64>, not one value a row"),
        ({"kind": pa.array([{"a": 1}] * 4)}, "column 'kind' is struct<.*, not one value a row"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, columns: dict[str, pa.Array], message: str) -> None:
    manifest = described(tmp_path / "rows", **{"input_ids": pa.array(LISTS), **columns})
    task = TextClassifier(
        vocabulary=9,
        dim=8,
        heads=1,
        numeric=["size"] if "size" in columns else None,
        categorical=["kind"] if "kind" in columns else None,
    )
    with pytest.raises(DataError, match=message):
        task.prepare(manifest)
