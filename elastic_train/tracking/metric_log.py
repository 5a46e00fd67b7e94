"""A run's authoritative local metrics: <run>/metrics/<term>.jsonl, one JSON line per event.

A line states the step from which the term resumes, the values of a step, that everything up to a step is settled (by a
commit), or how the term ended. A thread writes it within milliseconds; readers skip torn lines. Only a term's leader
writes its file. Steps that were discarded and recomputed are in the files of several terms. The newest term's first
line decides which count: it names the terms that applied the steps before it, as commits do. (The highest term alone
does not decide: a branch that began while a process was frozen is dead once that process returns with more steps.)
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_train.core.lineage import Interval, cut
from elastic_train.tracking.background_files import LineFile

FOLDER = "metrics"
BEST = "best/"
_READ_BYTES = 1 << 20
_MAX_LINES_HELD = 10_000


@dataclass(frozen=True, slots=True)
class Begin:
    """The term resumes from this applied step; `intervals` tile [0, step) by the terms that applied it.

    They are None in older files, or if the line is missing (full disk): then everything that older terms wrote up to
    the step counts.
    """

    step: int
    intervals: tuple[Interval, ...] | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """Measurements of one step at Unix time `t`; `is_higher_better` names metrics whose best value is kept."""

    t: float
    step: int
    by_name: Mapping[str, float]
    is_higher_better: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settled:
    """A commit has everything up to this step, so it is final; `tags` describe the run from then on."""

    step: int
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class End:
    """Status of an ended term: FINISHED, FAILED or KILLED."""

    status: str

    @property
    def is_final(self) -> bool:
        """True if the job is over; one that was asked to leave resumes later."""
        return self.status != "KILLED"


class MetricsWriter:
    """Appends to this term's file, `lines`, without waiting; what it does not accept is lost."""

    def __init__(self, lines: LineFile, term: int) -> None:
        self._lines, self._term = lines, term

    def begin(self, intervals: Sequence[Interval]) -> None:
        """Append which terms applied the steps before this one."""
        step = intervals[-1].hi if intervals else 0
        self._append({"begins_at": step, "intervals": [(i.term, i.lo, i.hi) for i in intervals]})

    def values(self, step: int, by_name: Mapping[str, float], is_higher_better: Mapping[str, bool]) -> None:
        floats = {name: float(value) for name, value in by_name.items()}
        better = {"is_higher_better": dict(is_higher_better)} if is_higher_better else {}
        self._append({"step": step, "values": floats, **better})

    def settled(self, step: int, tags: Mapping[str, str]) -> None:
        """Append that a commit contains everything up to a step, with tags that describe the run from then on."""
        self._append({"step": step, "tags": dict(tags)})

    def end(self, status: str) -> None:
        """Append how the term ended, and close the file."""
        self._append({"status": status})
        self.close()

    def close(self) -> None:
        """Close the file without an end: another term follows."""
        self._lines.close()

    def _append(self, fields: Mapping[str, object]) -> None:
        self._lines.append(json.dumps({"t": time.time(), "term": self._term, **fields}).encode())


class MetricsReader:
    """Reads one term's file from where the last read ended; an incomplete line is left for the next read."""

    def __init__(self, run_dir: Path, term: int) -> None:
        self.term = term
        self._path = metrics_path(run_dir, term)
        self._offset = 0

    def read(self) -> list[Begin | Values | Settled | End] | None:
        """Return the complete lines of the next mebibyte; None at the end of the file, or while there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                # a line of very many values is longer
                whole, newline, _ = (file.read(_READ_BYTES) + file.readline()).rpartition(b"\n")
        except FileNotFoundError:
            return None
        self._offset += len(whole) + len(newline)
        return list(_parse(whole.splitlines())) if newline else None

    def begin(self) -> Begin | None:
        """Return how the term began; None if unknown yet."""
        with self._path.open("rb") as file:
            first = next((line for line in _parse(file) if isinstance(line, Begin | Values)), None)
        return Begin(first.step - 1) if isinstance(first, Values) else first


class LineageReader:
    """Reads the lines that count over all terms, each step once, in order; a best value comes with the values that set
    it.

    A line counts if the newest term's lineage contains the line's step, applied by the same terms as in the line's own.
    `newest` is a term and the intervals that it resumes from; by default the term with the newest file.
    """

    def __init__(self, run_dir: Path, newest: tuple[int, Sequence[Interval]] | None = None) -> None:
        numbers = [term for term in terms(run_dir) if newest is None or term < newest[0]]
        files = [MetricsReader(run_dir, term) for term in numbers]
        if newest is None:
            lineage = _lineage_of(files)
        else:
            term, before = newest
            files.append(MetricsReader(run_dir, term))
            lineage = (*before, Interval(term, before[-1].hi if before else 0, sys.maxsize))
        lasts = [(file, _last_kept(file, lineage)) for file in files]
        self._parts = [(file, last) for file, last in lasts if last is not None]
        self._piece: list[Values | Settled] = []
        self._best: dict[str, float] = {}

    def read(self, settled: float = math.inf) -> list[Values | Settled]:
        """Return the next lines up to step `settled`; empty if there are none yet."""
        while self._parts:
            file, last = self._parts[0]
            ready = [line for line in self._piece if line.step <= settled]
            self._piece = [line for line in self._piece if line.step > settled]
            if ready:
                return [self._with_best(line) if isinstance(line, Values) else line for line in ready]
            lines = file.read() if len(self._piece) < _MAX_LINES_HELD else None
            if lines is not None:
                self._piece += [line for line in lines if isinstance(line, Values | Settled) and line.step <= last]
            elif self._piece or len(self._parts) == 1:
                break
            else:
                self._parts.pop(0)
        return []

    def _with_best(self, line: Values) -> Values:
        best = {}
        for name, is_higher_better in line.is_higher_better.items():
            value, sign = line.by_name.get(name, math.nan), 1 if is_higher_better else -1
            if sign * value > sign * self._best.get(name, -sign * math.inf):
                self._best[name] = best[BEST + name] = value
        return replace(line, by_name={**line.by_name, **best}) if best else line


def metrics_path(run_dir: Path, term: int) -> Path:
    return run_dir / FOLDER / f"{term:08d}.jsonl"


def terms(run_dir: Path) -> list[int]:
    """Return the terms that have a file of metrics, oldest first."""
    return sorted(int(path.stem) for path in (run_dir / FOLDER).glob("*.jsonl") if path.stem.isdecimal())


def read_metrics(run_dir: Path) -> Iterator[Values | Settled]:
    """Yield the lines that count over all terms, in step order."""
    reader = LineageReader(run_dir)
    while lines := reader.read():
        yield from lines


def final_metrics(run_dir: Path) -> dict[str, float]:
    """Return each metric's value at its furthest step."""
    final: dict[str, float] = {}
    for line in read_metrics(run_dir):
        if isinstance(line, Values):
            final |= line.by_name
    return final


def recorded_end(run_dir: Path) -> End | None:
    """Return how the newest term ended; None if it was killed or still runs."""
    last: Begin | Values | Settled | End | None = None
    for term in terms(run_dir)[-1:]:
        reader = MetricsReader(run_dir, term)
        while (lines := reader.read()) is not None:
            last = lines[-1] if lines else last
    return last if isinstance(last, End) else None


def settled_step(run_dir: Path) -> float:
    """Return the step up to which nothing will be recomputed; infinite if the job is over."""
    end = recorded_end(run_dir)
    if end is not None and end.is_final:
        return math.inf
    steps = [line.step for line in read_metrics(run_dir) if isinstance(line, Settled)]
    return steps[-1] if steps else 0


def _lineage_of(files: Sequence[MetricsReader]) -> tuple[Interval, ...]:
    """Return which terms applied which steps, by the newest file that says how it began; its own term is the last."""
    untold: list[tuple[int, int]] = []
    before: tuple[Interval, ...] = ()
    for file in reversed(files):
        begin = file.begin()
        if begin is not None:
            untold.append((file.term, begin.step))
            if begin.intervals is not None:
                before = begin.intervals
                break
    for term, step in reversed(untold):
        before = (*cut(before, step), Interval(term, step, sys.maxsize))
    return before


def _last_kept(file: MetricsReader, lineage: Sequence[Interval]) -> int | None:
    """Return the last step at which a term's lines count; None if none do.

    A term without steps may still have validated, at its first step, what earlier terms did not get to.
    """
    own = next((interval for interval in lineage if interval.term == file.term), None)
    begin = file.begin() if own is None else None
    if own is not None or begin is None:
        return own.hi if own else None
    is_last = next((interval.term > file.term for interval in lineage if interval.hi > begin.step), False)
    return begin.step if is_last and begin.intervals in (None, cut(lineage, begin.step)) else None


def _parse(content: Iterator[bytes] | Sequence[bytes]) -> Iterator[Begin | Values | Settled | End]:
    for text in content:
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict):
                continue
            if "values" in fields:
                by_name = {name: float(value) for name, value in fields["values"].items()}
                yield Values(float(fields["t"]), int(fields["step"]), by_name, dict(fields.get("is_higher_better", {})))
            elif "tags" in fields:
                yield Settled(int(fields["step"]), dict(fields["tags"]))
            elif "begins_at" in fields:
                tiles = fields.get("intervals")
                intervals = None if tiles is None else tuple(Interval(*map(int, tile)) for tile in tiles)
                yield Begin(int(fields["begins_at"]), intervals)
            elif "status" in fields:
                yield End(fields["status"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
