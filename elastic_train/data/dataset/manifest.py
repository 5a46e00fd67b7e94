"""The manifest: an immutable description of a dataset, made once, which defines the sample ids.

It lists the Parquet files in a fixed order, with the rows of each row group; sample ids number those rows. Each file
has a fingerprint (size and SHA-256 of its footer), compared whenever it is opened, and the SHA-256 of all its bytes for
`data verify`. Checksums of row groups are stored in a separate file with the footers. `coverage` is what one whole
epoch must add to the coverage sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.core.accounting import CoverageSums
from elastic_train.core.arrays import Int64s, group_of
from elastic_train.core.order import first_ids
from elastic_train.data.arrow.numbers import numbers_of
from elastic_train.data.dataset.schemas import IMAGE_SUFFIXES, ROW_SUFFIXES
from elastic_train.data.parquet.files import (
    all_chunks,
    digest,
    footer_sha256,
    open_parquet,
    parse_footer,
    read_footer,
    read_row_group,
)
from elastic_train.data.parquet.footer import Footer, cut_footer, write_footers
from elastic_train.data.parquet.sources import reaching
from elastic_train.errors import AwayError, ConfigError, DataError

NAME = "manifest.json"
FORMAT = 1
MAX_LABELS = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One Parquet file: path below the dataset, size in bytes, and rows per row group."""

    path: str
    size: int
    footer_sha256: str
    sha256: str
    row_groups: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """An immutable dataset: its files and metadata.

    `url` is where it was loaded from, and not part of its identity, `digest`. `columns` maps column names to Arrow
    types. Sample ids are [0, num_rows), in the order of `files`. `coverage` is what one whole epoch adds to the
    coverage sums. Labels are integers from 0; `labels` names them, `label_counts` counts their rows.
    """

    url: str = field(compare=False)
    files: tuple[FileEntry, ...]
    columns: Mapping[str, str]
    num_rows: int
    coverage: CoverageSums
    schema_name: str = "custom"
    label_column: str | None = None
    labels: tuple[str, ...] | None = None
    label_counts: tuple[int, ...] | None = None
    numeric_columns: tuple[str, ...] = ()
    categorical_columns: tuple[str, ...] = ()
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    vocabulary_size: int | None = None

    @cached_property
    def group_rows(self) -> Int64s:
        """Rows of every row group, in file order; shape (row groups,)."""
        return np.array([rows for file in self.files for rows in file.row_groups], dtype=np.int64)

    @cached_property
    def group_first_id(self) -> Int64s:
        """The id of each row group's first sample; shape (row groups,)."""
        return first_ids(self.group_rows)

    @cached_property
    def first_group(self) -> Int64s:
        """The number of each file's first row group; shape (files,)."""
        return np.cumsum([0, *(len(file.row_groups) for file in self.files[:-1])], dtype=np.int64)

    def place_of_group(self, group: int) -> tuple[int, int]:
        """Return the file number of a row group, and its number within the file."""
        number = group_of(self.first_group, group)
        return number, group - int(self.first_group[number])

    def place_of_sample(self, sample: int) -> str:
        """Return a description of a sample's location, for a message."""
        group = group_of(self.group_first_id, sample)
        number, within = self.place_of_group(group)
        row = sample - int(self.group_first_id[group])
        return f"{self.url}: sample {sample} ({self.files[number].path}, row group {within}, row {row})"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal digests mean equal data under equal sample ids."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def _json(self) -> str:
        named = {name: value for name, value in _fields_of(self).items() if name != "url"}
        return json.dumps({"format": FORMAT, **named}, sort_keys=True, separators=(",", ":"), default=_fields_of)


def _fields_of(entry: Manifest | FileEntry | CoverageSums) -> dict[str, Any]:
    """Return the fields without copies: `asdict` took most of a resume's time."""
    return {each.name: getattr(entry, each.name) for each in fields(entry)}


def load_manifest(url: str) -> Manifest:
    """Read the manifest.json of the dataset at a folder or fsspec URL.

    Raise ConfigError if there is none, and DataError if it is invalid or unreachable.
    """
    path = f"{url.rstrip('/')}/{NAME}"
    with reaching(path):
        content = _content(url, path)
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as a manifest: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise DataError(f"{path}: is not a manifest of format {FORMAT}; build it again")
    try:
        files = tuple(FileEntry(**{**entry, "row_groups": tuple(entry["row_groups"])}) for entry in found.pop("files"))
        coverage = CoverageSums(**found.pop("coverage"))
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return Manifest(url=url, files=files, coverage=coverage, **{**found, **lists})
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: lacks or has unknown fields: {error}") from error


def check_there(url: str) -> None:
    """Read the manifest again; raise AwayError if that fails: the storage of the dataset is away."""
    try:
        load_manifest(url)
    except (ConfigError, DataError) as error:
        why = str(error).partition(";")[0]  # without advice for users who have no dataset yet
        raise AwayError(f"the storage of the data is away: {why}. Mount it, or make it answer again") from error


def _content(url: str, path: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(why_absent(url)) from error
    return content


def parts_of(url: str) -> list[str]:
    """Return the datasets that are the parts of an import at a folder or fsspec URL."""
    with reaching(url):
        fs, root = fsspec.core.url_to_fs(url)
        return [f"{url.rstrip('/')}/{part}" for part in (TRAIN, VALIDATION) if fs.exists(f"{root}/{part}/{NAME}")]


def why_absent(url: str) -> str:
    """Return why there is no dataset at a folder or fsspec URL, and what to do."""
    fs, root = fsspec.core.url_to_fs(url)
    if fs.isfile(root):
        return f"{url}: is a file, and a dataset is a folder: {_remedy_of(url)}"
    if parts := parts_of(url):
        return f"{url}: no {NAME} there, but in its parts: name {' or '.join(parts)}"
    if fs.isdir(root) and any(each.endswith(".parquet") for each in fs.ls(root, detail=False)):
        return f"{url}: no {NAME} there; describe its Parquet files once with elastic_train.build_manifest({url!r})"
    if fs.isdir(root) and any(each.lower().endswith(IMAGE_SUFFIXES) for each in fs.ls(root, detail=False)):
        return f"{url}: no {NAME} there; import its images with `elastic-train data import images OUT {url}`"
    return (
        f"{url}: no {NAME} there; make the dataset with `elastic-train data import|synth`, or describe Parquet "
        "files of your own with elastic_train.build_manifest"
    )


def _remedy_of(file: str) -> str:
    """Return how to make a dataset of a file, by its name."""
    ending, folder = f".{file.rpartition('.')[2].lower()}", file.rpartition("/")[0] or "."
    if ending in ROW_SUFFIXES:
        return f"import the file with `elastic-train data import rows OUT {file}` and name OUT/train"
    if ending == ".parquet":
        return f"describe its folder once with elastic_train.build_manifest({folder!r}), and name {folder}"
    if ending in IMAGE_SUFFIXES:
        return (
            "import its folder with `elastic-train data import images OUT DIR`, which takes DIR/LABEL/IMAGE, or "
            "DIR/IMAGE without labels, and name OUT/train"
        )
    return "`elastic-train data import --help` lists what can be imported"


def build_manifest(url: str, *, label_column: str | None = None, **facts: Any) -> Manifest:
    """Describe the Parquet files below `url`, in name order, and write the manifest.

    `url` is a folder or fsspec URL; every byte of its files is read once. All files must have one schema, and no empty
    row group. `label_column` names a column of integer classes from 0, which are counted. `facts` are further fields of
    Manifest that the data does not show, such as `labels`. Raise DataError, naming the file, if files cannot be used.
    """
    fs, root = fsspec.core.url_to_fs(url)
    # List files without a glob, which would read a folder's name as a pattern.
    listed = fs.find(root, detail=True)
    found = sorted(path for path in listed if path != root)
    for path in found:
        if listed[path].get("islink") and any(each.endswith(".parquet") for each in fs.find(path) if each != path):
            raise DataError(
                f"{path}: is a link to a folder, whose Parquet files would be left out; put the folder itself there, "
                "or link its files one by one"
            )
    paths = [path for path in found if path.endswith(".parquet")]
    if others := [path for path in found if path.lower().endswith((".parquet", ".parq", ".pq")) and path not in paths]:
        raise DataError(f"{others[0]}: the names of Parquet files end in .parquet; rename the file, or remove it")
    if not paths:
        raise DataError(f"{url}: no Parquet file there")
    entries, footers, schema, counts = [], [], None, np.zeros(0, dtype=np.int64)
    for path in paths:
        entry, footer, metadata = _describe(fs, path, root)
        file_schema = metadata.schema.to_arrow_schema()
        if schema is not None and not file_schema.equals(schema):
            raise DataError(f"{path}: its schema differs from {paths[0]}'s: {file_schema} against {schema}")
        if len(set(file_schema.names)) < len(file_schema.names):
            raise DataError(f"{path}: has several columns of one name: {', '.join(file_schema.names)}; rename them")
        schema = file_schema
        entries.append(entry)
        footers.append(footer)
        if label_column is not None:
            counts = _add(counts, _count_labels(fs, path, label_column, metadata))
    assert schema is not None, "there is at least one file"
    counts = _checked_counts(url, counts, facts.get("labels"))
    num_rows = sum(rows for entry in entries for rows in entry.row_groups)
    manifest = Manifest(
        url=url,
        files=tuple(entries),
        columns={name: str(schema.field(name).type) for name in schema.names},
        num_rows=num_rows,
        coverage=CoverageSums.of_all(num_rows),
        label_column=label_column,
        label_counts=tuple(int(count) for count in counts) if label_column else None,
        **facts,
    )
    write_footers(url, footers)
    with fs.open(f"{root}/{NAME}", "wt") as file:
        file.write(manifest._json() + "\n")
    return manifest


def _checked_counts(url: str, counts: Int64s, labels: Sequence[str] | None) -> Int64s:
    """Return a count for every named label, even unused ones; raise DataError for labels without a name."""
    if labels is None:
        return counts
    if len(counts) > len(labels):
        raise DataError(f"{url}: holds label {len(counts) - 1}, but only {len(labels)} labels are named")
    return _add(counts, np.zeros(len(labels), dtype=np.int64))


def _describe(fs: fsspec.AbstractFileSystem, path: str, root: str) -> tuple[FileEntry, Footer, pq.FileMetaData]:
    """Read one file once, in constant memory."""
    try:
        size = fs.size(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is a link to a file that is not there; copy the file, or remove the link") from error
    with fs.open(path, "rb") as file:
        footer = read_footer(file, size, path)
        metadata = parse_footer(footer, path)
        sha256, sums = digest(file, all_chunks(metadata))
    groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    relative = path.removeprefix(root).lstrip("/")
    if not groups or 0 in groups:
        raise DataError(f"{path}: has an empty row group, or none; write it again without empty ones")
    entry = FileEntry(relative, size, footer_sha256(footer), sha256, groups)
    return entry, replace(cut_footer(footer, relative), sums=sums), metadata


def _count_labels(fs: fsspec.AbstractFileSystem, path: str, column: str, metadata: pq.FileMetaData) -> Int64s:
    """Count the labels 0, 1, ... of a file, row group by row group."""
    counts = np.zeros(0, dtype=np.int64)
    with fs.open(path, "rb") as raw:
        file = open_parquet(raw, metadata)
        if column not in file.schema_arrow.names:
            raise DataError(f"{path}: no label column '{column}'; it has {', '.join(file.schema_arrow.names)}")
        if not pa.types.is_integer(file.schema_arrow.field(column).type):
            raise DataError(
                f"{path}: label column '{column}' is {file.schema_arrow.field(column).type}, not an integer"
            )
        for number in range(file.num_row_groups):
            labels = read_row_group(file, number, [column]).column(0)
            if labels.null_count:
                raise DataError(f"{path}: label column '{column}' has missing values in row group {number}")
            numbers = numbers_of(labels)
            if numbers.min() < 0 or numbers.max() >= MAX_LABELS:
                raise DataError(
                    f"{path}: label column '{column}' runs from {numbers.min()} to {numbers.max()} in row group "
                    f"{number}; labels number the classes 0, 1, ... below {MAX_LABELS}"
                )
            counts = _add(counts, np.bincount(numbers.astype(np.int64)))
    return counts


def _add(a: Int64s, b: Int64s) -> Int64s:
    """Add two counts of different lengths."""
    total = np.zeros(max(len(a), len(b)), dtype=np.int64)
    total[: len(a)] += a
    total[: len(b)] += b
    return total


TRAIN, VALIDATION = "train", "validation"
SHARE = 0.1


def part_of(content: bytes, share: float, seed: int) -> str:
    """Return the part of a row with this content: about `share` of all contents are for validation."""
    word = int.from_bytes(hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")
    return VALIDATION if word < share * 2.0**64 else TRAIN
