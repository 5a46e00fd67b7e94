"""Derive what was applied: the steps behind the final weights, and the count of each (epoch, lane, offset) in them.

A term applies steps from where it restored; the next term's restore discards later ones. The remaining steps are the
lineage. The shape of the job (lanes, micro-batch, rows) is computed from its configuration, so that a history cannot
state its own expectation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    lanes_of,
    number,
    once,
    part,
    periods,
    scenario_field,
    whole,
)
from chaos.judge.findings import Unknown, Violated
from chaos.judge.job_shape import Crews, MixedShape, Shape

_ROUNDED = 10_000
"""Sum of a mixture's integer shares if its weights had to be rounded."""
Counts = npt.NDArray[np.int32]
Steps = dict[tuple[int, int], list[Line]]


_OPEN = {"unsettled", "pending"}
"""Marks lines of a rank that did not know whether all others can apply the step, or any has."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One step of the lineage: the term that applied it, and every rank's line."""

    step: int
    term: int
    lines: tuple[Line, ...]


def result_of(run: Evidence) -> Line:
    """Return the run's result; raise Violated without one: the job did not finish."""
    if run.result is None:
        raise Violated("the job left no result.json: it did not finish")
    return run.result


def is_live(run: Evidence) -> bool:
    """Return True if survivors keep their processes across world changes."""
    return scenario_field(run, "recovery") == "live"


@once
def shape_of(run: Evidence) -> Shape:
    """Return the job's shape, from its configuration and its manifest's row count.

    A job that claims to be done must have applied all steps; for others, the claimed steps count.
    """
    batch, result = part(run.config, "batch"), result_of(run)
    if run.rows is None:
        raise Unknown(f"the training set's manifest is neither in {run.folder} nor where its configuration says")
    micro_batch = whole(batch, "micro_batch")
    numbers = (run.rows, whole(batch, "global_batch") // micro_batch, micro_batch, whole(result, "step"))
    shape = MixedShape(*numbers, run.sizes, shares_of(run)) if run.sizes else Shape(*numbers)
    return replace(shape, total_steps=_horizon(run, shape)) if result["status"] == "done" else shape


def _horizon(run: Evidence, shape: Shape) -> int:
    """Return how many steps the job must apply: set by the executor at a soak's end, or by the configuration.

    For early stopping it is the number applied; `claims` verifies that it had to stop there.
    """
    if ends := run.of("horizon"):
        return whole(ends[-1], "steps")
    if is_stopped_early(run):
        return whole(result_of(run), "step")
    if run.config.get("max_steps") is not None:
        return whole(run.config, "max_steps")
    return shape.steps_of(whole(run.config, "epochs"))


def validated_every(run: Evidence) -> int | None:
    """Return the interval of validations in steps; None for only at the end."""
    validation = part(run.config, "validation") if "validation" in run.config else {}
    every = periods(validation.get("every"))
    if "epochs" in every:
        return shape_of(run).steps_of(int(every["epochs"]))
    return int(every["steps"]) if "steps" in every else None


def is_stopped_early(run: Evidence) -> bool:
    """Return True if, by the result, enough validations in a row brought no improvement to stop training."""
    stopping = part(run.config, "validation").get("early_stopping") if "validation" in run.config else None
    improvement = result_of(run).get("improvement")
    if not isinstance(stopping, dict) or not isinstance(improvement, dict):
        return False
    return whole(improvement, "num_since") >= whole(stopping, "patience")


def shares_of(run: Evidence) -> tuple[int, ...]:
    """Return the integer shares of a mixture's sources in the result; raise Violated if they do not fit the weights."""
    sources = [line for line in items(part(run.config, "data"), "mixture") if isinstance(line, dict)]
    weights = [number(source, "weight") for source in sources]
    claims = [line for line in items(result_of(run), "sources") if isinstance(line, dict)]
    shares = tuple(whole(line, "share") for line in claims)
    exact = [sum(shares) * weight / sum(weights) for weight in weights]
    most = 1 + len(shares) if sum(shares) == _ROUNDED else 1e-6
    if len(shares) != len(exact) or any(abs(one - other) > most for one, other in zip(shares, exact, strict=True)):
        raise Violated(f"the result names the shares {shares} of sources with the weights {weights}")
    return shares


@once
def formed_at(run: Evidence) -> dict[int, float]:
    """Return when each term's world formed (its first rank's line), in order of time."""
    formed: dict[int, float] = {}
    for line in run.of("form"):
        formed.setdefault(whole(line, "term"), number(line, "t"))
    if not formed:
        raise Unknown("no world was formed")
    return formed


@once
def pids_of(run: Evidence) -> dict[int, set[int]]:
    pids: dict[int, set[int]] = {}
    for line in run.of("form"):
        pids.setdefault(whole(line, "term"), set()).add(whole(line, "pid"))
    return pids


@once
def restored_at(run: Evidence) -> dict[int, Line]:
    """Return each term's restore line, of its first rank."""
    restored: dict[int, Line] = {}
    for line in run.of("restore"):
        restored.setdefault(whole(line, "term"), line)
    return restored


@once
def steps_of(run: Evidence) -> Steps:
    """Return the lines of every applied (term, step), one per rank."""
    steps: Steps = defaultdict(list)
    for line in run.of("step"):
        steps[whole(line, "term"), whole(line, "step")].append(line)
    if not steps:
        raise Unknown("no step was recorded")
    return dict(steps)


def newest_steps(steps: Iterable[tuple[int, int]]) -> dict[int, int]:
    newest: dict[int, int] = {}
    for term, step in steps:
        newest[term] = max(step, newest.get(term, 0))
    return newest


@once
def furthest_of(run: Evidence) -> dict[int, int]:
    """Return the furthest applied step of each term, from the run's histories."""
    return newest_steps(steps_of(run))


@once
def settled_in(run: Evidence) -> dict[int, int]:
    """Return, per term, the furthest step that a rank applied knowing that all others could."""
    settled = (place for place, lines in steps_of(run).items() if any(not _OPEN & set(line) for line in lines))
    return newest_steps(settled)


@once
def lineage_of(run: Evidence) -> list[Applied]:
    """Return the steps behind the final weights: the last term's, and those that it continued."""
    steps, last = steps_of(run), max(restored_at(run), default=None)
    end, furthest = whole(result_of(run), "step"), max(furthest_of(run).values())
    if end > furthest:
        raise Violated(f"the result is of step {str(end)[:20]}, the furthest that a history has is {furthest}")
    branch = [] if last is None else branch_of(run, last, whole(result_of(run), "step"))
    if first := branch[0][1] if branch else whole(result_of(run), "step"):
        raise Violated(f"no term began before step {first}: the lineage does not reach back to step 0")
    return [
        Applied(step, term, tuple(steps.get((term, step), ())))
        for term, lo, hi in branch
        for step in range(lo + 1, hi + 1)
    ]


def branch_of(run: Evidence, term: int, until: int) -> list[tuple[int, int, int]]:
    """Return the terms that applied `term`'s branch up to step `until`: (term, lo, hi), oldest first, none empty."""
    return _walk(restored_at(run), went_on_from(run), term, until)


def _walk(
    restored: Mapping[int, Line], before: Mapping[int, int | None], term: int, until: int
) -> list[tuple[int, int, int]]:
    branch, at = list[tuple[int, int, int]](), term if term in restored else None
    while at is not None:
        lo = whole(restored[at], "step")
        if lo < until:
            branch.append((at, lo, until))
        until, at = min(until, lo), before[at]
    return branch[::-1]


@once
def went_on_from(run: Evidence) -> dict[int, int | None]:
    """Return, for each term, the term that it continued; None if there is none."""
    before: dict[int, int | None] = {}
    for term in sorted(restored_at(run)):
        before[term] = _continued_from(run, term, before)
    return before


def _continued_from(run: Evidence, term: int, before: Mapping[int, int | None]) -> int | None:
    """Return the term that applied the last step of a term's first state, which its restore records.

    If no process of that term left a record, as of a commit that a process made alone before its death, it is a term of
    that length: the one that commits name, or the last.
    """
    restored, newest = restored_at(run), furthest_of(run)
    step, applied_by = whole(restored[term], "step"), restored[term].get("applied_by")
    if isinstance(applied_by, int) and applied_by in before and whole(restored[applied_by], "step") < step:
        return applied_by
    came_so_far = [at for at in before if (lo := whole(restored[at], "step")) <= step <= newest.get(at, lo)]
    named = _named_by_commits(run, step)
    return named if named in came_so_far else max(came_so_far or before, default=None)


def _named_by_commits(run: Evidence, step: int) -> int | None:
    """Return the term that applied a step, by the newest commit that is left."""
    records = [commit for commit in run.commits if commit.fields is not None]
    fields = max(records, key=lambda commit: commit.key).fields if records else None
    for interval in items(fields, "intervals") if fields else ():
        assert isinstance(interval, dict), "a record's intervals are mappings"
        if interval["lo"] < step <= interval["hi"]:
            return int(interval["term"])
    return None


@once
def reached_by(run: Evidence) -> dict[tuple[int, int], int]:
    """Return the furthest step applied by each (term, pid); steps held as pending do not count."""
    pids = {(line["term"], line["rank"]): whole(line, "pid") for line in run.of("form")}
    reached: dict[tuple[int, int], int] = {}
    for line in run.of("step"):
        if (pid := pids.get((line["term"], line["rank"]))) is not None and "pending" not in line:
            place = whole(line, "term"), pid
            reached[place] = max(whole(line, "step"), reached.get(place, 0))
    return reached


@once
def counts_of(run: Evidence) -> dict[int, Counts]:
    """Count, for every epoch, how often each (offset, lane) is in the lineage; shape (offsets, lanes)."""
    shape, crews = shape_of(run), Crews.of(run.config)
    counts = {epoch: np.zeros((shape.offsets(epoch), shape.num_lanes), np.int32) for epoch in range(shape.num_epochs)}
    for applied in lineage_of(run):
        for line in _completed(_of_each_crew(applied.lines, crews), shape.num_lanes, crews):
            epoch, lo, hi = whole(line, "epoch"), whole(line, "lo"), whole(line, "hi")
            if epoch not in counts or not 0 <= lo < hi <= len(counts[epoch]):
                where = f"step {applied.step} of term {applied.term}"
                raise Violated(f"{where} applied offsets [{lo}, {hi}) of epoch {epoch}, which the job does not have")
            lanes = lanes_of(line)
            counts[epoch][lo:hi, lanes.start : lanes.stop : lanes.step] += 1
    return counts


def first_miscount(run: Evidence) -> str | None:
    """Return the first position that an epoch of the lineage does not hold exactly once; None if there is none."""
    for epoch, counts in counts_of(run).items():
        places = np.argwhere(counts != 1)
        if places.size:
            offset, lane = (int(place) for place in places[0])
            times = int(counts[offset, lane])
            return f"epoch {epoch}, lane {lane}, offset {offset} was applied {times} times ({len(places)} such places)"
    return None


def _of_each_crew(lines: tuple[Line, ...], crews: Crews) -> tuple[Line, ...]:
    """Return one line of a step per compute group, whose ranks computed the same lanes."""
    if crews.size == 1:
        return lines
    return tuple({crews.crew_of(whole(line, "rank")): line for line in reversed(lines)}.values())


def _completed(lines: tuple[Line, ...], num_lanes: int, crews: Crews) -> Iterator[Line]:
    """Yield a step's lines, plus one for lanes of replicas that died before writing theirs.

    A rank that has applied a step proves that the reduction over all lanes was complete.
    """
    yield from lines
    if not lines or whole(lines[0], "world") == crews.size * len(lines):
        return
    for lane in sorted(set(range(num_lanes)).difference(*map(lanes_of, lines))):
        yield {**lines[0], "lanes": [lane, lane + 1]}


def skipped_steps(claim: Line) -> set[int]:
    """Return the steps without an update in a result or commit, counted from 1."""
    ranges = items(claim, "skipped_steps") if "skipped_steps" in claim else []
    return {step + 1 for pair in ranges if isinstance(pair, list) for step in range(pair[0], pair[1])}


def num_not_applied(run: Evidence) -> int:
    """Count the samples of lineage steps whose update was skipped, by the result."""
    skipped = skipped_steps(result_of(run))
    return sum(whole(one.lines[0], "num_samples") for one in lineage_of(run) if one.step in skipped) if skipped else 0


def is_empty(applied: Applied) -> bool:
    """Return True if no sample of a step has a target, or all are in unreadable row groups: its loss is None."""
    return bool(applied.lines) and all(line["loss"] is None for line in applied.lines)


def is_finite(run: Evidence, applied: Applied) -> bool:
    """Return True if a step's loss and gradient were finite, by its ranks' records."""
    losses = [number(line, "loss") for line in applied.lines]
    said = [line for line in run.in_term("nonfinite", applied.term) if line["step"] == applied.step]
    return all(map(math.isfinite, (*losses, *(float(str(line[key])) for line in said for key in ("loss", "norm")))))
