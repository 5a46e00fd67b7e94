"""Read lines of a run's histories as values of the expected types; torn or mistyped values become None.

Histories may be torn anywhere (a machine died) and may be being written, so readers must not fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

Line = Mapping[str, object]


def read_lines(path: Path) -> Iterator[Line]:
    """Yield a file's lines that have an operation and a time; nothing if the file no longer exists."""
    try:
        with path.open("rb") as file:
            for text in file:
                try:
                    fields = json.loads(text)
                except ValueError:
                    continue
                if isinstance(fields, dict) and isinstance(fields.get("op"), str) and number(fields, "t") is not None:
                    yield fields
    except FileNotFoundError:  # pruned meanwhile
        return


def number(fields: Line, key: str) -> float | None:
    value = fields.get(key)
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_one else None  # type: ignore[arg-type]


def whole(fields: Line, key: str) -> int | None:
    value = fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(fields: Line, key: str) -> str | None:
    value = fields.get(key)
    return value if isinstance(value, str) else None


def at(fields: Line) -> float:
    value = number(fields, "t")
    assert value is not None, "read_lines gives lines with a time"
    return value
