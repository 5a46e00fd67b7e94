"""A report's tables as text, for terminal and page: one column per run, or one table per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from elastic_train.insight.phases import PARTS, REST, MemoryFacts
from elastic_train.runs.goodput import KINDS
from elastic_train.runs.report import RunReport
from elastic_train.system.wording import duration, durations, size, sizes

Rows = list[tuple[str, ...]]
VALIDATION = "validation/"
CLASS_HEAD = ("class", "precision", "recall", "f1")
NONE = "–"
CHANGE_HEAD = ("term", "cause", "at step", "ranks", "steps lost", "to the next step", "detect", "form", "restore")
EVENT_HEAD = ("event", "since step", "seen after", "whose", "measured", "usual")
MOST_EVENTS = 200
MOST_RANKS = 64
"""Number of ranks whose memory is shown, those with the most."""


def summary(reports: Sequence[RunReport]) -> Rows:
    shown: dict[str, Callable[[RunReport], str]] = {
        "state": lambda run: run.state,
        "steps that count": lambda run: str(run.step),
        "began": lambda run: _moment(run.story.began),
        "took": lambda run: duration(run.seconds) if run.seconds else NONE,
        "goodput": lambda run: said(run.goodput, "{:.1%}"),
        "samples/s, median step": lambda run: said(run.samples_per_s, "{:.4g}"),
        "samples/s, all of the time": lambda run: said(run.samples_per_s_in_all, "{:.4g}"),
        "MFU, median step": lambda run: said(run.mfu, "{:.1%}"),
        "HFU, median step": lambda run: said(run.hfu, "{:.1%}"),
        "a step": lambda run: NONE if run.step_s is None else duration(run.step_s),
        "memory of a rank, at most": lambda run: NONE if run.memory is None else size(run.memory.most),
        "faults": lambda run: str(len(run.faults)) if run.story.worlds else NONE,
        "steps lost to faults": lambda run: str(sum(change.steps_lost for change in run.faults)),
        "longest to the next step": lambda run: _longest(run),
        "weights SHA-256": lambda run: (run.weights_sha256 or NONE)[:16],
    }
    finals = sorted({name for run in reports for name in run.final_metrics() if _is_of_interest(name)})
    rows = [(name, *(show(run) for run in reports)) for name, show in shown.items()]
    metrics = [run.final_metrics() for run in reports]
    return rows + [(name, *(said(final.get(name), "{:.5g}") for final in metrics)) for name in finals]


def spent(reports: Sequence[RunReport]) -> Rows:
    columns = [
        [
            f"{time}, {run.spent[kind] / run.seconds:.1%}" if run.seconds else NONE
            for kind, time in zip(KINDS, durations([run.spent.get(kind, 0.0) for kind in KINDS]), strict=True)
        ]
        for run in reports
    ]
    return [*zip(KINDS, *columns, strict=True)]


def phases(reports: Sequence[RunReport]) -> Rows:
    """Return the mean milliseconds per step of each phase."""
    found = [run.phases_s() for run in reports]
    names = dict.fromkeys(name for phases in found for name in phases)
    return [(name, *(said(_scaled(phases.get(name)), "{:.2f} ms") for phases in found)) for name in names]


def changes(run: RunReport) -> Rows:
    times = [
        durations([getattr(change, name) for change in run.changes])
        for name in ("rto_s", "detect_s", "form_s", "restore_s")
    ]
    return [
        (
            str(change.term),
            change.cause,
            str(change.step),
            f"{change.size_before} → {change.size}",
            str(change.steps_lost),
            *of_change,
        )
        for change, *of_change in zip(run.changes, *times, strict=True)
    ]


def events(run: RunReport) -> Rows:
    found = [event for world in run.story.worlds for event in world.events if not event.is_over]
    return [
        (
            event.kind,
            str(event.since),
            str(event.step),
            "all ranks" if event.rank is None else f"rank {event.rank}{f' on {event.host}' if event.host else ''}",
            *(said(value, "{:.4g} " + event.unit).rstrip() for value in (event.value, event.usual)),
        )
        for event in found[-MOST_EVENTS:]
    ]


def memory(run: RunReport, most_ranks: int = MOST_RANKS) -> tuple[tuple[str, ...], Rows]:
    """Return header and rows of each rank's memory by component; no rows if unknown."""
    if run.memory is None:
        return (), []
    ranks, hosts = run.memory.ranks, run.hosts_in(run.memory.term)
    columns: dict[str, Callable[[MemoryFacts], int | None]] = {
        "peak": lambda facts: facts.peak,
        **{part: lambda facts, part=part: facts.parts.get(part, 0) for part in PARTS},  # type: ignore[misc]
        "program": lambda facts: facts.program,
        REST: lambda facts: facts.rest,
        "reserved": lambda facts: facts.reserved,
        "host": lambda facts: facts.host,
        "process": lambda facts: facts.host_peak,
    }
    shown = {
        name: read for name, read in columns.items() if run.planned.get(name) or any(read(one.facts) for one in ranks)
    }
    largest = sorted(sorted(ranks, key=lambda one: -one.facts.peak)[:most_ranks], key=lambda one: one.rank)
    planned = {**run.planned, "peak": run.planned.get("total"), REST: run.planned.get("activations")}
    names = [(f"rank {one.rank}", hosts.get(one.rank, NONE)) for one in largest]
    names += [("plan", NONE)] if run.planned else []
    columns_shown = [
        sizes([*(read(one.facts) or 0 for one in largest), *([planned.get(name)] if run.planned else [])])
        for name, read in shown.items()
    ]
    rows = [(*name, *amounts) for name, *amounts in zip(names, *columns_shown, strict=True)]
    return ("memory", "on", *shown), rows


def classes(run: RunReport) -> Rows:
    """Return the scores of each class in the last validation; no rows for a model without classes."""
    final = run.final_metrics()
    names = dict.fromkeys(name.split("/", 2)[2] for name in final if name.startswith(f"{VALIDATION}recall/"))
    return [
        (name, *(said(final.get(f"{VALIDATION}{score}/{name}"), "{:.4g}") for score in CLASS_HEAD[1:]))
        for name in names
    ]


def layout(reports: Sequence[RunReport]) -> Rows:
    found = [{**run.layout(), **run.environment()} for run in reports]
    names = dict.fromkeys(name for each in found for name in each)
    return [(name, *(each.get(name, NONE) for each in found)) for name in names]


def said(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _is_of_interest(metric: str) -> bool:
    return metric == "train/loss" or metric.startswith("best/") or is_plain(metric)


def is_plain(metric: str) -> bool:
    """Return True if a metric is a validation's and not that of a single class."""
    return metric.startswith(VALIDATION) and metric.count("/") == 1


def _longest(run: RunReport) -> str:
    prices = [change.rto_s for change in run.faults if change.rto_s is not None]
    return duration(max(prices)) if prices else NONE


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if unix_s else NONE
