"""Compute each fault's cost from the histories: recomputed steps, and seconds until the next applied step.

A fault that need not end a world (a short freeze, an etcd member, the end of a spare node) has a cost only if the next
world formed in its window and before any other act; otherwise the world rode it out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from chaos.judge.evidence.applied import (
    formed_at,
    furthest_of,
    pids_of,
    restored_at,
    steps_of,
)
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    number,
    once,
    whole,
)
from chaos.judge.evidence.spells import spell_end
from chaos.scenario.kinds import ends_processes, ends_world


@dataclass(frozen=True, slots=True)
class Recovery:
    """From one fault to the first step of the next world; times in seconds, None where a history lacks them.

    detect: until the next world was sealed, lease expiry included; form: until it formed, with processes and libraries
    started; restore: until the state was read; warm: until the first step was applied.
    """

    place: int
    """Index among all faults; two may have the same time."""
    kind: str
    node: int | None
    at: float
    term: int
    rpo_steps: int
    rto_s: float
    detect_s: float | None
    form_s: float | None
    restore_s: float
    warm_s: float


@dataclass(frozen=True, slots=True)
class _Records:
    """Terms whose first step came after all earlier first steps; a fault's next world is one of them."""

    terms: list[int]
    steps: list[Line]
    """First step of each term."""


@once
def recoveries(run: Evidence) -> list[Recovery]:
    """Return the recovery from every fault that a newer world's step followed; linear in the number of lines."""
    faults = run.of("fault")
    if not faults:
        return []
    records, lost, sealed = _records(run), _lost(run), sealed_at(run)
    formed = sorted((t, term) for term, t in formed_at(run).items())
    times, newest = [t for t, _ in formed], list(accumulate((term for _, term in formed), max))
    found = []
    for place, fault in enumerate(faults):
        at = number(fault, "t")
        formed_before = bisect_right(times, at)
        following = bisect_right(records.terms, newest[formed_before - 1] if formed_before else 0)
        if following == len(records.terms):
            continue
        first = records.steps[following]
        next_at = number(faults[place + 1], "t") if place + 1 < len(faults) else float("inf")
        if not _has_to_end_one(run, fault) and formed_at(run)[whole(first, "term")] > min(
            next_at, spell_end(run, fault)
        ):
            continue
        found.append(_recovery(run, place, first, lost, sealed))
    return found


def ridden_out(run: Evidence) -> dict[int, Line]:
    """Return, by index, the faults that ended no world and were followed by steps."""
    costly = {cost.place for cost in recoveries(run)}
    last = number(run.of("step")[-1], "t") if run.of("step") else 0.0
    spared = {place: fault for place, fault in enumerate(run.of("fault")) if place not in costly}
    return {
        place: fault for place, fault in spared.items() if not _has_to_end_one(run, fault) and number(fault, "t") < last
    }


def _has_to_end_one(run: Evidence, fault: Line) -> bool:
    """Return True if a fault must end a world: by its kind, unless it hit no member of a full world.

    It may have hit spares, which wait outside, or processes of older worlds.
    """
    pids = items(fault, "pids") if fault.get("pids") and ends_processes(fault["kind"]) else []
    times, worlds = _worlds(run)
    formed = bisect_right(times, number(fault, "t"))
    if not ends_world(fault["kind"]) or not pids or formed == 0:
        return ends_world(fault["kind"])
    newest, is_full = worlds[formed - 1]
    return not is_full or any(last_seen(run).get(pid, 0) >= newest for pid in pids)


@once
def last_seen(run: Evidence) -> dict[object, int]:
    """Return each process's last term, including worlds that did not form but name their members."""
    seen: list[tuple[int, object]] = [(term, pid) for term, pids in pids_of(run).items() for pid in pids]
    seen += [(whole(line, "term"), line["pid"]) for line in run.of("unformed") if "pid" in line]
    return {pid: term for term, pid in sorted(seen, key=lambda one: one[0])}


@once
def _worlds(run: Evidence) -> tuple[list[float], list[tuple[int, bool]]]:
    """Return when each world formed, and then the newest term and whether its world was the largest so far."""
    seats, newest, most = seats_of(run), 0, 0
    times, worlds = list[float](), list[tuple[int, bool]]()
    for term, t in sorted(formed_at(run).items(), key=lambda formed: formed[1]):
        newest, most = max(newest, term), max(most, seats[term])
        times.append(t)
        worlds.append((newest, seats[newest] == most))
    return times, worlds


@once
def seats_of(run: Evidence) -> dict[int, int]:
    """Return the sealed size of each term's world, including processes that never recorded it."""
    return {whole(line, "term"): whole(line, "world") for line in run.of("form")}


def after_the_last_step(run: Evidence) -> dict[int, Line]:
    """Return, by index, the faults after which at most the current step was left to apply, for a finished job.

    No later world has a step to apply: the job's end counts as recovery.
    """
    if not any(line["status"] == "done" for line in run.of("end")):
        return {}
    applied = sorted(min(number(line, "t") for line in lines) for lines in steps_of(run).values())
    answered = {cost.place for cost in recoveries(run)} | set(ridden_out(run))
    faults = {place: fault for place, fault in enumerate(run.of("fault")) if place not in answered}
    return {
        place: fault for place, fault in faults.items() if len(applied) - bisect_right(applied, number(fault, "t")) <= 1
    }


def fault_kind(fault: Line) -> str:
    return f"{fault.get('kind')}@{fault['point']}" if fault.get("point") else str(fault.get("kind"))


def fault_name(fault: Line) -> str:
    where = f" on node {fault['node']}" if fault.get("node") is not None else ""
    return f"{fault_kind(fault)}{where} at step {fault.get('seen_step', '?')}"


def _recovery(run: Evidence, place: int, first: Line, lost: dict[int, int], sealed: dict[int, float]) -> Recovery:
    fault = run.of("fault")[place]
    at, term, formed = number(fault, "t"), whole(first, "term"), formed_at(run)
    restore, was_sealed_at = restored_at(run)[term], sealed.get(term)
    return Recovery(
        place=place,
        kind=str(fault["kind"]),
        node=None if fault.get("node") is None else whole(fault, "node"),
        at=at,
        term=term,
        rpo_steps=lost[term],
        rto_s=number(first, "t") - at,
        detect_s=None if was_sealed_at is None else max(0.0, was_sealed_at - at),
        form_s=None if was_sealed_at is None else formed[term] - max(at, was_sealed_at),
        restore_s=number(restore, "t") - formed[term],
        warm_s=number(first, "t") - number(restore, "t"),
    )


def _records(run: Evidence) -> _Records:
    """Return the records, skipping late steps of older worlds: only a term above all earlier ones is a next world."""
    records = _Records([], [])
    for line in run.of("step"):
        if not records.terms or whole(line, "term") > records.terms[-1]:
            records.terms.append(whole(line, "term"))
            records.steps.append(line)
    return records


def _lost(run: Evidence) -> dict[int, int]:
    """Count the applied steps that each term's restore discarded: those of the term before that it did not continue."""
    restored = {key: whole(line, "step") for key, line in restored_at(run).items()}
    newest = furthest_of(run)
    lost, reached = {}, 0
    for term in sorted({*restored, *newest}):
        if term in restored:
            lost[term] = max(0, reached - restored[term])
        reached = newest.get(term, reached)  # later steps were discarded by an earlier restore
    return lost


@once
def sealed_at(run: Evidence) -> dict[int, float]:
    """Return when each term's world was sealed, where recorded; the leader's clock may be ahead."""
    sealed, formed = dict[int, float](), formed_at(run)
    for line in run.of("form"):
        term, time = whole(line, "term"), line.get("sealed_at")
        if isinstance(time, int | float):
            sealed[term] = min(formed[term], max(float(time), sealed.get(term, 0.0)))
    return sealed
