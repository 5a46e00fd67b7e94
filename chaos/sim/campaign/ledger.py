"""Record each seed's outcome as one JSON line, so that a long campaign can be interrupted and continued.

A line names the options that drew the case and the commit that ran it, because its digest depends on both; a seed with
the same options need not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos.ledger import Ledger
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


def open_ledger(path: Path) -> Ledger[Entry]:
    """Open the ledger of a campaign."""
    return Ledger(
        path, lambda line: Entry(**{**line, "unknown": tuple(line["unknown"]), "violated": tuple(line["violated"])})
    )
