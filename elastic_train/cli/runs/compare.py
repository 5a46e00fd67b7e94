"""`elastic-train compare`: how runs differ, or how runs of one job scale over their numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from elastic_train.cli.output import narrow_table, print_json, print_text
from elastic_train.errors import ConfigError
from elastic_train.runs.compare import compare as compare_runs
from elastic_train.runs.report import report_on
from elastic_train.runs.scaling import Scaling
from elastic_train.runs.scaling import scaling as scaling_of
from elastic_train.system.wording import duration, size


def compare(runs: Sequence[str], *, mlflow_uri: str | None, is_json: bool) -> int:
    """Print how runs differ."""
    comparison = compare_runs(*runs, mlflow_uri=mlflow_uri)
    if is_json:
        return print_text(comparison.to_json())
    Console(markup=False).print(comparison.render())
    return 0


def scaling(runs: Sequence[str], *, is_json: bool) -> int:
    """Print how runs scale."""
    reports, wrong = [], list[str]()
    for run in dict.fromkeys(runs):
        try:
            reports.append(report_on(run, with_coverage=False))
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise ConfigError(*wrong)
    found = scaling_of(reports)
    if is_json:
        return print_json(found.as_json())
    _show(found)
    return 0


def _show(found: Scaling) -> None:
    console = Console(markup=False)
    table = narrow_table("run", "ranks", "step", "samples/s", "speed-up", "efficiency", "waits", "sent", "limit")
    for row in found.rows:
        point = row.point
        limit = "-" if row.limit is None else f"{row.limit} +{duration(row.excess_s[row.limit])}"
        shares = (f"{row.speedup:.2f}", f"{row.efficiency:.1%}", f"{point.communication_share:.1%}")
        values = (duration(point.step_s), f"{point.samples_per_s:.4g}", *shares, size(point.sent_bytes), limit)
        table.add_row(Text(Path(point.name).name), str(point.ranks), *values)
    console.print(table)
    alpha = (
        "unknown (runs on two sizes above 1 tell it)"
        if found.alpha_s is None
        else f"{found.alpha_s * 1e6:.0f} µs a round"
    )
    beta = "unknown" if found.bytes_per_s is None else f"{size(found.bytes_per_s)}/s"
    print_text(f"exchanges, as fitted: alpha {alpha}, beta {beta}")
    if (remedy := found.remedy()) is not None:
        print_text(f"what limits {found.rows[-1].point.ranks} ranks: {remedy}")
