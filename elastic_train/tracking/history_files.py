"""The files of a run's histories, and queries on them for recovery.

Long histories are in parts: <term>-<rank>-<unique>.jsonl, then <term>-<rank>-<unique>.p000001.jsonl and so on, of which
the newest two are kept. Names sort in the order of writing.

Delete histories of old terms, keeping a summary in <run>/history/summary.json.

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

from elastic_train.system.files import locked_by, write_atomically

FOLDER = "history"
HEAD_FILE = "head.json"
"""In the run's folder: names the newest published commit, to detect a store that lost it."""
_TAIL_BYTES = 1 << 16
_OF_COST, _MOST_LAST = ("memory", "phases"), 8
"""Operations also recorded when a world breaks, and the most such lines at the end."""
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LastApplied:
    """The furthest step that any rank of earlier terms has applied, with its time (unix seconds)."""

    term: int
    step: int
    world: int
    at: float


def last_applied(run_dir: str | Path, before_term: int) -> LastApplied | None:
    """Return the furthest step applied by the newest term before `before_term`, reading only the ends of its files."""
    files: dict[int, list[Path]] = {}
    for path in (Path(run_dir) / FOLDER).glob("[0-9]*-*-*.jsonl"):
        files.setdefault(term_of(path), []).append(path)
    for term in sorted((term for term in files if term < before_term), reverse=True):
        lines = [line for path in files[term] for line in last_step_lines(path)]
        if lines:
            last = max(lines, key=lambda line: (int(str(line["step"])), float(str(line["t"]))))
            return LastApplied(term, int(str(last["step"])), int(str(last["world"])), float(str(last["t"])))
    return None


def newest_commit(run_dir: str | Path) -> str | None:
    """Return the key of the newest commit by a run's folder; None if it names none."""
    try:
        found = json.loads((Path(run_dir) / HEAD_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    key = found.get("commit") if isinstance(found, dict) else None
    return key if isinstance(key, str) else None


@dataclass(frozen=True, slots=True)
class Stagnation:
    """Newest terms that ended without progress, and the furthest step before them.

    `num_in_validation` of them ended while validating.
    """

    num_terms: int = 0
    step: int = 0
    num_in_validation: int = 0


def stagnation(run_dir: str | Path, before_term: int, most: int) -> Stagnation:
    """Count the newest terms before `before_term` that went no further than earlier ones, up to `most`.

    A job that loses its state restarts from its last commit: the furthest step of any term counts. Terms that ended
    normally (done, or asked to leave) do not count. Reads the ends of rank 0's newest histories, back to the last in
    which the job gave up.
    """
    lasts, are_in_validation = list[int](), list[bool]()
    for path in reversed([parts[-1] for parts in histories(run_dir, 0) if term_of(parts[-1]) < before_term]):
        content = tail_of(path)
        if b'"no_progress"' in content or len(lasts) > most:
            break
        if b'{"op": "end"' in content:
            continue
        lasts.append(max((int(str(line["step"])) for line in last_step_lines(path)), default=0))
        are_in_validation.append(_last_op(content) == "validate")
    furthest = max(lasts, default=0)
    since = next((number for number, last in reversed(list(enumerate(lasts))) if last == furthest), 0)
    num_terms = min(since if furthest else len(lasts), most)
    return Stagnation(num_terms, furthest, sum(are_in_validation[:num_terms]))


def num_ended(run_dir: str | Path, before_term: int, num_terms: int) -> int:
    """Count the processes that ended in the newest terms before `before_term`, without those of the last one.

    A process that outlives its world is also in the next; pids alone do not identify it, as every container has its
    own. Reads the start of each of their files.
    """
    paths = [path for path in (Path(run_dir) / FOLDER).glob("[0-9]*-*-*.jsonl") if term_of(path) < before_term]
    newest = sorted({term_of(path) for path in paths})[-num_terms:]
    worlds: dict[int, set[object]] = {term: set() for term in newest}
    for path in paths:
        if term_of(path) in worlds:
            form = next((line for line in _head_of(path) if line["op"] == "form"), {})
            worlds[term_of(path)].add(tuple(form.get(key) for key in ("pid", "host", "boot", "born")))
    return len(set().union(*worlds.values())) - max((len(world) for world in worlds.values()), default=0)


def _last_op(content: bytes) -> object:
    """Return the last operation of a history, ignoring torn lines and `_OF_COST`."""
    last = lines_of(b"\n".join(content.splitlines()[: -_MOST_LAST - 1 : -1]))
    return next((line["op"] for line in last if line["op"] not in _OF_COST), None)


def tail_of(path: Path, num_bytes: int = _TAIL_BYTES) -> bytes:
    """Return the end of a history."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def histories(run_dir: str | Path, rank: int) -> list[list[Path]]:
    """Return the parts of every history of a rank, oldest first, by term."""
    paths = sorted((Path(run_dir) / FOLDER).glob(f"[0-9]*-{rank:05d}-*.jsonl"))
    return [list(parts) for _, parts in itertools.groupby(paths, key=lambda path: path.name.partition(".")[0])]


def term_of(path: Path) -> int:
    """Return the term in a history's file name."""
    return int(path.name.partition("-")[0])


def host_in(run_dir: str | Path, term: int, rank: int) -> str | None:
    """Return the host of a rank in a term, if its history is in this folder; reads only its start."""
    for path in (Path(run_dir) / FOLDER).glob(f"{term:08d}-{rank:05d}-*.jsonl"):
        host = next((line["host"] for line in _head_of(path) if line["op"] == "form"), None)
        if host is not None:
            return str(host)
    return None


def restore_line(path: Path) -> dict[str, object] | None:
    """Return the line about how a process's state was restored; reads only the start of its file."""
    return next((line for line in _head_of(path) if line["op"] == "restore"), None)


def _head_of(path: Path) -> Iterator[dict[str, object]]:
    with path.open("rb") as file:
        return lines_of(file.read(_HEAD_BYTES))


def last_step_lines(path: Path) -> list[dict[str, object]]:
    """Return the step lines at the end of a history, at least one if it has any; reads only the end of its file."""
    size, num_bytes = path.stat().st_size, _TAIL_BYTES
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - num_bytes))
            content = file.read()
        # The first line may be cut by the read, and is then not JSON.
        steps = [line for line in lines_of(content) if line["op"] == "step"]
        if steps or num_bytes >= size:
            return steps
        num_bytes *= 4


def lines_of(content: bytes) -> Iterator[dict[str, object]]:
    """Yield the lines of a history, each with its `op`, skipping torn ones."""
    for line in content.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and "op" in fields:
            yield fields


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
            # A clock may have been set back meanwhile.
            trained_s += max([0.0, *(_time(last) - _time(first) for last in _last_steps(parts))])
    return Summary(max(summary.through, through), max(summary.pruned, pruned), num, trained_s)


def _restored(parts: list[Path]) -> dict[str, object] | None:
    return next((line for path in parts if (line := restore_line(path))), None)


def _last_steps(parts: list[Path]) -> Iterator[dict[str, object]]:
    return itertools.chain.from_iterable(last_step_lines(path) for path in parts[-2:])


def _time(line: dict[str, object]) -> float:
    """Return the unix second of a history's line."""
    return float(str(line["t"]))
