"""Pack documents into a dataset of rows, each document exactly once.

`input_ids` has the tokens of a row's documents consecutively, at most `length`. `document_ids` has each token's
document number, from 0 in each part, from which position ids and attention mask follow. `document_offsets` has for each
piece its start in its document: 0 unless the document was cut. `labels` has each token's label, if documents have
labels. Rows are not padded: the collate does that, as late as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_train.core.accounting import CoverageSums
from elastic_train.data.arrow.numbers import numbers_of
from elastic_train.data.corpora import origin
from elastic_train.data.corpora.tokenizer import GivenTokenizer
from elastic_train.data.dataset.manifest import SHARE, TRAIN, VALIDATION, build_manifest, part_of
from elastic_train.data.dataset.row_lengths import note_lengths
from elastic_train.data.packing.bins import BestFit, Row, Tokens
from elastic_train.data.packing.documents import IGNORED, LABELS, Documents, sources_of, tokenizer_for
from elastic_train.data.tables.files import read_files, shown_chunks
from elastic_train.data.tables.importing import contents_of
from elastic_train.data.tables.writer import ROWS_PER_GROUP, PartWriter
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import Track, silent

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("document_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("document_offsets", pa.list_(pa.int64()), nullable=False),
    ]
)
LABELLED = SCHEMA.append(pa.field(LABELS, pa.list_(pa.int32()), nullable=False))
OPEN_ROWS = 256
"""Rows open at once: 64 already waste less than 1 % (measured)."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Tokens per row, tokenizer of text, column to pack, and the token that ends a document."""

    length: int
    tokenizer: Path | None = None
    column: str | None = None
    end: str | None = None
    share: float = SHARE
    seed: int = 7
    num_open: int = OPEN_ROWS
    replace: bool = False


@dataclass(frozen=True, slots=True)
class PartReport:
    """Statistics of a part; `padding_share` is the share of positions over all rows without a token.

    `targets` counts the tokens whose label is not -100; None without labels.
    """

    url: str
    digest: str
    documents: int
    empty_documents: int
    cut_documents: int
    tokens: int
    targets: int | None
    rows: int
    length: int
    padding_share: float


@dataclass(frozen=True, slots=True)
class Packed:
    """The parts of a packed dataset; no reports if it existed."""

    reports: tuple[PartReport, ...]
    is_new: bool


def pack(out: Path, given: Sequence[Path], options: PackOptions, track: Track = silent) -> Packed:
    """Pack files or datasets; of a single part, a share of documents, by content, is kept for validation."""
    sources = sources_of(given)
    tokenizer = tokenizer_for(options.tokenizer, sources)
    end = _end_of(options, tokenizer)
    made_from = {
        "source": "pack",
        **{name: value for name, value in asdict(options).items() if name not in ("replace", "tokenizer")},
        "tokenizer_sha256": tokenizer.sha256 if tokenizer else None,
        "content": {name: contents_of(paths) for name, paths in sources.parts.items()},
        "pyarrow": pa.__version__,
    }
    if origin.is_finished(out, made_from, replace=options.replace):
        return Packed((), is_new=False)
    is_split = set(sources.parts) == {TRAIN} and options.share > 0
    names = (TRAIN, VALIDATION) if is_split else tuple(sources.parts)
    documents = Documents(options.column, tokenizer, end)
    with origin.filled(out, made_from) as folder:
        with ExitStack() as stack:
            parts = {name: stack.enter_context(_Part(folder / name, options)) for name in names}
            for part, paths in sources.parts.items():
                for chunk in shown_chunks(read_files(paths), f"packing {part}", track):
                    for tokens in documents.of(chunk):
                        to = part_of(tokens.tobytes(), options.share, options.seed) if is_split else part
                        parts[to].add(tokens)
        reports = [parts[name].describe(tokenizer) for name in names]
    return Packed(tuple(replace(each, url=str(out / Path(each.url).name)) for each in reports), is_new=True)


def _end_of(options: PackOptions, tokenizer: GivenTokenizer | None) -> int | None:
    """Return the id of the token that ends documents, given by name or number."""
    if options.end is None:
        return None
    if options.end.isdigit():
        end, most = int(options.end), tokenizer.vocabulary_size if tokenizer else 1 << 31
        if end >= most:
            raise ConfigError(f"--end {end}: token ids are below {most}")
        return end
    if tokenizer is None:
        raise ConfigError(f"--end {options.end}: without a tokenizer give the id of the token")
    return tokenizer.id_of(options.end)


@dataclass(slots=True)
class _Counts:
    """Counts of a part: documents, empty ones, those longer than a row, tokens, and targets (None without labels)."""

    documents: int = 0
    empty: int = 0
    cut: int = 0
    tokens: int = 0
    targets: int | None = None
    sums: CoverageSums = field(default_factory=CoverageSums)


class _Part:
    """One part of the dataset: packs, writes, and finally proves that every document is in it once."""

    def __init__(self, folder: Path, options: PackOptions) -> None:
        self._folder, self._options = folder, options
        self._writer, self._bins = PartWriter(folder), BestFit(options.length, options.num_open)
        self._closed: list[Row] = []
        self._counts = _Counts()

    def __enter__(self) -> _Part:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._write([*self._closed, *self._bins.finish()])
        self._writer.__exit__(*error)  # type: ignore[arg-type]

    def add(self, tokens: Tokens) -> None:
        counts, number = self._counts, self._counts.documents
        counts.documents += 1
        counts.empty += not len(tokens)
        counts.cut += len(tokens) > self._options.length
        counts.tokens += len(tokens)
        if tokens.ndim > 1:
            counts.targets = (counts.targets or 0) + int((tokens[:, 1] != IGNORED).sum())
        if len(tokens):
            counts.sums += CoverageSums.of_ids(np.array([number]))
        self._closed += self._bins.add(number, tokens)
        if len(self._closed) >= ROWS_PER_GROUP:
            self._write(self._closed)
            self._closed = []

    def _write(self, rows: Sequence[Row]) -> None:
        if rows:
            self._writer.write(rows_of(rows))

    def describe(self, tokenizer: GivenTokenizer | None) -> PartReport:
        counts, length = self._counts, self._options.length
        if not self._writer.num_rows:
            raise ConfigError(
                f"no document is left for {self._folder.name}: give more, or another --validation-share (0 for none)"
            )
        facts: dict[str, Any] = {"schema_name": "packed"}
        if tokenizer:
            tokenizer.write_to(self._folder)
            facts |= tokenizer.facts
        manifest = build_manifest(str(self._folder), **facts)
        note_lengths(manifest)
        given = (counts.sums, counts.tokens, counts.targets)
        assert written(self._folder) == given, f"{self._folder}: a document, or a label, is lost or repeated"
        return PartReport(
            manifest.url,
            manifest.digest,
            counts.documents,
            counts.empty,
            counts.cut,
            counts.tokens,
            counts.targets,
            manifest.num_rows,
            length,
            1 - counts.tokens / (manifest.num_rows * length),
        )


def rows_of(rows: Sequence[Row]) -> pa.RecordBatch:
    pieces = [piece for row in rows for piece in row.pieces]
    num_pieces = np.cumsum([0, *(len(row.pieces) for row in rows)]).astype(np.int32)
    num_tokens = np.cumsum([0, *(row.used for row in rows)]).astype(np.int32)
    documents = np.array([piece.document for piece in pieces], dtype=np.int32)
    tokens = np.concatenate([piece.tokens for piece in pieces])
    columns = [
        (num_tokens, tokens if tokens.ndim == 1 else tokens[:, 0]),
        (num_tokens, np.repeat(documents, [len(piece.tokens) for piece in pieces])),
        (num_pieces, np.array([piece.lo for piece in pieces], dtype=np.int64)),
        *([] if tokens.ndim == 1 else [(num_tokens, tokens[:, 1])]),
    ]
    lists = [pa.ListArray.from_arrays(pa.array(ends), pa.array(values)) for ends, values in columns]
    return pa.RecordBatch.from_arrays(lists, schema=SCHEMA if tokens.ndim == 1 else LABELLED)


def written(folder: Path) -> tuple[CoverageSums, int, int | None]:
    """Read a packed part back; return coverage sums over the documents that begin in it, and the numbers of tokens and
    targets (None without labels)."""
    sums, num_tokens, num_targets = CoverageSums(), 0, None
    for rows in read_back(folder):
        ids, offsets = (numbers_of(rows.column(name).flatten()) for name in ("document_ids", "document_offsets"))
        begins = np.diff(ids, prepend=-1) != 0
        begins[np.cumsum(numbers_of(pc.list_value_length(rows.column("document_ids"))))[:-1]] = True
        sums += CoverageSums.of_ids(ids[begins][offsets == 0].astype(np.int64))
        num_tokens += len(ids)
        if LABELS in rows.schema.names:
            labels = numbers_of(rows.column(LABELS).flatten())
            num_targets = (num_targets or 0) + int((labels != IGNORED).sum())
    return sums, num_tokens, num_targets


def read_back(folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield a packed part's document columns, a few rows at a time, since rows may be long."""
    for path in sorted(folder.glob("*.parquet")):
        file = pq.ParquetFile(path)
        yield from file.iter_batches(ROWS_PER_GROUP, columns=[*SCHEMA.names[1:], *_labels_in(file.schema_arrow)])


def _labels_in(schema: pa.Schema) -> list[str]:
    return [LABELS] if LABELS in schema.names else []
