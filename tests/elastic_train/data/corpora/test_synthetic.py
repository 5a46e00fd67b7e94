"""Synthetic data: the same bytes for the same seed, shares as promised, written a row group at a time."""

from __future__ import annotations

import hashlib
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.corpora import synthetic
from elastic_train.data.corpora.synthetic import VOCABULARY, synthesise
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.dataset.schemas import LONG_TAIL, POLICY, QUALITY, SCHEMAS
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.slow

NUM_ROWS = 20_000


@pytest.fixture(scope="module", params=["quality", "policy"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """20,000 rows of each schema."""
    folder = tmp_path_factory.mktemp(f"synthetic-{request.param}")
    return synthesise(str(folder), NUM_ROWS, request.param, seed=5)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def all_rows(manifest: Manifest) -> pa.Table:
    return pa.concat_tables(pq.read_table(f"{manifest.url}/{file.path}") for file in manifest.files)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, schema: str) -> None:
    """Two calls write equal files; another seed writes others."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesise(str(tmp_path / name), 300, schema, seed, rows_per_group=64)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a") != digests(tmp_path / "c")


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 400), st.integers(1, 90), st.one_of(st.none(), st.integers(1, 200)), st.sampled_from(list(SCHEMAS))
)
def test_any_number_of_rows(num_rows: int, per_group: int, per_file: int | None, schema: str) -> None:
    """Rows, row groups and files have the requested sizes, whatever the numbers."""
    url = "memory://synthetic-any"
    fsspec.filesystem("memory").rm(url, recursive=True) if fsspec.filesystem("memory").exists(url) else None
    manifest = synthesise(url, num_rows, schema, rows_per_group=per_group, rows_per_file=per_file)
    file_rows = per_file or -(-num_rows // 4)
    expected = [
        [min(per_group, end - lo) for lo in range(first, end, per_group)]
        for first in range(0, num_rows, file_rows)
        for end in [min(first + file_rows, num_rows)]
    ]
    assert [list(file.row_groups) for file in manifest.files] == expected
    assert load_manifest(url) == manifest


def test_columns_are_those_of_the_schema(dataset: Manifest) -> None:
    """Files and manifest have the columns, in their order and types, that schemas.py names."""
    schema = SCHEMAS[dataset.schema_name]
    for file in dataset.files:
        assert pq.read_schema(f"{dataset.url}/{file.path}").equals(schema.columns)
    assert list(dataset.columns) == schema.columns.names
    assert (dataset.label_column, dataset.numeric_columns, dataset.categorical_columns) == (
        schema.label,
        schema.numeric,
        schema.categorical,
    )


def test_labels_have_their_shares(dataset: Manifest) -> None:
    """18 % of quality rows are positive; the eleven classes of policy run from 41 % to 0.3 %."""
    shares = [0.82, 0.18] if dataset.schema_name == "quality" else list(LONG_TAIL)
    assert dataset.label_counts is not None
    assert [count / NUM_ROWS for count in dataset.label_counts] == pytest.approx(shares, abs=5e-4)
    assert len(dataset.labels or ()) == len(shares)


def test_the_long_tail_is_the_one_promised() -> None:
    """Eleven shares fall from 41 % to 0.3 % and add up to all."""
    assert (len(LONG_TAIL), LONG_TAIL[0], LONG_TAIL[-1]) == (11, 0.41, 0.003)
    assert list(LONG_TAIL) == sorted(LONG_TAIL, reverse=True)
    assert sum(LONG_TAIL) == pytest.approx(1.0)


def test_metadata_is_missing_in_6_to_8_percent(dataset: Manifest) -> None:
    """Every metadata column misses 6 to 8 % of its values; tokens and labels none."""
    rows = all_rows(dataset)
    metadata = {*dataset.numeric_columns, *dataset.categorical_columns}
    missing = {name: rows.column(name).null_count / NUM_ROWS for name in rows.column_names}
    assert [name for name in metadata if not 0.06 <= missing[name] <= 0.08] == []
    assert [name for name in missing if name not in metadata and missing[name]] == []
    assert len(metadata) == {"quality": 5, "policy": 10}[dataset.schema_name]


def test_tokens_leave_padding_out(dataset: Manifest) -> None:
    """Rows hold 4 to 256 tokens with ids in [1, vocabulary): 0 is padding's."""
    tokens = all_rows(dataset).column("input_ids").combine_chunks()
    lengths, values = np.diff(tokens.offsets.to_numpy()), tokens.values.to_numpy()
    assert (lengths.min(), lengths.max()) == (4, 256)
    assert values.min() == 1
    assert values.max() < VOCABULARY == dataset.vocabulary_size


def test_labels_can_be_learned(tmp_path: Path) -> None:
    """Counting the words of each class names the label far more often than the commonest label does."""
    rows = all_rows(synthesise(str(tmp_path), 2000, "policy", seed=1))
    labels = rows.column(POLICY.label).to_numpy()
    scores = np.zeros((len(labels), len(LONG_TAIL)))
    for place, tokens in enumerate(rows.column("input_ids").to_pylist()):
        kinds = (np.array(tokens) - 1) // 48
        noise = 1.0 / np.sqrt(1 + np.arange(len(LONG_TAIL)))  # low ids are common in the noise, too
        scores[place] = np.bincount(kinds[kinds < len(LONG_TAIL)], minlength=len(LONG_TAIL)) - noise
    assert float((scores.argmax(axis=1) == labels).mean()) > 0.55


@pytest.mark.parametrize("rows_per_group", [10, 64])
def test_memory_holds_one_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_group: int) -> None:
    """Every table handed to the writer is one row group, and is made after the one before was written."""
    events: list[tuple[str, int]] = []
    make, write = synthetic._table, pq.ParquetWriter.write_table

    def made(schema: object, group: synthetic._Group, seed: int) -> pa.Table:
        events.append(("made", group.hi - group.lo))
        return make(schema, group, seed)  # type: ignore[arg-type]

    def written(self: pq.ParquetWriter, table: pa.Table, row_group_size: int) -> None:
        if "label" in table.column_names:  # and not the footers
            events.append(("written", table.num_rows))
        write(self, table, row_group_size=row_group_size)

    monkeypatch.setattr(synthetic, "_table", made)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", written)
    manifest = synthesise(str(tmp_path), 500, "quality", rows_per_group=rows_per_group)
    expected = [(what, int(rows)) for rows in manifest.group_rows for what in ("made", "written")]
    assert events == expected
    assert manifest.group_rows.max() == rows_per_group


def test_shards_and_times_follow_the_rows(tmp_path: Path) -> None:
    """shard_id is the number of the file, and created_at grows by a second a row over all files."""
    manifest = synthesise(str(tmp_path), 40, "quality", rows_per_file=15)
    rows = all_rows(manifest)
    assert rows.column("shard_id").to_pylist() == [0] * 15 + [1] * 15 + [2] * 10
    seconds = rows.column("created_at").cast(pa.int64()).to_numpy() // 1_000_000
    assert (seconds - seconds[0]).tolist() == list(range(40))
    assert QUALITY.columns.field("created_at").type == pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "must be at least 1; rows is 0"),
        ({"rows": 5, "rows_per_group": 0}, "must be at least 1"),
        ({"rows": 5, "rows_per_file": 0}, "must be at least 1"),
        ({"rows": 5, "schema": "prose"}, "schema must be one of quality, policy, not 'prose'"),
        ({"rows": 5, "seed": -1}, "seed must be at least 0, not -1"),
    ],
)
def test_impossible_numbers_are_refused(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    """Numbers that cannot be are refused before anything is written."""
    with pytest.raises(ConfigError, match=message):
        synthesise(str(tmp_path / "out"), **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
