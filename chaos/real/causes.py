"""Record the answers of `elastic-train status --why` after each fault, and at the end.

A job survives its faults. So for each fault that ends processes, histories are cut where the next world formed: that is
what a job ended by the fault would leave.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from chaos.judge.evidence.recovery_cost import recoveries
from chaos.judge.evidence.run_files import Evidence, Line, collect, number, parse_lines, whole
from chaos.scenario.kinds import advised
from elastic_train.cli.runs.status import status_of
from elastic_train.runs.stopped.cause import Cause, cause_of

_MOST_TERMS = 3
"""Newest terms whose histories are cut: finding a cause reads no more."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """A fault, the term that it ended, and when the next world formed and applied a step (unix seconds)."""

    fault: Line
    term: int
    formed_at: float
    stepped_at: float


def record_causes(folder: Path) -> None:
    """Append a `why` line for each fault that is alone until the next world trains, and for the job's end."""
    run = collect(folder)
    lines = [{"fault": moment.fault["number"], **_fields(_cause_then(folder, moment))} for moment in _moments(run)]
    if (cause := status_of(str(folder)).stopped) is not None:
        lines.append(_fields(cause))
    with (folder / "history" / "chaos.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"op": "why", "t": time.time(), **line}) + "\n")


def _fields(cause: Cause) -> dict[str, object]:
    return {"do": cause.do, "exit_code": cause.exit_code, "of_rank": cause.rank, "sentence": cause.sentence}


def _moments(run: Evidence) -> Iterator[_Moment]:
    """Yield the faults that end processes, between two steps, while no other fault is in effect."""
    faults, steps = run.of("fault"), [number(line, "t") for line in run.of("step")]
    forms = [(number(line, "t"), whole(line, "term")) for line in run.of("form") if not line.get("again")]
    over = {cost.place: cost.at + cost.rto_s for cost in recoveries(run)}
    spans = [
        (at := number(fault, "t"), max(at + float(str(fault.get("for_s") or 0.0)), over.get(place, at)))
        for place, fault in enumerate(faults)
    ]
    for place, until in over.items():
        fault, at = faults[place], spans[place][0]
        term = max((term for t, term in forms if t <= at), default=0)
        is_alone = all(end < at or begin > until for other, (begin, end) in enumerate(spans) if other != place)
        if is_alone and "number" in fault and advised(fault["kind"]) is not None and steps and steps[0] < at:
            yield _Moment(fault, term, min(t for t, new in forms if new > term), until)


def _cause_then(folder: Path, moment: _Moment) -> Cause:
    """Return why the run would have stopped if no world had formed after a fault."""
    with tempfile.TemporaryDirectory() as made:
        into = Path(made) / "history"
        into.mkdir()
        terms = set[str]()
        for path in sorted((folder / "history").glob("*.jsonl"), reverse=True):
            term, is_of_term = path.name.partition("-")[0], path.name[:1].isdigit()
            is_older = is_of_term and len(terms - {term}) >= _MOST_TERMS
            if path.name == "chaos.jsonl" or is_older or (is_of_term and int(term) > moment.term):
                continue
            until = moment.formed_at if is_of_term else moment.stepped_at
            lines = [line for line in parse_lines(path.read_bytes()) if number(line, "t") < until]
            if lines:
                (into / path.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
                terms |= {term} if is_of_term else set()
        return cause_of(made, now=inf, slurm=lambda _: None)
