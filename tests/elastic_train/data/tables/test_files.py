"""Files of rows: read in chunks with one schema, and refused with file, row and remedy."""

from __future__ import annotations

import gzip
import json
import re
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
    """A named type overrides that of the first rows."""
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"n": None})] * 30 + [json.dumps({"n": 0.5})]))
    with pytest.raises(ConfigError, match=r"row 31: .*--types score=float64"):
        list(read_files([tmp_path / "a.jsonl"]))
    rows = [
        row["n"]
        for chunk in read_files([tmp_path / "a.jsonl"], parse_types(["n=float64"]))
        for row in chunk.rows.to_pylist()
    ]
    assert rows == [None] * 30 + [0.5]
    (tmp_path / "a.jsonl").write_text('{"n": 1, "m": 1}\n{"n": 2, "m": [}')
    with pytest.raises(ConfigError, match=r"row 1: .*changed from string to number"):
        list(read_files([tmp_path / "a.jsonl"], parse_types(["n=string"])))
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
    "no UTF-8": ("a.jsonl", lines(30, "?").encode().replace(b"?", b'{"text": "\xff", "n": 1}'), "line 30 is not UTF-8"),
    "compressed": ("a.jsonl", gzip.compress(b"{}"), "one JSON object a line"),
    "semicolons": ("a.csv", "text;n\na, b;1\n", r"a\.csv: has semicolons between its columns; write commas$"),
    "tabs": ("a.csv", "text\tn\na\t1\n", "has tabs between its columns; write commas, or name it .tsv"),
    "commas": ("a.tsv", "text,n\na,1\n", "has commas between its columns; write tabs, or name it .csv"),
    "a short row": ("a.csv", "text,n\n" + "a,1\n" * 90 + "b\n", "row 92: Expected 2 columns, got 1.*needs quotes"),
    "a word for a number": ("a.csv", "text,n\n" + "a,1\n" * 90 + "b,c\n", "row 92: .*invalid value 'c'.*code=string"),
    "bytes": ("a.csv", b"text,n\n" + b"a,1\n" * 90 + b"\xff,1\n", "line 92 is not UTF-8"),
    "bytes in the first rows": ("a.csv", "text,n\ncafé,1\n".encode("cp1252"), "line 2 is not .*iconv -f WINDOWS-1252"),
    "UTF-16": ("a.csv", "text,n\ncafé,1\n".encode("utf-16"), "line 1 is not UTF-8.*iconv -f UTF-16"),
    "bytes of a text": ("a.txt", "a café".encode("cp1252"), "line 1 is not UTF-8"),
    "NaN among names": ("a.jsonl", lines(3, '{"text": NaN, "n": 1}'), "row 3: 'text' is NaN; give the row a value, or"),
    "NaN among names, later": ("a.jsonl", lines(31, '{"text": NaN, "n": 1}'), "row 31: 'text' is NaN"),
    "NaN before names": ("a.jsonl", lines(1, '{"text": NaN, "n": 1}'), "row 1: 'text' is NaN"),
    "NaN among numbers": (
        "a.jsonl",
        lines(1, '{"text": "a", "n": NaN}').replace('"n": 3}', '"n": "b"}'),
        r"\(/n\) changed from number to string",
    ),
    "an empty file": ("a.csv", "", "holds no rows"),
    "no lines": ("a.jsonl", "\n\n", "a.jsonl: holds no rows"),
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


CHANGED = {
    "a.csv: leading zeros": ("code", ["1"] * 30 + ["07"], "row 32: column 'code': 07 would be read as int64"),
    "a.csv: hexadecimal": ("code", ["0x1F"], "row 2: column 'code': 0x1F"),
    "a.csv: 64 bits": ("code", ["1"] * 30 + [f"{2**63 + 1}"] * 9, "code=uint64"),
    "a.csv: a float column": ("code", ["0.5", f"{2**53 + 1}"], "row 3: column 'code': 9007199254740993"),
    "a.tsv: leading zeros of a float": ("code", ["0.5", "00.5"], "row 3: column 'code': 00.5"),
    "a.jsonl: 64 bits": (
        "code",
        ["1.5"] * 20 + ["1e300", f"{2**63 + 1}"],
        "row 22: column 'code': 9223372036854775809",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_number_that_its_guessed_type_would_change_is_refused(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes with leading zeros became equal, ids of 64 bits another id nearby; also in a second file, in any block."""
    name, values, expected = case.partition(":")[0], CHANGED[case][1], CHANGED[case][2]
    if "64 bits" in case or "float" in case:
        monkeypatch.setattr(files, "BLOCK_BYTES", 4096)  # the type is that of the first block

    def write_values(path: Path, values: list[str]) -> Path:
        between = "\t" if path.suffix == ".tsv" else ","
        lines = [
            f'{{"code": {value}, "n": 1}}' if path.suffix == ".jsonl" else f"{value}{between}1" for value in values
        ]
        path.write_text("\n".join([*([] if path.suffix == ".jsonl" else [f"code{between}n"]), *lines, ""]))
        return path

    path = write_values(tmp_path / name, values)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        list(read_files([path]))
    first = write_values(tmp_path / f"first{path.suffix}", ["0.5" if "float" in case or "64 bits" in case else "5"])
    with pytest.raises(ConfigError, match=re.escape(expected.partition(" would")[0])):
        list(read_files([first, path]))


def test_a_column_of_a_given_type_is_taken_as_that(tmp_path: Path) -> None:
    """Codes as they are, or as the numbers that they are said to be; ids of 64 bits without rounding."""
    (tmp_path / "a.csv").write_text(f"code,id\n007,{2**63 + 1}\n")
    for kind, expected in (("string", "007"), ("int64", 7)):
        (chunk,) = read_files([tmp_path / "a.csv"], parse_types([f"code={kind}", "id=uint64"]))
        assert chunk.rows.to_pylist() == [{"code": expected, "id": 2**63 + 1}]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,x\na,b\n")
    with pytest.raises(ConfigError, match="several columns named x; rename"):
        list(read_files([tmp_path / "a.csv"]))


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


def test_objects_with_further_fields_than_those_of_the_first_file_are_refused(tmp_path: Path) -> None:
    """Rows of two types cannot be written together; those that lack a field have a null there."""
    few, all_of_them = tmp_path / "few.jsonl", tmp_path / "all.jsonl"
    few.write_text('{"m": {"x": 1}}')
    all_of_them.write_text('{"m": {"x": 1, "y": 2}}')
    message = r"all\.jsonl: 'm' is struct<x: int64, y: int64>, but struct<x: int64> in .*few\.jsonl: write the same"
    for like in (None, few):
        with pytest.raises(ConfigError, match=message):
            list(read_files([few, all_of_them], like=like))
    rows = [row for chunk in read_files([all_of_them, few]) for row in chunk.rows.to_pylist()]
    assert rows == [{"m": {"x": 1, "y": 2}}, {"m": {"x": 1, "y": None}}]


@pytest.mark.parametrize("first", [pa.nulls(1), pa.array([{"x": 1}]), pa.array([[1]])], ids=["null", "struct", "list"])
def test_a_column_of_another_kind_than_in_the_first_file_is_named(tmp_path: Path, first: pa.Array) -> None:
    """As one without any value in the first file; a given type holds for all."""
    pq.write_table(pa.table({"note": first}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"note": ["x"]}), tmp_path / "b.parquet")
    both = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    message = (
        r"b\.parquet: .*\(note from string to (null|struct|list)[^)]*\); give the column another type with --types"
    )
    with pytest.raises(ConfigError, match=message):
        list(read_files(both))
    if pa.types.is_null(first.type):
        chunks = read_files(both, parse_types(["note=string"]))
        assert [row["note"] for chunk in chunks for row in chunk.rows.to_pylist()] == [None, "x"]
