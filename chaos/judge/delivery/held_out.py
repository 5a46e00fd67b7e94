"""Read the rows of a Parquet dataset with pyarrow alone, in the file order of its manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from chaos.judge.evidence.run_files import MANIFEST, Line, items
from chaos.judge.findings import Unknown


def manifest_at(place: str) -> Line:
    """Return a dataset's manifest; raise Unknown if it cannot be read."""
    try:
        found = json.loads((Path(place) / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise Unknown(f"the dataset {place} cannot be read here ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise Unknown(f"{place}/{MANIFEST} is not a manifest")
    return found


def rows_at(place: str, manifest: Line, columns: Sequence[str], most: int | None = None) -> pa.Table:
    """Return the first rows of a dataset, or all of them."""
    tables, left = list[pa.Table](), most
    for file in cast(list[Line], items(manifest, "files")):
        if left is not None and left <= 0:
            break
        try:
            table = pq.read_table(Path(place) / str(file["path"]), columns=list(columns), memory_map=False)
        except (OSError, pa.ArrowInvalid) as error:
            raise Unknown(f"{place}/{file['path']} cannot be read: {error}") from error
        tables.append(table if left is None else table.slice(0, left))
        left = None if left is None else left - len(tables[-1])
    return pa.concat_tables(tables)
