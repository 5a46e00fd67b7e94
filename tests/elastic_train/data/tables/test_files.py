"""Files of rows: read in chunks with one schema, and refused with file, row and remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.data.tables import files
from elastic_train.data.tables.files import parse_types, read_files
from elastic_train.errors import ConfigError

ROWS = [{"text": f"row {number}", "n": number} for number in range(40)]
LINES = [json.dumps(row) for row in ROWS]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has several blocks."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 256)
    monkeypatch.setattr(files, "ROWS_AT_ONCE", 7)


def write(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    elif path.suffix in (".csv", ".tsv"):
        between = "," if path.suffix == ".csv" else "\t"
        path.write_text(f"text{between}n\n" + "".join(f"{row['text']}{between}{row['n']}\n" for row in ROWS))
    else:
        path.write_text("\n".join(LINES))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow"])
def test_every_format_has_the_same_rows(tmp_path: Path, name: str) -> None:
    """In chunks that know their first row, up to all bytes of all files."""
    path = write(tmp_path / name)
    chunks = list(read_files([path, path]))
    assert [row for chunk in chunks for row in chunk.rows.to_pylist()] == ROWS * 2
    assert {row for chunk in chunks for row in range(chunk.first, chunk.first + chunk.rows.num_rows)} == set(range(40))
    done = [chunk.done for chunk in chunks]
    assert done == sorted(done) and 0.99 < done[-1] <= 1.0 and len(done) >= 4


def test_an_arrow_file_is_read_as_a_stream_is(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=7)
    assert [row for chunk in read_files([tmp_path / "a.arrow"]) for row in chunk.rows.to_pylist()] == ROWS


def test_types_can_be_named(tmp_path: Path) -> None:
    """Where the first rows show another one, or none."""
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"n": None})] * 30 + [json.dumps({"n": 0.5})]))
    with pytest.raises(ConfigError, match=r"row 31: .*--types score=float64"):
        list(read_files([tmp_path / "a.jsonl"]))
    rows = [
        row["n"]
        for chunk in read_files([tmp_path / "a.jsonl"], parse_types(["n=float64"]))
        for row in chunk.rows.to_pylist()
    ]
    assert rows == [None] * 30 + [0.5]
    with pytest.raises(ConfigError, match="--types n=many: write column=type"):
        parse_types(["n=many"])


def lines(number: int, line: str) -> str:
    """Return the lines with one of them, counted from 1, replaced."""
    return "\n".join([*LINES[: number - 1], line, *LINES[number:]])


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "no JSON": ("a.jsonl", lines(3, '{"text": "a"'), "row 3: JSON parse error.*one JSON object a line"),
    "no JSON, later": ("a.jsonl", lines(31, "text"), "row 31: JSON parse error"),
    "no object": ("a.jsonl", lines(30, "[1]"), "row 30: .*changed from object to array"),
    "another type": (
        "a.jsonl",
        lines(33, '{"text": "a", "n": "b"}'),
        r"row 33: .*\(/n\) changed from number to string",
    ),
    "another type, early": (
        "a.jsonl",
        lines(2, '{"text": "a", "n": "b"}'),
        r"\(/n\) changed from number to string in row 1",
    ),
    "another field": ("a.jsonl", lines(33, '{"text": "a", "m": 1}'), "row 33: .*unexpected field"),
    "blank lines count": ("a.jsonl", "\n\n" + lines(30, "[1]"), "row 32: "),
    "a long row": ("a.jsonl", lines(20, json.dumps({"text": "a" * 1000, "n": 1})), "row 20 has more than 0 MiB"),
    "an array": ("a.json", json.dumps(ROWS[:2]), "one JSON object a line"),
    "no UTF-8": ("a.jsonl", lines(30, "?").encode().replace(b"?", b'{"text": "\xff", "n": 1}'), "row 30: .*UTF8"),
    "compressed": ("a.jsonl", gzip.compress(b"{}"), "one JSON object a line"),
    "a short row": ("a.csv", "text,n\n" + "a,1\n" * 90 + "b\n", "row 92: Expected 2 columns, got 1.*stands in quotes"),
    "a word for a number": ("a.csv", "text,n\n" + "a,1\n" * 90 + "b,c\n", "row 92: .*invalid value 'c'.*code=string"),
    "bytes": ("a.csv", b"text,n\n" + b"a,1\n" * 90 + b"\xff,1\n", "row 92: .*invalid UTF8"),
    "an empty file": ("a.csv", "", "Empty CSV"),
    "a header alone": ("a.csv", "text,n\n", "holds no rows"),
    "no Parquet": ("a.parquet", "PAR1", "cannot be read"),
    "no Arrow": ("a.arrow", "ARROW1", "cannot be read"),
    "another kind": ("a.pdf", "", "must be one of .jsonl"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, case: str) -> None:
    name, content, message = BAD[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        list(read_files([path]))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        list(read_files([tmp_path / "none.csv"]))


def test_all_files_have_the_types_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "b.csv").write_text("n\n1.5\n")
    with pytest.raises(ConfigError, match=r"b\.csv: .*row 2: .*invalid value '1.5'"):
        list(read_files([tmp_path / "a.csv", tmp_path / "b.csv"]))
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"m": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet: no column 'n'; it has m"):
        list(read_files([tmp_path / "a.parquet", tmp_path / "b.parquet"]))
