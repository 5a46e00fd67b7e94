"""Edit the files of a recorded run: history lines, result, commit records.

Edits of a record are made consistent (`forge` recomputes digests along the chain), so that the judge finds the damage
itself and not a wrong digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from chaos.judge.evidence.applied import restored_at
from chaos.judge.evidence.run_files import Evidence, Line, record_files, seal_of

Change = Callable[[Line], Line | None]


def edit(folder: Path, change: Change) -> None:
    """Rewrite every line of every history; lines changed to None are dropped."""
    for path in sorted((folder / "history").glob("*.jsonl")):
        lines = [change(json.loads(text)) for text in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def edit_result(folder: Path, **fields: object) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


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
