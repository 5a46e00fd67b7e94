"""The local truth about a run's metrics: <run>/metrics/<term>.jsonl, one JSON line for the values of one step.

A line reaches the operating system before the call returns, so it survives the process's SIGKILL; a torn line is passed
over. Only a term's leader writes its file, and its last line says how the term ended, if it did: `{"t", "term",
"status"}`. Steps that a later term computed again stand in both files; readers keep the first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = "metrics"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Values:
    """What one step measured, at unix time `t`."""

    t: float
    step: int
    by_name: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class End:
    """How a term ended: FINISHED, FAILED or KILLED."""

    status: str


class MetricsWriter:
    """Appends to this term's file; raises OSError when the line could not be written."""

    def __init__(self, run_dir: Path, term: int) -> None:
        self._path = metrics_path(run_dir, term)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._term = term
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._is_torn = os.fstat(self._file).st_size > 0

    def values(self, step: int, by_name: Mapping[str, float]) -> None:
        """Append the values of a step."""
        floats = {name: float(value) for name, value in by_name.items()}
        self._append({"t": time.time(), "term": self._term, "step": step, "values": floats})

    def end(self, status: str) -> None:
        """Append how the term ended, and close the file."""
        try:
            self._append({"t": time.time(), "term": self._term, "status": status})
        finally:
            os.close(self._file)

    def _append(self, fields: Mapping[str, object]) -> None:
        # An empty line is passed over; it keeps this line whole if the one before it was torn.
        line = (b"\n" if self._is_torn else b"") + json.dumps(fields).encode() + b"\n"
        self._is_torn = True
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self._path}: a line was cut short; the disk is full")
        self._is_torn = False


class MetricsReader:
    """Reads one term's file from where the last read ended; a line without its end is left for the next read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Values | End]:
        """Return the whole lines of the next mebibyte; nothing at the end of the file."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read(_READ_BYTES).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return list(_parse(whole))


def metrics_path(run_dir: Path, term: int) -> Path:
    """Return where a term's metrics lie."""
    return run_dir / FOLDER / f"{term:08d}.jsonl"


def terms(run_dir: Path) -> list[int]:
    """Return the terms that have a file of metrics, oldest first."""
    return sorted(int(path.stem) for path in (run_dir / FOLDER).glob("*.jsonl") if path.stem.isdecimal())


def read_metrics(run_dir: Path) -> Iterator[Values | End]:
    """Yield the lines of all terms, oldest term first."""
    for term in terms(run_dir):
        reader = MetricsReader(metrics_path(run_dir, term))
        while lines := reader.read():
            yield from lines


def final_metrics(run_dir: Path) -> dict[str, float]:
    """Return each metric's value at its furthest step."""
    furthest: dict[str, tuple[int, float]] = {}
    for line in read_metrics(run_dir):
        if isinstance(line, Values):
            for name, value in line.by_name.items():
                if name not in furthest or line.step > furthest[name][0]:
                    furthest[name] = (line.step, value)
    return {name: value for name, (_, value) in furthest.items()}


def recorded_end(run_dir: Path) -> str | None:
    """Return the status that the newest term ended with; None if it was killed or still runs."""
    status = None
    for term in terms(run_dir)[-1:]:
        reader = MetricsReader(metrics_path(run_dir, term))
        while lines := reader.read():
            status = lines[-1].status if isinstance(lines[-1], End) else None
    return status


def _parse(content: bytes) -> Iterator[Values | End]:
    for line in content.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and "values" in fields:
            yield Values(fields["t"], fields["step"], fields["values"])
        elif isinstance(fields, dict) and "status" in fields:
            yield End(fields["status"])
