"""Labels of imported rows: names become numbers, the most frequent first; numbers stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.data.corpora.origin import is_no_label, no_label
from elastic_train.data.dataset.manifest import MAX_LABELS
from elastic_train.data.tables.files import Chunk, is_json
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest

USUAL = "label"
COLUMN = pa.field("label", pa.int32(), nullable=False)


@dataclass(frozen=True, slots=True)
class Labels:
    """The label column and its class names; None if rows have numbers without names."""

    column: str
    names: tuple[str, ...] | None = None

    def codes(self, chunk: Chunk) -> pa.Array:
        """Return the classes of the rows, int32; raise ConfigError with a row whose class is missing or unknown."""
        column = labels_of(chunk, self.column)
        if self.names is None or pa.types.is_integer(column.type):
            return column.cast(pa.int32())
        codes = pc.index_in(column, pa.array(self.names, pa.string()))
        if (row := pc.index(pc.is_null(codes), True).as_py()) >= 0:
            raise ConfigError(
                f"{chunk.place_of(row)}: has the label {column[row].as_py()}, which no training row has; correct it, "
                "or add training rows with this label"
            )
        return codes


def survey(chunks: Iterable[Chunk], wanted: str | None) -> Labels | None:
    """Read all rows once, and number their labels; None without a label column if none was requested."""
    column, counts, is_named = wanted, Counter[str](), False
    for chunk in chunks:
        if column is None and USUAL not in chunk.rows.schema.names:
            continue
        column = column or USUAL
        labels = labels_of(chunk, column)
        if is_named := not pa.types.is_integer(labels.type):
            counts.update({pair["values"]: pair["counts"] for pair in pc.value_counts(labels).to_pylist()})
    if column is None:
        return None
    by_count = sorted(counts, key=lambda name: (-counts[name], name))
    if is_named and len(by_count) < 2:
        raise ConfigError(f"column '{column}' has one label, {by_count[0]}; a classifier needs at least 2")
    return Labels(column, tuple(by_count) if is_named else None)


def labels_of(chunk: Chunk, column: str) -> pa.Array:
    """Return the rows' labels: names, or numbers from 0; raise ConfigError with the first row that has neither."""
    found = column_of(chunk, column, "--label-key")
    if pa.types.is_boolean(found.type):
        found = found.cast(pa.int32())
    if (row := pc.index(_is_missing(found), True).as_py()) >= 0:
        raise ConfigError(no_label(chunk.place_of(row), column))
    is_number = pa.types.is_integer(found.type)
    as_name = "write it as text, in quotes" if is_json(chunk.path) else f"read it as text with --types {column}=string"
    if not is_number and not _is_text(found):
        raise ConfigError(
            f"{chunk.path}: label column '{column}' is {found.type}: a class is a whole number or a name; choose "
            f"another column with --label-key, or {as_name}"
        )
    if is_number and (row := pc.index(pc.less(found, 0), True).as_py()) >= 0:
        raise ConfigError(
            f"{chunk.place_of(row)}: has no label: '{column}' is {found[row].as_py()}; give the row one, or leave it "
            "out"
        )
    if is_number and (row := pc.index(pc.greater_equal(found, MAX_LABELS), True).as_py()) >= 0:
        raise ConfigError(
            f"{chunk.place_of(row)}: '{column}' is {found[row].as_py()}: numbers of classes are below {MAX_LABELS:,}; "
            f"for a name, {as_name}"
        )
    return found if is_number else found.cast(pa.string())


_RARE = 20
"""A label may be a misspelt one if another that is like it has so many times as many rows."""
_MOST_COMPARED = 1000
"""Labels that are compared with each other: for ten times as many it would take a minute."""


def misspelt(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the labels that look like a commoner one, or differ from one in case and spaces alone.

    `counts` are the rows of each label, of which some may have none. Nothing is yielded for more than a thousand.
    """
    for name, count in counts.items() if len(counts) <= _MOST_COMPARED else ():
        commoner = [
            other
            for other, number in counts.items()
            if other != name
            and (number >= _RARE * max(1, count) or (number >= count and _plain(other) == _plain(name)))
        ]
        if (meant := nearest(name, commoner, cutoff=0.8)) and not any(map(str.isdigit, name)):
            yield name, meant


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _is_missing(column: pa.Array) -> pa.Array:
    """Return a mask of the rows without a value: null, NaN or a blank name."""
    if not _is_text(column):
        return pc.is_null(column, nan_is_null=pa.types.is_floating(column.type))
    names = [name for name in pc.unique(column).to_pylist() if name is not None and is_no_label(name)]
    return pc.or_(pc.is_null(column), pc.is_in(column, pa.array(names, column.type)))


def column_of(chunk: Chunk, name: str, option: str) -> pa.Array:
    """Return a column; raise ConfigError with the existing columns, and the option to choose one."""
    names = chunk.rows.schema.names
    if name not in names:
        meant = did_you_mean(nearest(name, names))
        raise ConfigError(f"{chunk.path}: no column '{name}'{meant or ';'} it has {', '.join(names)} ({option})")
    return chunk.rows.column(name)
