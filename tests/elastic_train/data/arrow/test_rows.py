"""Rows taken as bytes are the rows that Arrow takes, for every type, and padding is what a loop would make of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.arrow import columns
from elastic_train.data.arrow.columns import Rows, gather
from elastic_train.data.arrow.numbers import pad_lists

pytestmark = pytest.mark.slow

VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.list_(pa.int32()), st.lists(st.integers(-9, 9), max_size=5)),
    (pa.list_(pa.float64()), st.lists(st.none() | st.floats(-1, 1), max_size=3)),
    (pa.list_(pa.uint8()), st.lists(st.integers(0, 255), max_size=5)),
    (pa.list_(pa.bool_()), st.lists(st.booleans(), max_size=3)),
    (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    (pa.list_(pa.list_(pa.int16())), st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3)),
    (pa.string(), st.text(max_size=20)),
    (pa.large_binary(), st.binary(max_size=30)),
    (pa.int64(), st.integers(0, 5)),
    (pa.date32(), st.dates()),
    (pa.bool_(), st.booleans()),
]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: str(kind[0]))
@settings(deadline=None)
@given(data=st.data())
def test_any_rows_in_any_order(kind: tuple[pa.DataType, st.SearchStrategy[Any]], data: st.DataObject) -> None:
    """Rows of several row groups come in the order of the ids, with their missing values, and valid.

    That holds where rows are small enough to be joined, and where each is copied from its row group.
    """
    arrow, values = kind
    small_row = data.draw(st.sampled_from([0, 4, columns.SMALL_ROW]))
    groups = data.draw(st.lists(st.lists(st.none() | values, min_size=1, max_size=6), min_size=1, max_size=4))
    flat = [value for group in groups for value in group]
    first_id = np.cumsum([0, *map(len, groups[:-1])])
    ids = np.array(data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=1, max_size=12)), dtype=np.int64)
    whole = pa.table({"a": pa.chunked_array([pa.array(group, arrow) for group in groups])})
    rows = [Rows(whole.slice(lo, len(group))) for lo, group in zip(first_id, groups, strict=True)]
    with patch.object(columns, "SMALL_ROW", small_row):
        taken, read_ids = gather(lambda group: rows[group], first_id, ids)
    taken.validate(full=True)
    assert taken.schema == whole.schema
    assert taken.column("a").to_pylist() == whole.column("a").take(pa.array(ids)).to_pylist()
    assert read_ids.tolist() == ids.tolist()
    assert taken.slice(len(ids) // 2).column("a").to_pylist() == taken.column("a").to_pylist()[len(ids) // 2 :]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 99), max_size=20), min_size=1, max_size=8),
    st.integers(1, 25),
    st.sampled_from([1, 4, 8]),
    st.integers(0, 3),
)
def test_padding(rows: list[list[int]], max_width: int, multiple: int, skipped: int) -> None:
    """As wide as the longest row, rounded up and cut, 0 after each row; a slice of a column is padded alone."""
    column = pa.chunked_array([pa.array([[7]] * skipped + rows, pa.list_(pa.int32()))]).slice(skipped)
    padded, lengths = pad_lists(column, max_width=max_width, multiple=multiple)
    cut = [row[:max_width] for row in rows]
    longest = max(1, *(len(row) for row in cut)) if len(cut) > 1 else max(1, len(cut[0]))
    width = min(-(-longest // multiple) * multiple, max_width)
    assert padded.tolist() == [row + [0] * (width - len(row)) for row in cut]
    assert lengths.tolist() == [len(row) for row in cut]
