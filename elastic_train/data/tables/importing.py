"""Import rows of any origin: number labels, tokenise text, unwrap images, split and write rows.

Rows keep their order and are streamed: at most a chunk of them, and a row group per part, are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import blake3
import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.data.arrow.numbers import without_nanoseconds
from elastic_train.data.corpora import origin
from elastic_train.data.corpora.tokenizer import GivenTokenizer, read_tokenizer, tokenizer_file
from elastic_train.data.dataset.manifest import (
    SHARE,
    TRAIN,
    VALIDATION,
    Manifest,
    build_manifest,
    load_manifest,
    part_of,
)
from elastic_train.data.dataset.row_lengths import note_lengths
from elastic_train.data.tables.files import Chunk, Types, read_files, shown_chunks
from elastic_train.data.tables.images import ImageCheck, UnfitRows, is_wrapped, unwrap_images
from elastic_train.data.tables.labels import COLUMN, Labels, column_of, survey
from elastic_train.data.tables.writer import ROWS_PER_GROUP, PartWriter
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import Track, silent

TOKENS = pa.field("input_ids", pa.list_(pa.int32()), nullable=False)

Chunks = Callable[[], Iterator[Chunk]]
Parts = Mapping[str, Sequence[Path]]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of row imports: column names, tokenizer of the text, and validation share."""

    label_key: str | None = None
    text_key: str = "text"
    tokenizer: Path | None = None
    max_tokens: int | None = None
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    types: Types = field(default_factory=dict)
    share: float = SHARE
    seed: int = 7
    rows_per_group: int = ROWS_PER_GROUP
    replace: bool = False
    images: ImageCheck = field(default_factory=ImageCheck)


@dataclass(frozen=True, slots=True)
class Written:
    """The parts of a dataset; `is_new` is False if it existed."""

    manifests: tuple[Manifest, ...]
    is_new: bool
    left_out: tuple[str, ...] = ()
    """Rows left out of a new dataset, with reasons."""


@dataclass(frozen=True, slots=True)
class Table:
    """Finished rows on their way into a dataset, and manifest fields.

    `chunks` are by part. Rows are split by the content of the column `key`, or of all columns if it does not exist.
    """

    chunks: Mapping[str, Iterator[Chunk]]
    facts: Mapping[str, object]
    key: str
    tokenizer: GivenTokenizer | None = None


def import_rows(
    out: Path, parts: Parts, source: str, options: RowOptions, named: Labels | None = None, track: Track = silent
) -> Written:
    """Make a dataset of files; of a single part, a share is kept for validation. `named` are known labels."""
    if not any(parts.values()):
        raise ConfigError("name at least one file to import")
    made_from = {"source": source, **_origin_of(options), **contents_of_parts(parts)}
    if origin.is_finished(out, made_from, replace=options.replace):
        return load_parts(out)
    chunks_of = {name: _reader(of_part, options.types, parts[TRAIN][0]) for name, of_part in parts.items()}
    labels = named or survey(chunks_of[TRAIN](), options.label_key)
    finish = Finisher(labels, options)
    table = Table(
        {name: finish.all(shown_chunks(read(), f"writing {name}", track)) for name, read in chunks_of.items()},
        finish.facts,
        finish.key,
        finish.tokenizer,
    )
    return write_table(out, table, made_from, options.share, options.seed, options.rows_per_group, options.images)


def write_table(
    out: Path,
    table: Table,
    made_from: origin.Origin,
    share: float,
    seed: int,
    rows_per_group: int = ROWS_PER_GROUP,
    unfit: UnfitRows | None = None,
) -> Written:
    """Write the parts of a table with their manifests; the folder appears when complete.

    `unfit` records unusable rows; it decides once all have been seen.
    """
    with origin.filled(out, made_from) as folder:
        names = (TRAIN, VALIDATION) if set(table.chunks) == {TRAIN} and share > 0 else tuple(table.chunks)
        with ExitStack() as stack:
            writers = {name: stack.enter_context(PartWriter(folder / name, rows_per_group)) for name in names}
            for part, chunks in table.chunks.items():
                for chunk in chunks:
                    is_split = len(names) > len(table.chunks)
                    pieces = _split(chunk.rows, table.key, share, seed) if is_split else {part: chunk.rows}
                    for name, rows in pieces.items():
                        writers[name].write(rows)
        if unfit is not None:
            unfit.finish()
        for name in names:
            _describe(folder / name, table, writers[name].num_rows)
    return replace(load_parts(out), is_new=True, left_out=tuple(unfit.wrong) if unfit else ())


def load_parts(out: Path) -> Written:
    names = [name for name in (TRAIN, VALIDATION) if (out / name).is_dir()]
    return Written(tuple(load_manifest(str(out / name)) for name in names), is_new=False)


def contents_of(paths: Sequence[Path]) -> list[list[object]]:
    found: list[list[object]] = []
    for path in paths:
        try:
            found.append([path.name, blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()])
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
    return found


def contents_of_parts(parts: Parts) -> dict[str, object]:
    """Return what identifies the files of a dataset: names and digests, by part."""
    content = contents_of([path for paths in parts.values() for path in paths])
    return {"content": content, **({"validation_files": len(parts[VALIDATION])} if VALIDATION in parts else {})}


class Finisher:
    """Turns rows as read into rows to train on."""

    def __init__(self, labels: Labels | None, options: RowOptions) -> None:
        self._labels, self._options = labels, options
        self.tokenizer: GivenTokenizer | None = read_tokenizer(options.tokenizer) if options.tokenizer else None
        self.key = TOKENS.name if self.tokenizer else options.text_key

    @property
    def facts(self) -> Mapping[str, object]:
        """Manifest fields that the rows do not show."""
        facts: dict[str, object] = {
            "numeric_columns": self._options.numeric,
            "categorical_columns": self._options.categorical,
        }
        if self._labels:
            facts |= {"label_column": COLUMN.name, "labels": self._labels.names}
        return {**facts, **self.tokenizer.facts} if self.tokenizer else facts

    def all(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Finish chunk after chunk; raise ConfigError with the first bad row."""
        for chunk in chunks:
            yield replace(chunk, rows=self._finished(chunk))

    def _finished(self, chunk: Chunk) -> pa.RecordBatch:
        for name in (*self._options.numeric, *self._options.categorical):
            column_of(chunk, name, "--numeric, --categorical")
        self._check_new_names(chunk)
        columns = {name: unwrap_images(chunk, name) for name in chunk.rows.schema.names}
        fields = {name: pa.field(name, column.type) for name, column in columns.items()}
        if self.tokenizer:
            columns = {TOKENS.name: self._tokens(chunk), **columns}
            fields[TOKENS.name] = TOKENS
            del columns[self._options.text_key]
        if self._labels:
            column = self._labels.codes(chunk)
            columns.pop(self._labels.column)
            columns[COLUMN.name], fields[COLUMN.name] = column, COLUMN
        schema = pa.schema([fields[name] for name in columns])
        rows, mask = pa.RecordBatch.from_arrays(list(columns.values()), schema=schema), None
        for name in chunk.rows.schema.names:
            if is_wrapped(chunk.rows.schema.field(name).type):
                are_whole = self._options.images.are_whole(unwrap_images(chunk, name).to_pylist(), chunk.place_of)
                kept = pa.array(are_whole, pa.bool_())
                mask = kept if mask is None else pc.and_(mask, kept)
        return rows if mask is None else rows.filter(mask)

    def _check_new_names(self, chunk: Chunk) -> None:
        """Reject rows with a column named like one to be made."""
        names = set(chunk.rows.schema.names)
        if self.tokenizer and TOKENS.name in names:
            raise ConfigError(f"{chunk.path}: has '{TOKENS.name}', which --tokenizer makes; leave out one of them")
        if self._labels and self._labels.column != COLUMN.name and COLUMN.name in names:
            raise ConfigError(
                f"{chunk.path}: has '{COLUMN.name}' in addition to --label-key {self._labels.column}, which is stored "
                "under that name; rename or remove the column"
            )

    def _tokens(self, chunk: Chunk) -> pa.Array:
        assert self.tokenizer is not None, "asked for only with a tokenizer"
        texts = texts_of(chunk, self._options.text_key)
        ids = self.tokenizer.ids_of(texts)
        return pa.array([row[: self._options.max_tokens] for row in ids], TOKENS.type)


def texts_of(chunk: Chunk, name: str) -> list[str]:
    """Return a text column; raise ConfigError with the first row without text."""
    column = column_of(chunk, name, "--text-key")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ConfigError(f"{chunk.path}: column '{name}' is {column.type}, not text; read it as --types {name}=string")
    if (row := pc.index(pc.is_null(column), True).as_py()) >= 0:
        raise ConfigError(f"{chunk.place_of(row)}: has no text under '{name}'; give the row one, or leave it out")
    texts: list[str] = column.to_pylist()
    return texts


def _reader(paths: Sequence[Path], types: Types, like: Path) -> Chunks:
    return lambda: read_files(paths, types, like)


def _origin_of(options: RowOptions) -> dict[str, object]:
    """Return all options that the bytes of a dataset depend on."""
    return {
        "label_key": options.label_key,
        "text_key": options.text_key,
        "tokenizer": contents_of([tokenizer_file(options.tokenizer)])[0][1] if options.tokenizer else None,
        "max_tokens": options.max_tokens,
        "numeric": list(options.numeric),
        "categorical": list(options.categorical),
        "types": {name: str(kind) for name, kind in options.types.items()},
        "validation_share": options.share,
        "seed": options.seed,
        "rows_per_group": options.rows_per_group,
        "pyarrow": pa.__version__,
        **options.images.choices,
    }


def _split(rows: pa.RecordBatch, key: str, share: float, seed: int) -> Mapping[str, pa.RecordBatch]:
    contents = rows.column(key).to_pylist() if key in rows.schema.names else without_nanoseconds(rows).to_pylist()
    raw = [value if isinstance(value, bytes) else repr(value).encode() for value in contents]
    is_held_out = pa.array([part_of(value, share, seed) == VALIDATION for value in raw], pa.bool_())
    return {TRAIN: rows.filter(pc.invert(is_held_out)), VALIDATION: rows.filter(is_held_out)}


def _describe(folder: Path, table: Table, num_rows: int) -> None:
    """Write a part's manifest, and its tokenizer."""
    if not num_rows:
        raise ConfigError(
            f"no row is left for {folder.name}: give more rows, or another --validation-share (0 for no validation set)"
        )
    if table.tokenizer is not None:
        table.tokenizer.write_to(folder)
    note_lengths(build_manifest(str(folder), **table.facts))  # type: ignore[arg-type]
