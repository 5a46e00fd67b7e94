"""The verdict: findings and costs of faults, as verdict.json and a short table.

Computed from files alone, so `elastic-chaos check` can repeat it long after the run.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from chaos.errors import ChaosError
from chaos.judge.checker import judge
from chaos.judge.evidence.copies import copies_of, layout_of, parallel_of
from chaos.judge.evidence.holes import coverage_counts
from chaos.judge.evidence.recovery_cost import Recovery, fault_kind, recoveries
from chaos.judge.evidence.run_files import Evidence, Line, collect, items, part, scenario_field, whole
from chaos.judge.evidence.script_samples import counts_of, is_script
from chaos.judge.findings import Finding, unless_broken

MOST_COSTS = 30
"""Most recoveries that are shown individually."""
FAULTED, REFERENCE, VERDICT, REPORT = "faulted", "reference", "verdict.json", "report.html"


@dataclass(frozen=True)
class Verdict:
    """All findings on a run with their evidence; `fields` is the content of verdict.json."""

    run: Evidence
    reference: Evidence | None
    findings: list[Finding]
    recoveries: list[Recovery]
    fields: dict[str, object]

    @property
    def is_valid(self) -> bool:
        return all(finding.truth == "true" for finding in self.findings)


def examine(folder: Path) -> Verdict:
    """Judge the run in <folder>/faulted, against <folder>/reference if it exists, and write verdict.json.

    An unfinished run is judged up to its newest commit. Raise ChaosError if there is no run.
    """
    if not (folder / FAULTED / "history").is_dir():
        raise ChaosError(f"{folder}: no {FAULTED}/history there; give the folder of an `elastic-chaos run`")
    read = collect(folder / FAULTED)
    run = unless_broken(lambda: so_far(read), read)
    reference = collect(folder / REFERENCE) if (folder / REFERENCE / "history").is_dir() else None
    verdict = weigh(run, reference)
    (folder / VERDICT).write_text(json.dumps(verdict.fields, indent=2) + "\n")
    return verdict


def weigh(run: Evidence, reference: Evidence | None) -> Verdict:
    """Judge evidence from any source."""
    findings, costs = judge(run, reference), _costs(run)
    return Verdict(run, reference, findings, costs, _fields(run, reference, findings, costs))


def _fields(
    run: Evidence, reference: Evidence | None, findings: list[Finding], costs: list[Recovery]
) -> dict[str, object]:
    result, expected = run.result or {}, (reference.result if reference else None) or {}
    metrics, expected_metrics = _metrics(result), _metrics(expected)
    return {
        "valid": all(finding.truth == "true" for finding in findings),
        "weights_sha256": result.get("weights_sha256"),
        "reference_weights_sha256": expected.get("weights_sha256"),
        "coverage": _coverage(run, result),
        "holes": result.get("holes", []),
        "rpo_steps": max((cost.rpo_steps for cost in costs), default=None),
        "rto_s": max((round(cost.rto_s, 3) for cost in costs), default=None),
        "rpo_distribution": _distribution([float(cost.rpo_steps) for cost in costs]),
        "rto_distribution": _distribution([cost.rto_s for cost in costs]),
        "faults_by_kind": dict(sorted(Counter(fault_kind(fault) for fault in _lines(run, "fault")).items())),
        "missed_by_kind": dict(sorted(Counter(fault_kind(fault) for fault in _lines(run, "missed")).items())),
        "effects": [line.get("proof") for line in _lines(run, "effect")],
        "faults": [{key: value for key, value in fault.items() if key != "op"} for fault in _lines(run, "fault")],
        "recoveries": [asdict(cost) for cost in costs],
        "validation": {
            "macro_f1": metrics.get("macro_f1"),
            "reference_macro_f1": expected_metrics.get("macro_f1"),
            "loss": metrics.get("loss"),
            "reference_loss": expected_metrics.get("loss"),
        },
        "mlflow_run_id": result.get("mlflow_run_id"),
        "reference_mlflow_run_id": expected.get("mlflow_run_id"),
        "shards": parallel_of(run).get("shards", "none"),
        "copies": unless_broken(lambda: copies_of(run), None),
        "seed": scenario_field(run, "seed"),
        "scenario": scenario_field(run, "name"),
        "replay": _replay(run),
        "invariants": [asdict(finding) for finding in findings],
    }


def _distribution(values: list[float]) -> dict[str, float] | None:
    """Return observed quantiles, by nearest rank; None without values."""
    ranked = sorted(values)
    quantiles = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    at = {name: ranked[math.ceil(part * len(ranked)) - 1] for name, part in quantiles.items()} if ranked else None
    return at and {"count": len(ranked), "min": ranked[0], **{name: round(value, 3) for name, value in at.items()}}


def _lines(run: Evidence, op: str) -> list[Line]:
    """Return an operation's lines as written, including those without a time."""
    return [line for process in run.processes for line in process if line["op"] == op]


def _replay(run: Evidence) -> str | None:
    """Return the command that injects the same faults at the same steps."""
    if scenario_field(run, "replay"):
        return str(scenario_field(run, "replay"))
    name = scenario_field(run, "name")
    return f"elastic-chaos run {name} --seed {scenario_field(run, 'seed')}" if name else None


def _coverage(run: Evidence, result: Line) -> dict[str, int | None]:
    def counted() -> dict[str, int | None]:
        least, most = _script_counts(run) if is_script(run) else coverage_counts(run)
        return {"min": least, "max": most, "samples": whole(result, "num_samples")}

    return unless_broken(counted, {"min": None, "max": None, "samples": None})


def _script_counts(run: Evidence) -> tuple[int, int]:
    counts = counts_of(run).values()
    return min(int(times.min()) for times in counts), max(int(times.max()) for times in counts)


def _costs(run: Evidence) -> list[Recovery]:
    """Return the costs of faults; empty where the histories lack them, which `rpo` and `rto` report."""
    return unless_broken(lambda: recoveries(run), [])


def _metrics(result: Line) -> Line:
    metrics = result.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def render(verdict: Verdict) -> Lines:
    """Return the verdict as readable tables."""
    findings = Table("invariant", "verdict", "because", title=None, header_style="bold")
    colours = {"true": "green", "false": "bold red", "unknown": "yellow"}
    for finding in verdict.findings:
        findings.add_row(finding.invariant, Text(finding.truth, style=colours[finding.truth]), Text(finding.why))
    costs = Table("fault", "term", "steps lost", "seconds to next step", "detect", "form", "restore", "warm")
    for cost in verdict.recoveries[:MOST_COSTS]:
        parts = (cost.detect_s, cost.form_s, cost.restore_s, cost.warm_s)
        shown = ["-" if part is None else f"{part:.2f}" for part in parts]
        what = cost.kind if cost.node is None else f"{cost.kind} {cost.node}"
        costs.add_row(what, str(cost.term), str(cost.rpo_steps), f"{cost.rto_s:.2f}", *shown)
    fields = verdict.fields
    distributions = [
        f"{what.upper()}, {unit}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        for what, unit in (("rto", "seconds to the next step"), ("rpo", "steps lost"))
        if isinstance(found := fields[f"{what}_distribution"], dict)
    ]
    rows = Table("", "with faults", "without", header_style="bold")
    rows.add_row("weights sha256", str(fields["weights_sha256"])[:24], str(fields["reference_weights_sha256"])[:24])
    validation = fields["validation"]
    assert isinstance(validation, dict), "made above"
    for name in ("macro_f1", "loss"):
        rows.add_row(f"validation {name}", _shown(validation[name]), _shown(validation[f"reference_{name}"]))
    rows.add_row("MLflow run", str(fields["mlflow_run_id"]), str(fields["reference_mlflow_run_id"]))
    coverage = fields["coverage"]
    assert isinstance(coverage, dict), "made above"
    rest = [] if is_script(verdict.run) else [rows]  # a script logs no weights
    times = f"each of {coverage['samples']} samples counted {coverage['min']} to {coverage['max']} times an epoch"
    times = times if coverage["min"] is not None else "how often samples counted is not known"
    if fields["holes"]:
        times += (
            f"; could not be read, and are left out: {unless_broken(lambda: _listed(fields), str(fields['holes']))}"
        )
    outcome = Text("VALID", style="bold green") if verdict.is_valid else Text("NOT VALID", style="bold red")
    state = [] if is_script(verdict.run) else [Text(f"trained with {layout_of(verdict.run)}")]
    return Lines(findings, costs, Text("\n".join(distributions)), *rest, *state, Text(times), outcome)


def _listed(fields: Line) -> str:
    holes = (hole for hole in items(fields, "holes") if isinstance(hole, dict))
    return ", ".join(f"[{hole['lo']}, {hole['hi']}) from step {hole['since']} on" for hole in holes)


def _shown(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else "-"


def so_far(run: Evidence) -> Evidence:
    """Return the evidence up to the newest commit, with a result of status `running`; unchanged without a commit.

    Later steps are left out: they may still be discarded, or ranks not be done with them.
    """
    whole_commits = [commit for commit in run.commits if commit.fields is not None]
    formed = [whole(line, "term") for line in run.of("form")]
    is_over = run.has("clean") and not run.has("stuck")  # ended nodes are recorded in any case
    if run.result is not None or is_over or not whole_commits or not formed:
        return run
    newest = max(whole_commits, key=lambda commit: commit.key).fields
    assert newest is not None, "only whole ones were taken"
    until = whole(newest, "step")
    result: Line = {
        "status": "stuck" if run.has("stuck") else "running",
        "step": until,
        "term": max(formed),
        "num_samples": run.rows,
        "coverage": newest["coverage"],
    }
    if run.sizes:
        result["sources"] = _sources_of(newest)
    kept = [[line for line in process if not _is_behind(line, until)] for process in run.processes]
    return replace(run, processes=kept, result=result)


def _sources_of(commit: Line) -> list[Line]:
    """Return a mixture's sources from a commit, as in a result but without the number of passes."""
    sources = (line for line in items(commit, "sources") if isinstance(line, dict))
    return [{**source, "applied": whole(part(source, "coverage"), "count")} for source in sources]


def _is_behind(line: Line, until: int) -> bool:
    return line["op"] in ("step", "end") and whole(line, "step") >= until + (line["op"] == "step")
