"""Turn a run's files into one finding per invariant, without importing anything from the trainer.

Modules of invariants: evidence is complete and files agree (`written`); applied steps and cells (`exactly_once`);
published commits (`one_lineage`); contents of commits and claims of the result (`deliverable`, `delivery`); the run as
a whole (`whole_run`); departures and admissions (`departures`); logged metrics (`tracked_values`); what outlived the
job (`leftovers`); resources of processes (`bounded`); ending without progress (`progress`); cost of one bad node to the
others (`no_harm`); shards lost too soon (`rollbacks`); blame by `status --why` (`causes`). `chaos.planted.catalogue`
names a planted bug for each invariant. `chaos.judge.invariants.script_run` judges runs of a user's script.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chaos.judge.delivery import claims, evaluated
from chaos.judge.evidence.run_files import Evidence, scenario_field
from chaos.judge.evidence.script_samples import is_script
from chaos.judge.findings import Finding, find, unless_broken
from chaos.judge.invariants import (
    bounded,
    causes,
    deliverable,
    departures,
    leftovers,
    no_harm,
    one_lineage,
    progress,
    rollbacks,
    tracked_values,
    whole_run,
)
from chaos.judge.invariants import script_run as scripts
from chaos.judge.invariants.exactly_once import agreement, compared, counts, samples
from chaos.judge.invariants.written import complete, order, records
from chaos.judge.job_shape import cell_size

INVARIANTS: dict[str, Callable[[Evidence], str]] = {
    "complete": complete.complete,
    "order": order.order,
    "finished": whole_run.finished,
    "faults": claims.faults,
    "deaths": departures.deaths,
    "agreement": agreement.agreement,
    "partition": agreement.partition,
    "coverage": samples.coverage,
    "lineage": one_lineage.lineage,
    "fencing": one_lineage.fencing,
    "durability": one_lineage.durability,
    "atomicity": one_lineage.atomicity,
    "heads": one_lineage.heads,
    "records": records.records,
    "rpo": whole_run.rpo,
    "rto": whole_run.rto,
    "liveness": whole_run.liveness,
    "progress": progress.progress,
    "cleanliness": leftovers.cleanliness,
    "validation": evaluated.validation,
}
WITHOUT_HISTORIES = ("cleanliness", "sums", "witness", "hash", "metrics", "validation")
"""Invariants that need no complete histories: they read results, commits and leftovers."""
COMPARED: dict[str, Callable[[Evidence, Evidence], str]] = {
    "job": compared.same_job,
    "hash": compared.same_weights,
    "weights": compared.same_weights_at_commits,
    "losses": compared.same_losses,
    "metrics": compared.same_metrics,
}


WITH_REFERENCE: dict[str, Callable[[Evidence, Evidence | None], str]] = {
    "sums": samples.sums,
    "claims": claims.claims,
    "deliverable": deliverable.deliverable,
}
IF_TESTED: dict[str, tuple[Callable[[Evidence], bool], Callable[[Evidence], str]]] = {
    "cells": (lambda run: unless_broken(lambda: cell_size(run.config) > 1, True), counts.cells),
    "copies": (lambda run: unless_broken(lambda: rollbacks.is_sharded(run), True), rollbacks.copies),
    "bounded": (bounded.is_put_to_the_test, bounded.bounded),
    "causes": (causes.is_put_to_the_test, causes.causes),
    "updates": (progress.is_without_updates, progress.updates),
    "unfit": (departures.is_any_unfit, departures.unfit),
    "no-harm": (no_harm.is_put_to_the_test, no_harm.no_harm),
    "tracking": (lambda run: run.metrics is not None, tracked_values.tracking),
    "witness": (lambda run: run.witness is not None or counts.trains_witness(run), counts.witness),
}
"""Invariants of some runs: a function that tells these runs, and the check."""
CHECKS: dict[str, Callable[..., str]] = {
    **INVARIANTS,
    **WITH_REFERENCE,
    **{name: check for name, (_, check) in IF_TESTED.items()},
    **COMPARED,
}


def judge(run: Evidence, reference: Evidence | None = None) -> list[Finding]:
    """Return the finding of every invariant; `reference` is the same job's run without faults, if there is one."""
    if is_script(run):
        return scripts.judge(run, reference)
    findings = _judge(run, reference)
    if run.pruned is None:
        return findings
    return [x if x.invariant in WITHOUT_HISTORIES else Finding(x.invariant, "unknown", run.pruned) for x in findings]


def _judge(run: Evidence, reference: Evidence | None) -> list[Finding]:
    findings = [find(name, partial(check, run)) for name, check in INVARIANTS.items()]
    findings += [find(name, partial(check, run, reference)) for name, check in WITH_REFERENCE.items()]
    findings += [find(name, partial(check, run)) for name, (is_tested, check) in IF_TESTED.items() if is_tested(run)]
    if reference is not None:
        findings += [find(name, partial(check, run, reference)) for name, check in COMPARED.items()]
    elif scenario_field(run, "reference"):
        findings += [Finding(name, "unknown", "the run without faults is not there") for name in COMPARED]
    return findings
