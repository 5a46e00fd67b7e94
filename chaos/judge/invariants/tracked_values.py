"""Invariant of tracking: one value per metric and step, namely that of the step in the lineage.

A term's file says what it measured; its values count for steps of the lineage that the same terms applied. The executor
recorded the tracker's final content (`tracked`), since the judge calls no service.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from chaos.judge.evidence.applied import branch_of, lineage_of, restored_at
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    number,
    part,
    whole,
)
from chaos.judge.findings import Unknown, Violated

_MEASURED = ("train/", "validation/")
"""Metrics with one value per step; others, such as saves, may be logged several times at one step."""
_LOSS = "train/loss"
_BEST = "best/"
"""Prefix of a metric's best value so far."""

Values = dict[tuple[str, int], float]
Logged = defaultdict[tuple[str, int], set[float]]


def tracking(run: Evidence) -> str:
    """Every metric has one value per step, that of the lineage, in the run's files and in the tracker."""
    kept = kept_values(run)
    if not kept:
        raise Unknown("no metric was logged")
    losses = {applied.step: applied.lines[0]["loss"] for applied in lineage_of(run) if applied.lines}
    num_compared = 0
    for (name, step), value in kept.items():
        if name == _LOSS and step in losses and math.isfinite(value):
            num_compared += 1
            if value != losses[step]:
                raise Violated(f"step {step}: {name} was logged as {value}, the step's loss was {losses[step]}")
    summary = (
        f"{len(kept)} values of {len({name for name, _ in kept})} metrics, {num_compared} losses are those applied"
    )
    if _tracker_of(run) is None and run.tracked:
        raise Violated("tracked.json holds values, and the configuration names no tracker")
    if _tracker_of(run) is None:
        return f"{summary}; the run has no tracker"
    if run.tracked is None:
        raise Unknown("the tracker was not asked what it holds")
    return f"{summary}; the tracker holds {_check_tracked(run, run.tracked, kept)}, once each"


def kept_values(run: Evidence) -> Values:
    """Return the values that count, over all terms' files: those written while a term's branch was the lineage's."""
    kept: Values = {}
    for term, lines in sorted((run.metrics or {}).items()):
        last, own = _last_kept(run, term), dict[tuple[str, int], float]()
        for line in lines:
            for name, value in part(line, "values").items() if "values" in line else ():
                place = (name, whole(line, "step"))
                measured = number({name: value}, name)
                if name.startswith(_MEASURED) and not _same(own.get(place, measured), measured):
                    twice = f"{name} of step {place[1]} as {own[place]} and as {measured}"
                    raise Violated(f"term {term} logged {twice}")
                own[place] = measured
        kept |= {place: value for place, value in own.items() if place[1] <= last}
    return kept


def _last_kept(run: Evidence, term: int) -> float:
    """Return the last step up to which a term's values count; negative if none do.

    A term may also log its initial step: it validates what an earlier term did not get to.
    """
    lineage = lineage_of(run)
    own = max((applied.step for applied in lineage if applied.term == term), default=None)
    if own is not None or term not in restored_at(run):
        return -1 if own is None else own
    begun = whole(restored_at(run)[term], "step")
    branch = [one for one, lo, hi in branch_of(run, term, begun) for _ in range(lo, hi)]
    return begun if branch == [applied.term for applied in lineage[:begun]] else -1


def _tracker_of(run: Evidence) -> object:
    tracking = run.config.get("tracking")
    return tracking.get("mlflow_uri") if isinstance(tracking, dict) else None


def _check_tracked(run: Evidence, tracked: Line, kept: Values) -> str:
    """Check the tracker's values against the files; return their number in words.

    A tracker keeps everything: for steps settled by a commit that was then found damaged it keeps what it was sent, and
    is not sent their recomputed values.
    """
    num_values, again, logged = 0, _settled_in_vain(run), _logged(run)
    for name, points in tracked.items():
        assert isinstance(points, list), "the executor writes lists"
        often = Counter(step for step, _ in points)
        for step, value in points:
            num_values += 1
            if often[step] > 1:
                raise Violated(f"the tracker holds {often[step]} values of {name} at step {step}")
            if not any(_same(value, each) for each in _sources_of(name, step, logged)):
                raise Violated(f"the tracker holds {value} as {name} of step {step}, which no term has logged")
            if not name.startswith(_MEASURED) or step in again:
                continue
            if (name, step) not in kept:
                raise Violated(f"the tracker holds {name} of step {step}, which no term that was kept has logged")
            if not _same(kept[name, step], value):
                raise Violated(f"the tracker holds {value} as {name} of step {step}, logged was {kept[name, step]}")
    held = {(name, step) for name, points in tracked.items() if isinstance(points, list) for step, _ in points}
    owed = {(name, step) for name, step in kept if name.startswith(_MEASURED) and step not in again}
    owed -= _logged_late(run)
    missing = len(owed - held)
    if missing:
        raise Unknown(f"{missing} values did not reach the tracker: `elastic-train sync` sends them")
    return f"{num_values} values"


def _sources_of(name: str, step: int, logged: Logged) -> set[float]:
    """Return the possible values of a tracked point: as logged, or the best logged by then."""
    if not name.startswith(_BEST):
        return logged[name, step]
    own = name.removeprefix(_BEST)
    return {value for (other, at), values in logged.items() if other == own and at <= step for value in values}


def _logged(run: Evidence) -> Logged:
    """Return all values that any term logged for each metric and step."""
    logged = Logged(set)
    for lines in (run.metrics or {}).values():
        for line in lines:
            for name, value in part(line, "values").items() if "values" in line else ():
                logged[name, whole(line, "step")].add(number({name: value}, name))
    return logged


def _logged_late(run: Evidence) -> set[tuple[str, int]]:
    """Return points that a term logged after a newer one had begun: by a leader that was stopped meanwhile.

    The tracker may have later steps by then, and a sender skips everything below those.
    """
    late, began = set[tuple[str, int]](), math.inf
    for _, lines in sorted((run.metrics or {}).items(), reverse=True):
        late |= {
            (name, whole(x, "step"))
            for x in lines
            if "values" in x and number(x, "t") > began
            for name in part(x, "values")
        }
        began = min([began, *(number(line, "t") for line in lines[:1])])
    return late


def _settled_in_vain(run: Evidence) -> set[int]:
    """Return the steps of commits passed over as damaged: they are computed again."""
    steps = set[int]()
    for line in run.of("restore"):
        passed = [str(item[0]) for item in items(line, "skipped") if isinstance(item, list)]
        furthest = max((int(key.rpartition("-")[2].partition(".")[0]) for key in passed), default=0)
        steps.update(range(whole(line, "step") + 1, furthest + 1))
    return steps


def _same(value: float, other: float) -> bool:
    """Compare logged values; trackers store infinities differently."""
    return value == other or (not math.isfinite(value) and not math.isfinite(other))
