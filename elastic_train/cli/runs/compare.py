"""`elastic-train compare`: how runs differ, or how runs of one job scale over their numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elastic_train.cli.output import Flag, Json, cell, print_json, print_table, print_text
from elastic_train.runs.compare import LETTERS, Comparison, difference
from elastic_train.runs.compare import compare as compare_runs
from elastic_train.runs.report import reports_on
from elastic_train.runs.scaling import Scaling
from elastic_train.runs.scaling import scaling as scaling_of
from elastic_train.system.wording import duration, size

_ALSO_FIGURES = ("time/", "commit/")
"""Metrics of the last steps and saves, of which the figures tell over the whole run."""


def compare(runs: list[str], /, *, scaling: Flag = False, json_: Json = False) -> int:
    """Compare runs: keys, metrics, speed, goodput, faults, weights.

    --scaling: of runs of one job on different numbers of ranks, speed-up, efficiency, share of communication, and what
    limits.
    """
    if scaling:
        return _scaling(runs, is_json=json_)
    comparison = compare_runs(*runs)
    if json_:
        return print_json(comparison.as_json())
    show(comparison)
    return 0


def show(comparison: Comparison) -> None:
    """Print a comparison: names, equality of the weights, and a table for each part."""
    letters = LETTERS[: len(comparison.runs)]
    for letter, run in zip(letters, comparison.runs, strict=True):
        print_text(f"{letter}: {run.name}")
    why = "versions with different hashes made the runs" if comparison.rules_differ() else "a run has no result"
    answer = {True: "the same bits", False: "different", None: f"unknown ({why})"}[comparison.same_weights()]
    print_text(f"weights: {answer}")
    if len({run.weights_sha256 for run in comparison.runs}) > 1:
        for letter, run in zip(letters, comparison.runs, strict=True):
            print_text(f"  {letter}: {cell(run.weights_sha256)}")
    if config := comparison.config():
        print_table(("key", *letters), _rows(config), "configuration, where it differs")
    else:
        print_text("configuration: no key differs")
    final = {name: each for name, each in comparison.metrics().items() if not name.startswith(_ALSO_FIGURES)}
    measured = {"final metrics": final, "time, throughput and faults": comparison.figures()}
    for title, figures in measured.items():
        if not figures:
            print_text(f"{title}: no run has any")
        elif len(letters) == 2:
            rows = {name: (*values, difference(values)) for name, values in figures.items()}
            print_table(("metric", *letters, "b - a"), _rows(rows), title)
        else:
            print_table(("metric", *letters), _rows(figures), title)


def _rows(values: Mapping[str, Sequence[object]]) -> Iterator[Sequence[object]]:
    for name, row in values.items():
        yield name, *(f"{value:.6g}" if isinstance(value, float) else value for value in row)


def _scaling(runs: Sequence[str], *, is_json: bool) -> int:
    found = scaling_of(reports_on(runs, with_coverage=False))
    if is_json:
        return print_json(found.as_json())
    _show(found)
    return 0


def _show(found: Scaling) -> None:
    rows = []
    for row in found.rows:
        point = row.point
        limit = "-" if row.limit is None else f"{row.limit} +{duration(row.excess_s[row.limit])}"
        shares = (f"{row.speedup:.2f}", f"{row.efficiency:.1%}", f"{point.communication_share:.1%}")
        values = (duration(point.step_s), f"{point.samples_per_s:.4g}", *shares, size(point.sent_bytes), limit)
        rows.append((Path(point.name).name, point.ranks, *values))
    head = ("run", "ranks", "step", "samples/s", "speed-up", "efficiency", "waits", "sent", "limit")
    print_table(head, rows)
    if (remedy := found.remedy()) is not None:
        print_text(f"what limits {found.rows[-1].point.ranks} ranks: {remedy}")
