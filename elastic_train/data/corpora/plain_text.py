"""Import a user's own text: JSON lines or CSV with text and label per row, or text files named after their label.

Every row becomes a sample: a row without text or label is an error with file and line, never skipped. Files are UTF-8,
optionally with a byte order mark.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_train.data.corpora.origin import Sample
from elastic_train.errors import ConfigError

_ENCODING = "utf-8-sig"
_MOST_CHARS = (1 << 31) - 1
_QUOTES = "a value with a comma, a quote or a line break needs quotes"


def read_files(files: Sequence[Path], text_key: str, label_key: str) -> list[Sample]:
    """Read samples in file order; raise ConfigError with file and line for an unusable row."""
    if not files:
        raise ConfigError("name at least one file to import: .jsonl, .csv or .txt")
    samples: list[Sample] = []
    for path in files:
        before = len(samples)
        samples += [Sample(text, label) for text, label in _read(path, text_key, label_key)]
        if len(samples) == before:
            raise ConfigError(f"{path}: holds no rows")
    return samples


def _read(path: Path, text_key: str, label_key: str) -> Iterator[tuple[str, str]]:
    if path.suffix not in (".jsonl", ".csv", ".txt"):
        raise ConfigError(f"{path}: must be .jsonl, .csv or .txt")
    try:
        if path.suffix == ".txt":
            yield from _paragraphs(path)
            return
        for line, row in _json_rows(path) if path.suffix == ".jsonl" else _csv_rows(path):
            yield _field(row, text_key, "--text-key", path, line), _field(row, label_key, "--label-key", path, line)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _paragraphs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the blocks of lines between blank lines, labelled with the file's stem."""
    blocks = "\n".join(line.rstrip() for line in path.read_text(encoding=_ENCODING).split("\n")).split("\n\n")
    texts = [block.strip("\n") for block in blocks if block.strip()]
    if not texts:
        raise ConfigError(f"{path}: holds no text")
    yield from ((text, path.stem) for text in texts)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_once_each, parse_constant=_no_number)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: is not a JSON object")
            yield number, row


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raise ValueError for duplicate names, of which a parser would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"{', '.join(twice)} is there twice")
    return found


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no value of JSON")


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open(encoding=_ENCODING, newline="") as file:
        csv.field_size_limit(_MOST_CHARS)  # the default refuses texts over 128 kB
        reader = csv.DictReader(file)
        if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
            raise ConfigError(f"{path}:1: has several columns named {', '.join(twice)}; rename or remove them")
        for row in reader:
            if None in row:
                raise ConfigError(f"{path}:{reader.line_num}: has more values than the header has names; {_QUOTES}")
            yield reader.line_num, dict(row)


def _field(row: dict[str, object], key: str, option: str, path: Path, line: int) -> str:
    value = row.get(key)
    if value is None or isinstance(value, list | dict) or not str(value).strip():
        known = ", ".join(row) or "none"
        raise ConfigError(f"{path}:{line}: no value under '{key}'; keys there: {known} (choose with {option})")
    text = str(value)
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ConfigError(f"{path}:{line}: '{key}' has half of a surrogate pair, which is no text; correct the row")
    return text
