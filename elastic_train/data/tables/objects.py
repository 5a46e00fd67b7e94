"""Read rows as objects, one by one: their fields and types may differ from row to row, as those of chats do.

Arrow would give all rows of a JSON file the same keys and types. A row that is no object is passed on with the reason.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from elastic_train.data.arrow.numbers import without_nanoseconds
from elastic_train.data.tables.files import ROWS_AT_ONCE, has_header, header_of, is_json, opened, read_files, size_of
from elastic_train.errors import ConfigError
from elastic_train.system.wording import a, json_fault

_BLANK = b"\xef\xbb\xbf \t\r\n"
"""Bytes of a blank line: white space, and the byte order mark that spreadsheets write."""
Numbered = tuple[int, dict[str, Any] | str]
"""Number of a row in its file, from 1, and the row, or the reason why it is not one."""


@dataclass(frozen=True, slots=True)
class Objects:
    """Consecutive rows of a file; `done` is the share of all bytes read so far."""

    path: Path
    values: Sequence[Numbered]
    done: float


def read_objects(paths: Sequence[Path]) -> Iterator[Objects]:
    """Yield the rows of several files; in files with a header every value is text.

    Raise ConfigError for a file that cannot be read, or has no rows.
    """
    sizes = [size_of(path) for path in paths]
    total, before = sum(sizes) or 1, 0
    for path, size in zip(paths, sizes, strict=True):
        for values, share in _json_rows(path, size) if is_json(path) else _table_rows(path):
            yield Objects(path, values, (before + share * size) / total)
        before += size


def _table_rows(path: Path) -> Iterator[tuple[list[Numbered], float]]:
    for chunk in read_files([path], dict.fromkeys(header_of(path), pa.string()) if has_header(path) else None):
        rows = map(_without_nulls, without_nanoseconds(chunk.rows).to_pylist())
        yield list(enumerate(rows, start=chunk.number_of(0))), chunk.done


def _json_rows(path: Path, size: int) -> Iterator[tuple[list[Numbered], float]]:
    with opened(path) as file:
        is_array = file.read(64).lstrip(_BLANK).startswith(b"[")
        file.seek(0)
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip(_BLANK))
        rows = _array(path, file.read()) if is_array else ((number, _parsed(line)) for number, line in lines)
        is_empty = True
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            is_empty = False
            yield some, min(1.0, file.tell() / size)
        if is_empty:
            raise ConfigError(f"{path}: holds no rows")


def _array(path: Path, content: bytes) -> Iterator[Numbered]:
    try:
        found = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise  # `opened` says how to convert the file
    except ValueError as error:
        raise ConfigError(f"{path}: begins as a JSON array, and cannot be read as one: {error}") from error
    yield from ((number, _object(row)) for number, row in enumerate(found, start=1))


def _parsed(line: bytes) -> dict[str, Any] | str:
    try:
        return _object(json.loads(line.rstrip(_BLANK).decode("utf-8-sig"), object_pairs_hook=_once_each))
    except UnicodeDecodeError:
        return "is not UTF-8; convert the file, such as with `iconv -f WINDOWS-1252 -t UTF-8`"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {json_fault(error)}"


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raise ValueError for duplicate names, of which a parser would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"{', '.join(twice)} is there twice")
    return found


def _object(value: Any) -> dict[str, Any] | str:
    if not isinstance(value, dict):
        return f"is {a(type(value).__name__)}, not an object"
    return _whole(value)  # type: ignore[no-any-return]


def _whole(value: Any) -> Any:
    """Return a value whose texts have ? for lone surrogates, which JSON can write and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_whole(name): _whole(each) for name, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    """Return a table value without the keys that Arrow filled with null because other rows have them."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
