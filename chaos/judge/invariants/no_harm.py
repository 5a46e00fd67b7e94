"""Invariant of isolation: one bad or joining node costs the rest of the job next to nothing.

`Kind.spares_others` marks these faults: a misconfigured node (another folder, an unreachable address, other limits, a
record in a newer format), or additional nodes. Faults that remove members or slow down shared services have other
bounds: `rto` and `liveness`.

The cost is the time in which the others took no step although they could: a step's excess over its usual time, if it
took at least `HELD_UP` times as long, or a world ended in it: repeated world changes add up. Usual is the median over
worlds of that size in the same run, so a world that is smaller, hence slower, without the node is not held up; nor is a
step that waits for a save. A world that ends loses the current step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from chaos.judge.evidence.applied import is_live
from chaos.judge.evidence.copies import copies_of
from chaos.judge.evidence.recovery_cost import fault_name, recoveries
from chaos.judge.evidence.run_files import Evidence, Line, number, once, part, periods, scenario_field, whole
from chaos.judge.evidence.spells import spell_end
from chaos.judge.findings import Unknown, Violated
from chaos.scenario.kinds import spares_others

WINDOW_S, MOST_PART = 120.0, 0.05
MOST_STEPS = 2
"""Extra steps that the end of a world may cost: one is dropped, one is at the window's edge."""
HELD_UP = 2.0
"""A step is held up if it takes this many times as long as usual; less is noise or a slow machine."""
LEAST = 3
_FOR_GOOD = ("kill_node", "stop_node")


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two steps of the job, by whoever applied each first, and its usual length."""

    since: float
    until: float
    usual_s: float
    is_of_one_world: bool = True

    def held_up_s(self, since: float, until: float) -> float:
        """Return for how many seconds of an interval the step was held up."""
        if self.is_of_one_world and self.until - self.since < HELD_UP * self.usual_s:
            return 0.0
        return max(0.0, min(until, self.until) - max(since, self.since) - self.usual_s)


@dataclass(frozen=True, slots=True)
class Window:
    """When only this fault could hold up the others: at most two minutes, until the next fault or the job's end."""

    fault: Line
    since: float
    until: float
    allowed_s: float


def no_harm(run: Evidence) -> str:
    """One bad or joining node costs the others at most 5 % of their steps over two minutes."""
    windows, worst_s = windows_of(run), 0.0
    if not windows:
        raise Unknown("no node was wrong, or joined, without another fault for some seconds")
    for window in windows:
        lost_s = _held_up_s(run, window.since, window.until)
        worst_s = max(worst_s, lost_s)
        if lost_s > window.allowed_s:
            raise Violated(
                f"{fault_name(window.fault)}: the others were held up for {lost_s:.1f} s of the "
                f"{window.until - window.since:.0f} s that followed; at most {window.allowed_s:.1f} s are allowed"
            )
    return f"{len(windows)} times a node was wrong or joined, at a price of at most {worst_s:.1f} s for the others"


def is_put_to_the_test(run: Evidence) -> bool:
    """Return True if there is anything to judge: most runs have no such fault, or others at the same time."""
    try:
        return bool(windows_of(run))
    except (KeyError, TypeError, ValueError):
        return False  # all other invariants find such evidence unknown


@once
def windows_of(run: Evidence) -> list[Window]:
    """Return the windows in which this can be judged: in live jobs, since a restart ends all processes anyway.

    If every shard has one holder, restarting any node loses the steps since the last commit.
    """
    faults = [fault for fault in run.of("fault") if spares_others(fault["kind"])]
    has_spare = scenario_field(run, "spare_nodes") != 0  # otherwise the others wait for the node, as configured
    if not faults or not has_spare or not is_live(run) or copies_of(run) == 1 or not _gaps(run):
        return []
    found = (_window(run, fault) for fault in faults)
    return [window for window in found if window.until - window.since > window.allowed_s]


def _window(run: Evidence, fault: Line) -> Window:
    at = number(fault, "t")
    others = [line for line in (*run.of("fault"), *run.of("undo")) if line is not fault and not _is_of(fault, line)]
    since = max((_excused_until(run, line) for line in others if number(line, "t") <= at), default=at)
    following = min((number(line, "t") for line in others if number(line, "t") > at), default=at + WINDOW_S)
    since, until = max(at, since), min(at + WINDOW_S, following, _end(run))
    step_s = max((gap.usual_s for gap in _between(run, since, until)), default=0.0)
    ordinary_s = _ordinary(run) * max(0.0, until - since)
    return Window(fault, since, until, MOST_PART * WINDOW_S + MOST_STEPS * step_s + ordinary_s)


def _is_of(fault: Line, line: Line) -> bool:
    """Return True if a line undoes a fault, possibly as one of several acts."""
    is_same_node = fault.get("node") is not None and line.get("node") == fault["node"]
    return line["op"] == "undo" and (line["kind"] == fault["kind"] or is_same_node)


def _excused_until(run: Evidence, line: Line) -> float:
    """Return until when another fault, or its undoing, may hold up the job.

    A node that is ended for good does so until the others continue.
    """
    if line["op"] == "fault" and line["kind"] in _FOR_GOOD and line.get("for_s") is None:
        return _recovered_at(run).get(id(line), spell_end(run, line))
    return spell_end(run, line)


@once
def _recovered_at(run: Evidence) -> dict[int, float]:
    return {id(run.of("fault")[cost.place]): cost.at + cost.rto_s for cost in recoveries(run)}


def _end(run: Evidence) -> float:
    """Return when the job was done, or when the last of its processes and nodes were seen."""
    if run.result is not None and run.result.get("status") == "done":
        return _gaps(run)[-1].until
    return max(number(line, "t") for op in ("step", "form", "exit", "clean") for line in run.of(op))


def _held_up_s(run: Evidence, since: float, until: float) -> float:
    last = _gaps(run)[-1]
    tail = Gap(last.until, max(until, last.until), last.usual_s)
    return sum(gap.held_up_s(since, until) for gap in (*_between(run, since, until), tail))


def _between(run: Evidence, since: float, until: float) -> list[Gap]:
    gaps = _gaps(run)
    first = bisect_right(gaps, since, key=lambda gap: gap.until)
    return gaps[first : bisect_left(gaps, until, key=lambda gap: gap.since)]


@once
def _ordinary(run: Evidence) -> float:
    """Return the share of time in which commits, validations or the machine hold up steps before the first fault."""
    first, began = number(run.of("fault")[0], "t"), _gaps(run)[0].since
    return _held_up_s(run, began, first) / (first - began) if first - began > MOST_PART * WINDOW_S else 0.0


@once
def _gaps(run: Evidence) -> list[Gap]:
    """Return the times between steps, each step counted where it was first applied."""
    applied = _applied(run)
    usual = _usual(run, applied)
    return [
        Gap(
            one.at,
            other.at,
            max(usual[_class(run, one, one)], usual[_class(run, one, other)]),
            one.term == other.term,
        )
        for one, other in pairwise(applied)
    ]


@dataclass(frozen=True, slots=True)
class Applied:
    """A step in the first world that applied it; `at` is when its last rank did."""

    at: float
    step: int
    term: int
    world: int


def _applied(run: Evidence) -> list[Applied]:
    """Return every step once, in order; a stopped rank may record a step long afterwards."""
    steps: dict[int, list[Line]] = {}
    for line in run.of("step"):
        found = steps.setdefault(whole(line, "step"), [])
        if not found or found[0]["term"] == line["term"]:
            found.append(line)
    applied, following = list[Applied](), math.inf
    for step in sorted(steps, reverse=True):
        lines = steps[step]
        at = min(following, number(lines[-1], "t"))
        applied.append(Applied(at, step, whole(lines[0], "term"), whole(lines[0], "world")))
        following = min(following, number(lines[0], "t"))
    return applied[::-1]


Class = tuple[int, bool]
"""Class of steps with similar times: world size, and whether a save of the previous step delays them."""


def _class(run: Evidence, before: Applied, step: Applied) -> Class:
    return step.world, before.term == step.term and before.step in _saved(run)


def _usual(run: Evidence, applied: list[Applied]) -> dict[Class, float]:
    """Return the usual time of each class of steps; rare world sizes are scaled by lanes per rank.

    Saves delay only some steps: one of them counts as held up if it took longer than all others.
    """
    taken: dict[Class, list[float]] = defaultdict(list)
    for one, other in pairwise(applied):
        if one.term == other.term:
            taken[_class(run, one, other)].append(other.at - one.at)
    batch = part(run.config, "batch")
    lanes = whole(batch, "global_batch") // whole(batch, "micro_batch")
    share = {step.world: -(-lanes // step.world) for step in applied}
    known = {size: median(times) for (size, is_saved), times in taken.items() if not is_saved and len(times) >= LEAST}
    lane_s = max((step_s / share[size] for size, step_s in known.items()), default=0.0)
    usual = {size: known.get(size, lane_s * share[size]) for size in share}
    second = {size: sorted(taken[size, True])[-2:][0] for size in share if taken[size, True]}
    return {
        **{(size, False): usual[size] for size in share},
        **{(size, True): max(usual[size], second.get(size, 0.0)) for size in share},
    }


@once
def _saved(run: Evidence) -> set[int]:
    """Return the steps at which a save began, by configuration or by commits."""
    saves = run.config.get("checkpoint")
    every = periods(saves.get("every")).get("steps") if isinstance(saves, dict) else None
    last = max((whole(line, "step") for line in run.of("step")), default=0)
    due = range(int(every), last + 1, int(every)) if every else ()
    return {*due, *(whole(line, "step") for line in run.of("commit"))}
