"""Recompute every commit record from its step and the logged validations.

The oldest remaining record has no parent to compare with, so each is judged alone: position in the data, sums of
finished epochs, and early stopping state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from chaos.judge.evidence.applied import shape_of, validated_every
from chaos.judge.evidence.holes import holes_of
from chaos.judge.evidence.run_files import Evidence, Line, items, number, once, part, whole
from chaos.judge.findings import Violated
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.invariants.exactly_once.samples import sums_of_epochs
from chaos.judge.job_shape import MixedShape

METRICS = "validation/"


def check_place(run: Evidence, key: str, fields: Line) -> None:
    """Cursor and account of a record are those of its step."""
    shape, step = shape_of(run), whole(fields, "step")
    is_mixed = isinstance(shape, MixedShape)
    epoch, steps = (0, step) if is_mixed else divmod(step, shape.steps_per_epoch)
    due: object = {"epoch": epoch, "offset": steps * shape.micro_batch}
    if "cursor" in fields and differ(fields["cursor"], due):
        raise Violated(f"{key} says cursor {fields['cursor']}, after step {step} it is {due}")
    account = part(fields, "account") if "account" in fields else {}
    if "epochs" not in account:
        return
    holes, said = holes_of(account), items(account, "epochs")
    if len(said) != epoch:
        raise Violated(f"{key}: account.epochs has {len(said)} epochs, after step {step} {epoch} are finished")
    for times, sums in enumerate(said, 1):
        missing = sum(hi - lo for hole in holes for past in range(times) for lo, hi in hole.missing(past))
        sum_a, sum_b = sums_of_epochs(shape.rows, holes, times)
        expected = {"count": times * shape.rows - missing, "sum_a": sum_a, "sum_b": sum_b}
        if differ(sums, expected):
            raise Violated(f"{key}: account.epochs says {sums} after {times} epochs, it should be {expected}")


def check_improvement(run: Evidence, whose: str, fields: Line) -> bool:
    """Recompute `improvement` from logged validations and compare it; return False if they do not suffice."""
    validation = part(run.config, "validation") if "validation" in run.config else {}
    stopping, said = validation.get("early_stopping"), fields.get("improvement")
    if not isinstance(stopping, dict) and said is None:
        return False
    if not isinstance(stopping, dict):
        metric = part(run.config, "checkpoint").get("keep_best") if "checkpoint" in run.config else None
        if metric is None:
            raise Violated(f"{whose} says improvement {said}, and the job compares no validations")
        stopping = {"metric": metric}
    step, every = whole(fields, "step"), validated_every(run)
    own = said if isinstance(said, dict) else {"metric": stopping["metric"], "validated_at": 0}
    at = whole(own, "validated_at")
    past, may = _due(run, step - 1, every), _due(run, step, every)
    if at not in {past[-1] if past else 0, may[-1] if may else 0}:
        raise Violated(f"{whose} says that validations up to that of step {at} counted, {may[-1:]} was due last")
    logged = logged_validations(run)
    counted = [each for each in may if each <= at]
    mode, _, name = str(stopping["metric"]).partition(" ")
    if any(name not in logged.get(each, {}) for each in counted):
        return False  # its rank 0 died before logging it, or it was not finite
    least = number(stopping, "min_delta") if "min_delta" in stopping else 0.0
    best = _best([(each, float(str(logged[each][name]))) for each in counted], mode == "max", least)
    due = {"metric": stopping["metric"], "validated_at": at, **best}
    if differ({**due, **own}, due) or (said is None and counted):
        raise Violated(f"{whose} says improvement {said}, by the logged validations it is {due}")
    return True


def _best(values: Iterable[tuple[int, float]], is_higher_better: bool, min_delta: float) -> Line:
    best: float | None = None
    best_step = num_since = 0
    for step, value in values:
        gain = math.inf if best is None else value - best if is_higher_better else best - value
        if math.isfinite(value) and gain > 0.0 and gain >= min_delta:
            best, best_step, num_since = value, step, 0
        else:
            num_since += 1
    return {"best": best, "best_step": best_step, "num_since": num_since}


def _due(run: Evidence, until: int, every: object) -> list[int]:
    """Return the validation steps up to `until`: every `every` steps, and the job's last."""
    total = shape_of(run).total_steps
    due = {*range(every, until + 1, every)} if isinstance(every, int) else set[int]()
    return sorted(due | ({total} if total <= until else set()))


@once
def logged_validations(run: Evidence) -> dict[int, Line]:
    """Return the logged validation of each step; the newest term's if several logged one."""
    logged = dict[int, Line]()
    for _, own in sorted(_logged_by(run).items()):
        for step, values in own.items():
            logged[step] = {**logged.get(step, {}), **values}
    return logged


@once
def _logged_by(run: Evidence) -> dict[int, dict[int, Line]]:
    """Return the logged validations of each term, by step."""
    logged = dict[int, dict[int, Line]]()
    for term, lines in (run.metrics or {}).items():
        for line in lines:
            values = part(line, "values") if "values" in line else {}
            own = {name.removeprefix(METRICS): value for name, value in values.items() if name.startswith(METRICS)}
            if own:
                logged.setdefault(term, {}).setdefault(whole(line, "step"), {}).update(own)
    return logged


def check_metrics(run: Evidence, key: str, fields: Line) -> bool:
    """A record has the metrics of the newest validation before it; return True if that one was logged.

    Rank 0 may die with what it had not logged yet: the metrics may be those of a due validation that nobody logged.
    """
    claimed = {name: value for name, value in part(fields, "metrics").items() if value is not None}
    step, logged, carried = whole(fields, "step"), logged_validations(run), _carried(run, fields)
    if carried and not fields["metrics"]:
        raise Violated(f"{key} says no metrics, and its state went through the validation of step {carried}")
    if not claimed:
        return False
    every = validated_every(run)
    known = [values for at, values in logged.items() if carried <= at <= step]
    if any(all(name in each and not differ(each[name], claimed[name]) for name in claimed) for each in known):
        return True
    if any(at not in logged for at in _due(run, step, every) if at > carried):
        return False
    raise Violated(f"{key} says metrics {claimed}, which no validation up to its step has logged, from {carried} on")


def _carried(run: Evidence, fields: Line) -> int:
    """Return the last step whose validation was logged by a term that applied the next step on a record's branch."""
    found = 0
    for interval in items(fields, "intervals"):
        assert isinstance(interval, dict), "an interval is a mapping"
        lo, hi = whole(interval, "lo"), whole(interval, "hi")
        found = max([found, *(at for at in _logged_by(run).get(whole(interval, "term"), ()) if lo <= at < hi)])
    return found


def check_ranges(run: Evidence, key: str, fields: Line) -> None:
    """In a lineage record, skipped steps and steps with fast kernels equal the result's up to its step."""
    step, result = whole(fields, "step"), run.result or {}
    for name in ("skipped_steps", "fast_steps"):
        ours, theirs = (_steps_in(line.get(name), step) for line in (fields, result))
        if name in result and ours != theirs:
            raise Violated(f"{key} says {name} {fields.get(name)}, of which result.json says {result[name]}")


def _steps_in(ranges: object, until: int) -> list[tuple[int, int]]:
    """Return ranges of steps up to `until`, merged where they touch."""
    found = list[tuple[int, int]]()
    for lo, hi in sorted(ranges) if isinstance(ranges, list) else ():
        if lo < until:
            begin = found.pop()[0] if found and found[-1][1] >= lo else lo
            found.append((begin, min(hi, until)))
    return found
