"""What became of every seed, one JSON line each, so that a long run can be ended at any time and gone on with.

A line that was cut off by the end of its process is left out and its seed run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos.sim.simulate import Outcome


@dataclass(frozen=True, slots=True)
class Entry:
    """What a long run keeps of one seed."""

    seed: int
    digest: str
    virtual_s: float
    faults: Mapping[str, int]
    unknown: tuple[str, ...]
    violated: tuple[str, ...]


def entry_of(outcome: Outcome) -> Entry:
    """Return what is kept of an outcome."""
    return Entry(
        seed=outcome.case.seed,
        digest=outcome.digest,
        virtual_s=round(outcome.virtual_s, 3),
        faults=dict(outcome.num_faults),
        unknown=tuple(finding.invariant for finding in outcome.findings if finding.truth == "unknown"),
        violated=tuple(finding.invariant for finding in outcome.violations),
    )


class Ledger:
    """A file of entries, in the order of seeds."""

    def __init__(self, path: Path) -> None:
        """Open a file, made if there is none; what it holds is in `entries`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        self.entries = [_entry(line) for line in whole.splitlines()]
        self._file = path.open("r+" if text else "w")
        self._file.truncate(len(whole.encode()))
        self._file.seek(0, 2)

    def add(self, entry: Entry) -> None:
        line = {name: getattr(entry, name) for name in Entry.__dataclass_fields__}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _entry(line: str) -> Entry:
    fields = json.loads(line)
    return Entry(**{**fields, "unknown": tuple(fields["unknown"]), "violated": tuple(fields["violated"])})
