"""A sample of text on its way into a dataset, and measures of any text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CODE = re.compile(
    r"^\s*(>>>|\.\.\.(\s|$)|\$ |import |from \w+ import |def |class |return\b|@\w)"  # start of a line of code
    r"|[\w\])]\(.*\)\s*$|[;{}]\s*$"  # end of one
)
_INDENTED = re.compile(r"^ {8,}\S")


@dataclass(frozen=True, slots=True)
class Sample:
    """A text and its label; `numeric` and `categorical` follow the schema's columns, None where unknown."""

    text: str
    label: str
    numeric: tuple[float | None, ...] = ()
    categorical: tuple[str | None, ...] = ()


def measure(text: str) -> tuple[float, float, float]:
    """Return a text's characters, lines, and share of lines that look like code."""
    lines = [line for line in text.splitlines() if line.strip()]
    code = sum(1 for line in lines if _CODE.search(line) or _INDENTED.match(line))
    return float(len(text)), float(len(lines)), code / max(1, len(lines))
