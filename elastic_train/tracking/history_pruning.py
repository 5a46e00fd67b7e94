"""Delete histories of old terms, keeping a summary in <run>/history/summary.json.

Two steps, the second needing the first: leaders' histories of all but the newest terms are *folded* into the summary
(faults, training time), and files of still older terms are deleted. A history counts through the summary once its term
is folded, before that through its file; so a process that dies between two writes changes no answer, and the next one
continues. One process of a folder prunes at a time, every `EVERY_TERMS` terms.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_train.system.atomic_files import write_atomically
from elastic_train.system.file_locks import locked_by
from elastic_train.tracking.history_files import FOLDER, histories, last_step_lines, restore_line, term_of

SUMMARY, LOCK = "summary.json", "summary.lock"
EVERY_TERMS = 10
UNFOLDED_TERMS = 10
"""Newest terms that are not folded: their processes may still write, which the summary would miss."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of the leaders' histories of terms up to `through`; files of terms up to `pruned` are deleted."""

    through: int = 0
    pruned: int = 0
    num_faults: int = 0
    trained_s: float = 0.0


def summary_of(run_dir: str | Path) -> Summary:
    """Return a folder's summary; an empty one if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError):
        return Summary(**json.loads((Path(run_dir) / FOLDER / SUMMARY).read_text()))
    return Summary()


def summarised(run_dir: str | Path, before_term: int) -> Summary:
    """Extend the summary by the histories of terms before `before_term`; reads both ends of leaders' files only."""
    return _fold(run_dir, summary_of(run_dir), before_term - 1)


def prune(run_dir: str | Path, term: int, keep_terms: int) -> None:
    """Delete the histories of all but the newest `keep_terms` terms up to `term`, if due; raise OSError."""
    if not _is_due(run_dir, term, keep_terms):
        return
    with (Path(run_dir) / FOLDER / LOCK).open("w") as lock:
        if not locked_by(lock.fileno(), 0.0) or not _is_due(run_dir, term, keep_terms):
            return
        # Recorded first: a reader that finds files missing then knows why.
        oldest = term - keep_terms
        folded = _fold(run_dir, summary_of(run_dir), max(oldest, term - UNFOLDED_TERMS), pruned=oldest)
        write_atomically(Path(run_dir) / FOLDER / SUMMARY, json.dumps(asdict(folded)) + "\n")
        for path in sorted((Path(run_dir) / FOLDER).glob("[0-9]*-*-*.jsonl")):
            if term_of(path) <= oldest:
                path.unlink(missing_ok=True)


def _is_due(run_dir: str | Path, term: int, keep_terms: int) -> bool:
    return term - keep_terms >= max(EVERY_TERMS, summary_of(run_dir).pruned + EVERY_TERMS)


def _fold(run_dir: str | Path, summary: Summary, through: int, pruned: int = 0) -> Summary:
    num, trained_s = summary.num_faults, summary.trained_s
    for parts in histories(run_dir, rank=0):
        if summary.through < term_of(parts[0]) <= through and (first := _restored(parts)):
            resumed = first.get("resumed")
            num += isinstance(resumed, dict) and bool(resumed.get("steps_lost"))
            trained_s += max((_time(last) - _time(first) for last in _last_steps(parts)), default=0.0)
    return Summary(max(summary.through, through), max(summary.pruned, pruned), num, trained_s)


def _restored(parts: list[Path]) -> dict[str, object] | None:
    return next((line for path in parts if (line := restore_line(path))), None)


def _last_steps(parts: list[Path]) -> Iterator[dict[str, object]]:
    return itertools.chain.from_iterable(last_step_lines(path) for path in parts[-2:])


def _time(line: dict[str, object]) -> float:
    """Return the unix second of a history's line."""
    return float(str(line["t"]))
