"""Read files of rows in chunks with Arrow's own readers: JSON lines, CSV, Parquet, Arrow, and plain text.

Memory is bounded by a chunk. All files have the columns and types of the first; a row that does not parse, or has
another type, is an error with file, row and remedy. Rows count from 1 and are lines in JSON lines, and in CSV without
line breaks in values, where the header is row 1.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json
import pyarrow.parquet as pq

from elastic_train.data.arrow.changed_numbers import JsonNumbers, changed_text
from elastic_train.data.arrow.numbers import plain
from elastic_train.data.parquet.files import parse_footer, read_footer
from elastic_train.data.tables.encoding import check_utf8
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.progress_bar import Track

BLOCK_BYTES = 16 << 20
"""Bytes of text parsed at once; no row may be longer."""
ROWS_AT_ONCE = 1024
_POINTER = b"version https://git-lfs"
_REFUSALS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError)

Types = Mapping[str, pa.DataType]
Batches = Iterator[tuple[pa.RecordBatch, float]]
"""Rows, and the share of the file read so far."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a file, starting at row `first` (from 0); `done` is the share of all bytes read so far."""

    path: Path
    first: int
    rows: pa.RecordBatch
    done: float

    def place_of(self, row: int) -> str:
        """Return the location of a row of this chunk (from 0), for a message."""
        return f"{self.path}: row {self.number_of(row)}"

    def number_of(self, row: int) -> int:
        return self.first + row + (2 if has_header(self.path) else 1)


def read_files(paths: Sequence[Path], types: Types | None = None, like: Path | None = None) -> Iterator[Chunk]:
    """Yield the rows of several files; `types` of columns override inference.

    All files must have the types of the first file, or the columns and types of `like`, whose order they are given.
    Raise ConfigError, with file and row, at the first unreadable one.
    """
    sizes = [size_of(path) for path in paths]
    known, total, before = dict(types or {}), sum(sizes) or 1, 0
    columns = {} if like is None else _types_of(like, known)
    known |= columns
    for path, size in zip(paths, sizes, strict=True):
        first = 0
        for rows, share in _batches(path, known, frozenset(types or {})):
            if not first:
                names = rows.schema.names
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise ConfigError(f"{path}: has several columns named {', '.join(twice)}; rename or remove them")
                if columns and set(names) != set(columns):
                    raise ConfigError(
                        f"{path}: has the columns {', '.join(names)}, but {like} has {', '.join(columns)}; both must "
                        "have the same"
                    )
                for field in rows.schema:
                    if known.setdefault(field.name, field.type) != field.type:
                        raise ConfigError(
                            f"{path}: '{field.name}' is {field.type}, but {known[field.name]} in {like or paths[0]}: "
                            "write the same fields in all rows, or name the file first whose rows have all of them"
                        )
            in_order = rows.select(list(columns)) if columns else rows
            yield Chunk(path, first, plain(in_order), (before + share * size) / total)
            first += rows.num_rows
        if not first:
            raise ConfigError(f"{path}: holds no rows")
        before += size


def shown_chunks(chunks: Iterator[Chunk], what: str, track: Track) -> Iterator[Chunk]:
    """Pass chunks on, and show the percentage of bytes read."""
    percents, num_shown = iter(track(range(100), what, 100)), 0
    for chunk in chunks:
        yield chunk
        while num_shown < int(chunk.done * 100):
            next(percents, None)
            num_shown += 1
    for _ in percents:
        pass


def parse_types(texts: Sequence[str]) -> Types:
    """Parse `name=type` options; types have Arrow's names, such as string, int64, float64."""
    types = {}
    for text in texts:
        name, _, kind = text.partition("=")
        try:
            types[name] = pa.type_for_alias(kind)
        except ValueError as error:
            raise ConfigError(f"--types {text}: write column=type, such as n=string, n=int64, n=float64") from error
    return types


def size_of(path: Path) -> int:
    """Return the size of a row file in bytes; raise ConfigError if it is missing or of another kind."""
    if _kind_of(path) not in _READERS:
        raise ConfigError(f"{path}: must be one of {', '.join(_READERS)}")
    try:
        return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def has_header(path: Path) -> bool:
    """Return True if a file's first row names the columns."""
    return _kind_of(path) in _WITH_HEADER


def header_of(path: Path) -> list[str]:
    """Return the names in a file's first row, each once; raise ConfigError if it cannot be read."""
    with opened(path) as file:
        _check_separator(file, path)
        try:
            return list(dict.fromkeys(_open_csv(file, path, {}).schema.names))
        except pa.ArrowInvalid:
            return []  # the reader of the rows says what is wrong


def is_json(path: Path) -> bool:
    return _kind_of(path) in _JSON


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a row file; raise ConfigError if it cannot be read, or is an LFS pointer."""
    try:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ConfigError(f"{path}: is a pointer to a file of git LFS; fetch the file with `git lfs pull`")
            file.seek(0)
            yield file
    except UnicodeDecodeError:
        check_utf8(path)
        raise
    except (OSError, *_REFUSALS) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _kind_of(path: Path) -> str:
    return path.suffix.lower()


def _types_of(path: Path, types: Types) -> Types:
    """Return the types of a file's columns, read from its first rows."""
    for rows, _ in _batches(path, types, frozenset(types)):
        return {field.name: field.type for field in rows.schema}
    raise ConfigError(f"{path}: holds no rows")


def _batches(path: Path, types: Types, given: frozenset[str]) -> Batches:
    with opened(path) as file:
        yield from _READERS[_kind_of(path)](file, path, types, given)


def _json_lines(file: BinaryIO, path: Path, types: Types, given: frozenset[str]) -> Batches:
    num_rows, schema, size = 0, pa.schema(list(types.items())), max(1, path.stat().st_size)
    reader = None
    try:
        reader = arrow_json.open_json(
            file, arrow_json.ReadOptions(block_size=BLOCK_BYTES), _json_options(schema, may_infer=True)
        )
        schema = reader.schema
        numbers = JsonNumbers(path)
        for rows in reader:
            rows.validate(full=True)
            if (changed := numbers.changed(rows, num_rows, given)) is not None:
                raise ConfigError(f"{path}: row {num_rows + changed[0] + 1}: {changed[1]}")
            yield rows, _share(file, size)
            num_rows += rows.num_rows
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            check_utf8(path)
        raise _wrong_line(path, num_rows, _json_options(schema, may_infer=reader is None), error) from error


def _json_options(schema: pa.Schema, *, may_infer: bool = False) -> arrow_json.ParseOptions:
    return arrow_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if may_infer or not len(schema) else "error"
    )


def _wrong_line(path: Path, first: int, options: arrow_json.ParseOptions, error: pa.ArrowInvalid) -> ConfigError:
    """Return the error for the line at which the reader stopped: the first, after `first` rows, that fails alone."""
    changed, number = re.search(r"Column\(/(.+)\) changed from", str(error)), first
    if changed and (row := _lone_nan(_lines(path, first), changed[1])) is not None:
        return ConfigError(f"{path}: row {row}: '{changed[1]}' is NaN; give the row a value, or leave the row out")
    for number, line in _lines(path, first):
        if len(line) > BLOCK_BYTES:
            return ConfigError(f"{path}: row {number} has more than {BLOCK_BYTES >> 20} MiB; write shorter rows")
        try:
            arrow_json.read_json(io.BytesIO(line), parse_options=options).validate(full=True)
        except pa.ArrowInvalid as wrong:
            return ConfigError(f"{path}: row {number}: {re.sub(' in row [0-9]+', '', str(wrong))}; {_JSON_REMEDY}")
    return ConfigError(f"{path}: {error}; {_JSON_REMEDY}" if number else f"{path}: holds no rows")


def _lines(path: Path, first: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from itertools.islice(((at, line) for at, line in enumerate(file, start=1) if line.strip()), first, None)


def _lone_nan(lines: Iterator[tuple[int, bytes]], name: str) -> int | None:
    """Return the first line with NaN under a name, if no line has another number there."""
    found = None
    for number, line in lines:
        with suppress(ValueError, KeyError, TypeError):
            if isinstance(value := json.loads(line.decode("utf-8-sig"))[name], int | float):
                if not math.isnan(value):
                    return None
                found = found or number
    return found


def _csv(file: BinaryIO, path: Path, types: Types, given: frozenset[str]) -> Batches:
    size, num_rows = max(1, path.stat().st_size), 0
    _check_separator(file, path)
    try:
        reader = _open_csv(file, path, types)
        kinds = {each.name: each.type for each in reader.schema if each.name not in given}
        if pa.binary() in kinds.values():  # inferred for text that is not UTF-8
            check_utf8(path)
        guessed = [name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
        with path.open("rb") as again:
            texts = _open_csv(again, path, dict.fromkeys(guessed, pa.string()), guessed) if guessed else None
            for rows in reader:
                changed = changed_text(next(texts), reader.schema) if texts else None
                if changed is not None:
                    raise ConfigError(f"{path}: row {num_rows + changed[0] + 2}: {changed[1]}")
                yield rows, _share(file, size)
                num_rows += rows.num_rows
    except pa.ArrowInvalid as error:
        if str(error) == "Empty CSV file":
            raise ConfigError(f"{path}: holds no rows") from error
        check_utf8(path)
        remedy = _CSV_TYPE_REMEDY if "conversion error" in str(error) else _CSV_REMEDY
        raise ConfigError(f"{path}: {str(error).replace('Row #', 'row ')}; {remedy}") from error


def _check_separator(file: BinaryIO, path: Path) -> None:
    """Refuse a table whose columns have another separator: all of a row would be one value."""
    own = b"\t" if _kind_of(path) == ".tsv" else b","
    first, second = (file.readline(BLOCK_BYTES).rstrip(b"\r\n") for _ in range(2))
    file.seek(0)
    for other in (b";", b"\t", b","):
        if own not in first and second.count(other) >= first.count(other) > 0:
            names = {b";": "semicolons", b"\t": "tabs", b",": "commas"}
            rename = {b"\t": ", or name it .tsv", b",": ", or name it .csv"}.get(other, "")
            raise ConfigError(f"{path}: has {names[other]} between its columns; write {names[own]}{rename}")


def _open_csv(file: BinaryIO, path: Path, types: Types, columns: Sequence[str] = ()) -> arrow_csv.CSVStreamingReader:
    """Open a file; batches of the same file have the same rows for any types and columns."""
    return arrow_csv.open_csv(
        file,
        # With threads, some messages lack a row.
        arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
        arrow_csv.ParseOptions(delimiter="\t" if _kind_of(path) == ".tsv" else ",", newlines_in_values=True),
        arrow_csv.ConvertOptions(column_types=dict(types), include_columns=list(columns)),
    )


def _share(file: BinaryIO, size: int) -> float:
    return 1.0 if file.closed else min(1.0, file.tell() / size)


def _parquet(file: BinaryIO, path: Path, types: Types, given: frozenset[str]) -> Batches:
    try:
        metadata = parse_footer(read_footer(file, path.stat().st_size, str(path)), str(path))
    except DataError as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).removeprefix(f'{path}: ')}") from error
    parquet, num_rows = pq.ParquetFile(file, metadata=metadata), 0
    for rows in parquet.iter_batches(ROWS_AT_ONCE):
        num_rows += rows.num_rows
        yield _cast(rows, path, types), num_rows / parquet.metadata.num_rows


def _arrow(file: BinaryIO, path: Path, types: Types, given: frozenset[str]) -> Batches:
    """Read the streams that Hugging Face's datasets write, and Arrow files."""
    size = max(1, path.stat().st_size)
    try:
        for rows in pa.ipc.open_stream(file):
            yield _cast(rows, path, types), _share(file, size)
    except pa.ArrowInvalid:
        file.seek(0)
        arrow = pa.ipc.open_file(file)
        for number in range(arrow.num_record_batches):
            yield _cast(arrow.get_batch(number), path, types), (number + 1) / arrow.num_record_batches


def _cast(rows: pa.RecordBatch, path: Path, types: Types) -> pa.RecordBatch:
    """Cast columns to the requested types, or those of the first file."""
    for name in types:
        if name not in rows.schema.names:
            raise ConfigError(f"{path}: no column '{name}'; it has {', '.join(rows.schema.names)}")
    fields = [field.with_type(types.get(field.name, field.type)) for field in rows.schema]
    try:
        return rows.cast(pa.schema(fields, rows.schema.metadata))
    except _REFUSALS as error:
        pairs = zip(rows.schema, fields, strict=True)
        changed = ", ".join(f"{old.name} from {old.type} to {new.type}" for old, new in pairs if old.type != new.type)
        raise ConfigError(f"{path}: {error} ({changed}); give the column another type with --types") from error


def _text(file: BinaryIO, path: Path, types: Types, given: frozenset[str]) -> Batches:
    yield pa.RecordBatch.from_pydict({"text": [file.read().decode("utf-8-sig")]}), 1.0


_READERS: Mapping[str, Callable[[BinaryIO, Path, Types, frozenset[str]], Batches]] = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _text,
}
_WITH_HEADER, _JSON = (".csv", ".tsv"), (".jsonl", ".json")
_JSON_REMEDY = (
    "write one JSON object a line, all with the same fields and types, or name a column's type with --types, such as "
    "--types score=float64"
)
_CSV_REMEDY = "correct the row (a value with a comma, a quote or a line break needs quotes)"
_CSV_TYPE_REMEDY = f"{_CSV_REMEDY}, or name a column's type with --types, such as --types code=string"
