"""Invariants of progress: every step updates the weights, and a process without progress ends with its own exit code.

A process may take part in many worlds that apply no step: they do not form, or break at once. After
the worlds and the time of `give_up_after` it must exit with 93, after which nobody restarts it. A job that exits so
without a reason is lost for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from chaos.judge.evidence.applied import is_empty, is_finite, lineage_of, result_of, skipped_steps
from chaos.judge.evidence.run_files import Evidence, number, once, periods, scenario_field, whole
from chaos.judge.findings import Unknown, Violated

NO_PROGRESS = 93
_WORLDS, _SECONDS = 20, 1800.0
"""Default limits."""


def progress(run: Evidence) -> str:
    """A process in too many worlds without a step exits with 93, and none exits so earlier."""
    if not run.has("form") and not run.has("unformed"):
        raise Unknown("no world was formed, and none was tried")
    limits = _limits(run)
    for pid, times in _vain(run):
        if limits is not None and (place := _is_enough(times, *limits)) is not None and place + 1 < len(times):
            raise Violated(
                f"process {pid} has been in {len(times)} worlds in a row without a step, for "
                f"{times[-1] - times[0]:.0f} s, and did not end with {NO_PROGRESS}"
            )
    for line in run.of("exit"):
        if line["code"] == NO_PROGRESS and not _has_reason(run, limits):
            raise Violated(f"node {line['node']} ended with {NO_PROGRESS}, but worlds had got on: at most {_most(run)}")
    return f"at most {_most(run)}"


def updates(run: Evidence) -> str:
    """Only steps without a target or a finite loss have no update; of the latter at most as many as faults caused."""
    skipped, given = skipped_steps(result_of(run)), sum(fault["kind"] == "nan_loss" for fault in run.of("fault"))
    told = {whole(line, "step") for line in run.of("nonfinite")}
    for applied in lineage_of(run):
        if is_empty(applied):
            skipped = skipped - {applied.step}
            continue
        is_skipped, is_sound = applied.step in skipped, is_finite(run, applied)
        if is_skipped and is_sound:
            raise Violated(f"step {applied.step} has no update, although its loss and its gradient were finite")
        if is_skipped and applied.step not in told:
            raise Violated(f"step {applied.step} has no update, and no history says which samples did that")
        if not is_skipped and not is_sound and not scenario_field(run, "nonfinite"):
            raise Violated(f"step {applied.step} was applied with a loss, or a gradient, that is not finite")
    if len(skipped) > given and not scenario_field(run, "nonfinite"):
        raise Violated(f"{len(skipped)} steps have no update, and {given} faults took a loss away")
    return f"{len(skipped)} of {whole(result_of(run), 'step')} steps without an update, whose losses were no numbers"


def is_without_updates(run: Evidence) -> bool:
    """Return True if `updates` can be judged: after a fault, or a loss or gradient that was not finite."""
    if (run.result or {}).get("skipped_steps") or run.has("nonfinite"):
        return True
    try:
        return any(fault["kind"] == "nan_loss" for fault in run.of("fault"))
    except (KeyError, TypeError):
        return False  # all other invariants find such evidence unknown


def _limits(run: Evidence) -> tuple[int, float] | None:
    """Return the worlds and seconds after which a process gives up; None for never."""
    patience = periods(run.config.get("give_up_after", f"{_WORLDS} worlds, {_SECONDS} s"))
    return (int(patience["worlds"]), patience.get("s", _SECONDS)) if "worlds" in patience else None


def _is_enough(times: Sequence[float], worlds: int, seconds: float) -> int | None:
    """Return the index of the first world at which both limits were reached; None if they were not.

    Only starts are known, not ends: the first world ended at the latest when the second began.
    """
    return next((n for n in range(max(1, worlds - 1), len(times)) if times[n] - times[1] >= seconds), None)


def _has_reason(run: Evidence, limits: tuple[int, float] | None) -> bool:
    """Return True if histories explain why processes gave up: repeated deaths at one step, or non-finite numbers."""
    if run.has("no_progress") or run.has("nonfinite"):
        return True
    return limits is not None and any(
        len(times) >= limits[0] - 1 and _ends_at(run) - times[0] >= limits[1] for _, times in _vain_at_last(run)
    )


def _ends_at(run: Evidence) -> float:
    return max(number(line, "t") for line in run.of("exit"))


def _most(run: Evidence) -> str:
    return f"{max((len(times) for _, times in _vain(run)), default=0)} worlds in a row without a step of a process"


@once
def _vain(run: Evidence) -> list[tuple[int, list[float]]]:
    """Return, per process, the start times of each run of consecutive worlds in which it applied no step."""
    return [(pid, row) for pid, events in _worlds_by_process(run).items() for row in _rows(events)]


@once
def _vain_at_last(run: Evidence) -> list[tuple[int, list[float]]]:
    """Return the same, counting only steps beyond those reached before: other processes may have caught up."""
    return [(pid, row) for pid, events in _worlds_by_process(run).items() for row in _rows(_further(events))]


@once
def _worlds_by_process(run: Evidence) -> dict[int, list[tuple[float, int]]]:
    """Return each process's world starts as (time, 0), and the first step applied in each as (time, step)."""
    pids = {(line["term"], line["rank"]): whole(line, "pid") for line in run.of("form")}
    events: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for op in ("form", "unformed"):
        for line in run.of(op):
            events[whole(line, "pid")].append((number(line, "t"), 0))
    seen = set[object]()
    for line in run.of("step"):
        place = (line["term"], line["rank"])
        if place not in seen and (pid := pids.get(place)) is not None:
            seen.add(place)
            events[pid].append((number(line, "t"), whole(line, "step")))
    return {pid: sorted(found) for pid, found in events.items()}


def _further(events: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    furthest = 0
    for at, step in events:
        if step == 0 or step > furthest:
            yield at, step
        furthest = max(step, furthest)


def _rows(events: Iterable[tuple[float, int]]) -> Iterator[list[float]]:
    """Yield the start times of consecutive worlds without a step."""
    row = list[float]()
    for at, step in events:
        if step:
            yield row[:-1]  # the last one applied the step
            row = []
        else:
            row.append(at)
    yield row
