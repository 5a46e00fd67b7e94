"""Render the report on runs as one self-contained HTML page; a pure function of the reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_train.drawing.page import Drawn, Fact, draw, fill
from elastic_train.runs import tables
from elastic_train.runs.figures import (
    LOSS,
    compute_figure,
    curve_figure,
    goodput_figure,
    mfu_figure,
    phases_figure,
    saves_figure,
    throughput_figure,
)
from elastic_train.runs.goodput import MEANINGS
from elastic_train.runs.report import RunReport

_TEMPLATE = Path(__file__).parent / "page.html.j2"
_FIRST = (LOSS, "train/gradient_norm", "train/learning_rate")


def render(reports: Sequence[RunReport]) -> str:
    """Return the page for one run, or for several side by side."""
    names = [report.name for report in reports]
    return fill(
        _TEMPLATE,
        {
            "title": names[0] if len(names) == 1 else f"{len(names)} runs",
            "headlines": _headlines(reports[0]) if len(reports) == 1 else [],
            "names": names,
            "notes": [(report.name, note) for report in reports for note in report.notes],
            "summary_head": ("", *names),
            "summary": tables.summary(reports),
            "curves": list(_curves(reports)),
            "classes": [(report.name, rows) for report in reports if (rows := tables.classes(report))],
            "class_head": tables.CLASS_HEAD,
            "throughput": draw(lambda: throughput_figure(reports)),
            "mfu": draw(lambda: mfu_figure(reports)) if any(report.mfu is not None for report in reports) else None,
            "goodput": draw(lambda: goodput_figure(reports)),
            "kinds": list(MEANINGS.items()),
            "spent_head": ("", *names),
            "spent": [*tables.spent(reports), *tables.phases(reports)],
            "changes": [(report.name, tables.changes(report)) for report in reports],
            "change_head": tables.CHANGE_HEAD,
            "heat_maps": [_heat_maps(report) for report in reports],
            "memories": [(report.name, *tables.memory(report)) for report in reports],
            "events": [(report.name, tables.events(report)) for report in reports],
            "event_head": tables.EVENT_HEAD,
            "coverages": [(report.name, report.coverage) for report in reports],
            "saves": draw(lambda: saves_figure(reports)),
            "layout_head": ("", *names),
            "layout": tables.layout(reports),
        },
    )


def _curves(reports: Sequence[RunReport]) -> Iterator[tuple[str, Drawn]]:
    """Draw loss, norm, learning rate and the validation metrics."""
    known = {name for report in reports for name in report.curves}
    validated = sorted(name for name in known if tables.is_plain(name) and name != "validation/samples")
    for metric in [LOSS, *(name for name in _FIRST[1:] if name in known), *validated]:
        yield metric, draw(lambda metric=metric: curve_figure(reports, metric))  # type: ignore[misc]


def _heat_maps(report: RunReport) -> tuple[str, Drawn, Drawn]:
    return report.name, draw(lambda: phases_figure(report.story)), draw(lambda: compute_figure(report.story))


def _headlines(report: RunReport) -> list[Fact]:
    losses = [change.rto_s for change in report.faults if change.rto_s is not None]
    given_up = sum(len(world.given_up) for world in report.story.worlds)
    return [
        ("state", report.state, f"{report.step} steps that count"),
        ("goodput", tables.said(report.goodput, "{:.1%}"), "of the time went into steps that count"),
        ("samples/s", tables.said(report.samples_per_s, "{:.4g}"), "of the median step"),
        ("faults", str(len(report.faults)), f"{given_up} steps given up"),
        ("to the next step, at most", tables.said(max(losses, default=None), "{:.2f} s"), "after a fault"),
        ("worlds", str(len(report.story.worlds)), "sets of ranks that trained together"),
        ("saves", str(sum(len(world.saves) for world in report.story.worlds)), "commits that were published"),
        ("weights SHA-256", (report.weights_sha256 or tables.NONE)[:12], "equal bits, equal hash"),
    ]
