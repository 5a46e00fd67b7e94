"""A user's own text: every row is a sample, or an error that names its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.corpora.origin import Sample, is_no_label
from elastic_train.data.tables.texts import read_samples
from elastic_train.errors import ConfigError

filled_text = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda text: bool(text.strip()))
LABELS = filled_text.filter(lambda text: not is_no_label(text))
"""Not nan, in any case."""


def read(path: Path, content: str, *, text_key: str = "text", label_key: str = "label") -> list[tuple[str, str]]:
    """Write a file and read its samples."""
    path.write_text(content, encoding="utf-8", newline="")
    return [(sample.text, sample.label) for sample in read_samples([path], text_key, label_key)]


@given(st.lists(st.tuples(filled_text, LABELS), min_size=1, max_size=8))
def test_json_lines_keep_every_row(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    """Any text and label come back in their order, repeats included."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    content = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    assert read(path, content) == rows


def test_csv_with_a_byte_order_mark_and_long_fields_is_read(tmp_path: Path) -> None:
    """The byte order mark is not part of the first key or text; a field may be as long as a book."""
    mark, long = "\ufeff", "word " * 40_000
    assert read(tmp_path / "a.csv", f"{mark}text,label\n{long},x\n") == [(long, "x")]
    assert read(tmp_path / "a.jsonl", f'{mark}{{"text": "t", "label": "x"}}\n') == [("t", "x")]
    assert read(tmp_path / "a.txt", f"{mark}one\n\ntwo\n") == [("one", "a"), ("two", "a")]


def test_formats(tmp_path: Path) -> None:
    """JSON lines with blank ones, CSV with quotes and numbers as labels, paragraphs named after their file."""
    assert read(tmp_path / "a.jsonl", '{"text": "x", "label": 1}\n\n{"text": "y", "label": "b"}\n') == [
        ("x", "1"),
        ("y", "b"),
    ]
    assert read(tmp_path / "a.csv", 'body,kind\n"x, ""y""\nz",1\nw,2\n', text_key="body", label_key="kind") == [
        ('x, "y"\nz', "1"),
        ("w", "2"),
    ]
    assert read(tmp_path / "poem.txt", "one\ntwo\n \n\n\nthree\n") == [("one\ntwo", "poem"), ("three", "poem")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\nfine,x\nhello, world,x\n", r"a\.csv: .*row 3: Expected 2 columns, got 3.* needs quotes"),
        ("a.csv", "text,label,text\na,x,b\n", r"a\.csv: has several columns named text"),
        ("a.csv", "text,label\n", r"a\.csv: holds no rows"),
        ("a.jsonl", '{"text": "a", "text": "b", "label": 1}\n', r"a\.jsonl: row 1: is not JSON: text is there twice"),
        ("a.jsonl", '\n{"text": NaN, "label": 1}\n', r"a\.jsonl: row 2: 'text' is empty"),
        ("a.jsonl", '{"a": 1\n', r"a\.jsonl: row 1: is not JSON: Expecting ',' delimiter at column 8$"),
        ("a.csv", "text,label\na,x\nb,NaN\n", r"a\.csv: row 3: has no label: 'label' is empty or NaN; give the row"),
        ("a.jsonl", "\n\n", r"a\.jsonl: holds no rows"),
    ],
)
def test_what_would_be_cut_or_dropped_is_refused_by_its_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    """Parsers keep the last of two values of one name, and the first values of too long a row."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name, content)


def test_only_a_line_break_ends_a_line_of_text(tmp_path: Path) -> None:
    """Python's own lines also end with separators that a text may have within."""
    assert read(tmp_path / "a.txt", "one\u2028two\x85\x0bthree\n") == [("one\u2028two\x85\x0bthree", "a")]


def test_files_are_read_in_their_order(tmp_path: Path) -> None:
    """Samples follow the order in which files are named, and have no metadata that the user did not give."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    samples = read_samples([tmp_path / "b.txt", tmp_path / "a.txt"], "text", "label")
    assert samples == [Sample(f"text of {name}", name) for name in ("b", "a")]


BAD: dict[str, tuple[str, str]] = {
    "no JSON": ("a.jsonl", '{"text": "x", "label": 1}\n{\n'),
    "no object": ("a.jsonl", '{"text": "x", "label": 1}\n[1]\n'),
    "no label": ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x"}\n'),
    "no text": ("a.csv", "text,label\n ,1\n"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named(tmp_path: Path, case: str) -> None:
    """A row that is no JSON object, or lacks a text or a label, is an error with file and line: line 2 here."""
    name, content = BAD[case]
    with pytest.raises(
        ConfigError,
        match=rf"{name}: row 2: (is (not JSON|a list)|no value under 'label'; keys there: text|'text' is empty)",
    ):
        read(tmp_path / name, content)


def test_all_bad_rows_are_named_up_to_ten(tmp_path: Path) -> None:
    """A user corrects them at once; in a file of another kind the first ten suffice."""
    for number, last in ((3, "row 4: 'text' is empty"), (12, "later rows were not read")):
        with pytest.raises(ConfigError) as raised:
            read(tmp_path / "a.csv", "text,label\n" + " ,1\n" * number)
        said = str(raised.value).splitlines()
        assert len(said) == min(number, 11) and last in said[-1]


def test_wrong_keys_are_explained(tmp_path: Path) -> None:
    """The message names the keys that the row has and the option that chooses."""
    with pytest.raises(ConfigError, match=r"no value under 'text'; keys there: body, label \(choose with --text-key\)"):
        read(tmp_path / "a.jsonl", '{"body": "x", "label": 1}\n')
    both = (
        r"has no column 'text' and no column 'label'; its columns: id, body \(choose with --text-key and --label-key\)"
    )
    with pytest.raises(ConfigError, match=rf"^\S+a\.csv: {both}$"):
        read(tmp_path / "a.csv", "id,body\n" + "1,x\n" * 3)
    with pytest.raises(ConfigError, match="has semicolons between its columns; write commas"):
        read(tmp_path / "a.csv", "text;label\nx;1\n")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A missing file, one of another encoding, one without text, one of another kind, and no file at all."""
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    (tmp_path / "blank.txt").write_text("\n \n")
    for name, message in (
        ("none.csv", "cannot be read"),
        ("latin.jsonl", "row 1: is not UTF-8; convert the file.*iconv"),
        ("blank.txt", "no text"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
            read_samples([tmp_path / name], "text", "label")
    with pytest.raises(ConfigError, match=r"a\.pdf: must be one of \.jsonl, \.json, \.csv"):
        read_samples([tmp_path / "a.pdf"], "text", "label")
    with pytest.raises(ConfigError, match="name at least one file"):
        read_samples([], "text", "label")
