"""Find the numbers of text files that the inference of types would change."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_PADDED = r"^\s*[-+]?0[0-9xX]"
_MANY_DIGITS = r"^\s*[-+]?[0-9]{16,}\s*$"
_EXACT = float(2**53)
"""Above it not every integer is a float."""


def changed_text(texts: pa.RecordBatch, kinds: pa.Schema) -> tuple[int, str] | None:
    """Return the first row of text columns with a number that type inference would change, and the reason.

    It would change 010 to 10, 0x1F to 31, 2**53 + 1 to a nearby float. What looks like a number may be a name, such as
    a postal code, or a 64-bit id. Columns with an explicit type (--types) are read as that type.
    """
    found = []
    for name in texts.schema.names:
        column, kind = texts.column(name), kinds.field(name).type
        is_changed = pc.match_substring_regex(column, _PADDED).fill_null(False)
        if pa.types.is_floating(kind):
            is_long = pc.match_substring_regex(column, _MANY_DIGITS).fill_null(False)
            if is_long.true_count:
                texts_of = zip(is_long.to_pylist(), column.to_pylist(), strict=True)
                is_changed = pc.or_(is_changed, pa.array([each and not _is_float(text) for each, text in texts_of]))
        if (row := pc.index(is_changed, True).as_py()) >= 0:
            found.append((row, _said(name, column[row].as_py().strip(), kind)))
    return min(found, default=None)


class JsonNumbers:
    """Compares large floats of a file's rows with its lines, reading only lines that have any."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0
        self._lines: Iterator[str] | None = None

    def changed(self, rows: pa.RecordBatch, first: int, given: frozenset[str]) -> tuple[int, str] | None:
        """Return the first row with an integer that was changed, and the reason; `first` is the batch's first row."""
        names = [field.name for field in rows.schema if pa.types.is_floating(field.type) and field.name not in given]
        is_large = np.zeros(rows.num_rows, dtype=bool)
        for name in names:
            values = rows.column(name).to_numpy(zero_copy_only=False)
            is_large |= np.isfinite(values) & (np.abs(values) >= _EXACT)
        for row in np.flatnonzero(is_large).tolist():
            found = self._row(first + row)
            for name in names:
                value = found.get(name)
                if isinstance(value, int) and not _is_float(str(value)):
                    return row, _said(name, str(value), rows.schema.field(name).type)
        return None

    def _row(self, number: int) -> dict[str, object]:
        if self._lines is None:
            self._lines = (line for line in self._path.open(encoding="utf-8-sig") if line.strip())
        line = next(itertools.islice(self._lines, number - self._next, None))
        self._next = number + 1
        found = json.loads(line)
        return found if isinstance(found, dict) else {}


def _is_float(text: str) -> bool:
    return int(float(text)) == int(text)


def _said(name: str, text: str, kind: pa.DataType) -> str:
    return (
        f"column '{name}': {text} would be read as {kind}, and changed: name the column's type, such as --types "
        f"{name}=string, or {name}={'uint64' if pa.types.is_floating(kind) else kind}"
    )
