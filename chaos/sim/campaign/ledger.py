"""Record each seed's outcome as one JSON line, so that a long campaign can be interrupted and continued.

A line names the options that drew the case and the commit that ran it, because its digest depends on both; a seed with
the same options need not run again. A line truncated by the end of its process is dropped and its seed run again.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.sim.campaign.simulate import Outcome

DIGITS = 16
"""Number of hexadecimal digits kept of a digest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The recorded outcome of one seed."""

    seed: int
    options: str
    code: str
    nodes: int
    digest: str
    virtual_s: float
    faults: Mapping[str, int]
    unknown: tuple[str, ...]
    violated: tuple[str, ...]


def entry_of(outcome: Outcome, options: str, code: str) -> Entry:
    """Return the ledger entry of an outcome."""
    return Entry(
        seed=outcome.case.seed,
        options=options,
        code=code,
        nodes=outcome.case.shape.nodes,
        digest=outcome.digest[:DIGITS],
        virtual_s=round(outcome.virtual_s, 3),
        faults=dict(outcome.num_faults),
        unknown=tuple(finding.invariant for finding in outcome.findings if finding.truth == "unknown"),
        violated=tuple(finding.invariant for finding in outcome.violations),
    )


def code_version() -> str:
    """Return the commit of this code, with a trailing + if it has local changes; "" without git."""
    described = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run([*described, "--exclude=*"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Ledger:
    """An append-only file of entries."""

    def __init__(self, path: Path) -> None:
        """Open the file, creating it if necessary, and read its entries into `entries`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        self.entries = [_entry(line) for line in whole.splitlines()]
        self._file = path.open("r+" if text else "w")
        self._file.truncate(len(whole.encode()))
        self._file.seek(0, 2)

    def add(self, entry: Entry) -> None:
        self._file.write(json.dumps(asdict(entry), separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _entry(line: str) -> Entry:
    fields = json.loads(line)
    return Entry(**{**fields, "unknown": tuple(fields["unknown"]), "violated": tuple(fields["violated"])})
