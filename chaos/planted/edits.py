"""Edit the files of a recorded run: history lines, result, commit records.

Edits of a record are made consistent (`forge` recomputes digests along the chain), so that the judge finds the damage
itself and not a wrong digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from chaos.judge.evidence.applied import restored_at
from chaos.judge.evidence.run_files import Evidence, Line, record_files, seal_of

Change = Callable[[Line], Line | None]
Damage = Callable[[Path], object]
"""Damage to the files in one run's folder."""


def rewrite(path: Path, change: Callable[[list[Line]], Iterable[Line | None]]) -> None:
    """Change a file of JSON lines; None is dropped."""
    lines = change([json.loads(text) for text in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def edit(folder: Path, change: Change) -> None:
    """Change every line of every history; lines changed to None are dropped."""
    for path in sorted((folder / "history").glob("*.jsonl")):
        rewrite(path, lambda lines: map(change, lines))


def append(folder: Path, line: Line) -> None:
    """Add a line to the histories, in a file of its own."""
    with (folder / "history" / "other.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def history_of(folder: Path, pattern: str = "[0-9]*", place: int = 0) -> Path:
    """Return the history at a place among the matching ones, the oldest term first."""
    return sorted((folder / "history").glob(f"{pattern}.jsonl"))[place]


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_result(folder: Path, **fields: object) -> None:
    edit_json(folder / "result.json", **fields)


def in_lines(op: str, /, **fields: object) -> Damage:
    """Return the damage of other fields in all lines of an operation."""
    return lambda folder: edit(folder, lambda line: {**line, **fields} if line["op"] == op else line)


def without(op: str) -> Damage:
    """Return the damage of histories without an operation."""
    return lambda folder: edit(folder, lambda line: None if line["op"] == op else line)


def in_result(**fields: object) -> Damage:
    return lambda folder: edit_result(folder, **fields)


def in_records(change: Change, *, seals: bool = True) -> Damage:
    return lambda folder: forge(folder, change, seals=seals)


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def forge(folder: Path, change: Change, *, seals: bool = True) -> None:
    """Change commit records, oldest first; recompute seals, digests and parents in records and histories."""
    renamed: dict[object, str] = {}
    for path in record_files(folder):
        before = path.read_bytes()
        record = change(json.loads(before))
        assert record is not None, "a record is changed, not dropped"
        record = {**record, "parent": renamed.get(record["parent"], record["parent"])}
        if seals and "seal" in record:
            record = {**record, "seal": seal_of(record)}
        path.write_text(json.dumps(record))
        renamed[hashlib.sha256(before).hexdigest()] = hashlib.sha256(path.read_bytes()).hexdigest()
    fields = ("digest", "parent")
    edit(folder, lambda line: {**line, **{key: renamed.get(line[key], line[key]) for key in fields if key in line}})


def later_term(run: Evidence) -> int:
    """Return the last term, which restored another term's commit."""
    return max(restored_at(run))
