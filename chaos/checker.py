"""The judge: from a run's files to one finding an invariant, importing nothing from the trainer.

The invariants are functions in three rooms: what was applied (`exactly_once`), what was published (`one_lineage`), and
the run as a whole (`injected`). Here is the table of them; a planted bug is caught by the one named beside it in
`chaos.planted`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chaos import exactly_once, injected, one_lineage
from chaos.evidence import Evidence
from chaos.findings import Finding, find

INVARIANTS: dict[str, Callable[[Evidence], str]] = {
    "finished": injected.finished,
    "faults": injected.faults,
    "deaths": injected.deaths,
    "agreement": exactly_once.agreement,
    "partition": exactly_once.partition,
    "coverage": exactly_once.coverage,
    "lineage": one_lineage.lineage,
    "fencing": one_lineage.fencing,
    "durability": one_lineage.durability,
    "atomicity": one_lineage.atomicity,
    "rpo": injected.rpo,
    "rto": injected.rto,
    "cleanliness": injected.cleanliness,
}
COMPARED: dict[str, Callable[[Evidence, Evidence], str]] = {
    "hash": exactly_once.same_weights,
    "losses": exactly_once.same_losses,
    "metrics": exactly_once.same_metrics,
}


def judge(run: Evidence, reference: Evidence | None = None) -> list[Finding]:
    """Return every invariant's finding on a run, against the run of the same job without faults if there is one."""
    findings = [find(name, partial(check, run)) for name, check in INVARIANTS.items()]
    findings.append(find("sums", partial(exactly_once.sums, run, reference)))
    if run.witness is not None:
        findings.append(find("witness", partial(exactly_once.witness, run)))
    if reference is not None:
        findings += [find(name, partial(check, run, reference)) for name, check in COMPARED.items()]
    return findings
