"""What a run left behind, read from files alone: histories, commit records, results, the witness, the faults.

Nothing here is imported from what is judged. A torn last line of a history (its process died) is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Line = dict[str, object]


@dataclass(frozen=True)
class Evidence:
    """The files of one run, parsed; `commits` are (key, digest of the bytes, record)."""

    folder: Path
    lines: list[Line]
    commits: list[tuple[str, str, Line]]
    result: Line | None
    witness: npt.NDArray[np.int64] | None = field(repr=False)

    def of(self, op: str) -> list[Line]:
        """Return the lines of one operation, in the order of their times."""
        return [line for line in self.lines if line.get("op") == op]


def collect(folder: Path) -> Evidence:
    """Read everything below a run's folder."""
    lines = [line for path in sorted((folder / "history").glob("*.jsonl")) for line in parse_lines(path.read_bytes())]
    lines.sort(key=lambda line: number(line, "t"))
    commits = []
    for path in sorted((folder / "commits").glob("*.json")):
        content = path.read_bytes()
        commits.append((f"commits/{path.name}", hashlib.sha256(content).hexdigest(), json.loads(content)))
    result_path, witness_path = folder / "result.json", folder / "witness.npy"
    return Evidence(
        folder=folder,
        lines=lines,
        commits=commits,
        result=json.loads(result_path.read_text()) if result_path.exists() else None,
        witness=np.load(witness_path) if witness_path.exists() else None,
    )


def parse_lines(content: bytes) -> Iterator[Line]:
    """Yield the whole lines of a history; what is torn is passed over."""
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def number(line: Line, key: str) -> float:
    """Return a line's number; KeyError or TypeError if there is none, which makes a verdict unknown."""
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key} of {line} is no number")
    return value


def whole(line: Line, key: str) -> int:
    """Return a line's integer."""
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key} of {line} is no integer")
    return value
