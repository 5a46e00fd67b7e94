"""What each fault cost, read from the histories: applied steps computed again, seconds until the next applied step."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.applied import formed_at, newest_steps, restored_at, steps_of
from chaos.evidence import Evidence, Line, number, whole


@dataclass(frozen=True, slots=True)
class Recovery:
    """From one fault to the first step that the next world applied; seconds, None where a history does not tell.

    detect: until the next world was sealed, a lease's end included; form: until it had formed, with processes started
    and libraries loaded; restore: until the state was read; warm: until the first step was applied.
    """

    kind: str
    node: int
    at: float
    term: int
    rpo_steps: int
    rto_s: float
    detect_s: float | None
    form_s: float | None
    restore_s: float
    warm_s: float


def recoveries(run: Evidence) -> list[Recovery]:
    """Return the recovery from every fault after which a newer world applied a step."""
    if not run.of("fault"):
        return []
    return [recovery for fault in run.of("fault") if (recovery := _recovery(run, fault)) is not None]


def fault_name(fault: Line) -> str:
    """Name a fault as people do."""
    return f"{fault['kind']} on node {fault['node']} at step {fault.get('seen_step', '?')}"


def _recovery(run: Evidence, fault: Line) -> Recovery | None:
    at, formed = number(fault, "t"), formed_at(run)
    before = max((term for term, t in formed.items() if t <= at), default=0)
    first = next((line for line in run.of("step") if number(line, "t") > at and whole(line, "term") > before), None)
    if first is None:
        return None
    term = whole(first, "term")
    restore, sealed_at = restored_at(run)[term], _sealed_at(run, term)
    return Recovery(
        kind=str(fault["kind"]),
        node=whole(fault, "node"),
        at=at,
        term=term,
        rpo_steps=_lost(run, term),
        rto_s=number(first, "t") - at,
        detect_s=None if sealed_at is None else max(0.0, sealed_at - at),
        form_s=None if sealed_at is None else formed[term] - max(at, sealed_at),
        restore_s=number(restore, "t") - formed[term],
        warm_s=number(first, "t") - number(restore, "t"),
    )


def _lost(run: Evidence, term: int) -> int:
    """Count the applied steps that a term's restore gave up: those of the term before it that it did not go on from."""
    restored = {key: whole(line, "step") for key, line in restored_at(run).items()}
    reached = 0
    for earlier, furthest in sorted(newest_steps(steps_of(run)).items()):
        if earlier < term:
            reached = furthest  # what lies beyond an earlier restore was given up there
    return max(0, reached - restored[term])


def _sealed_at(run: Evidence, term: int) -> float | None:
    times = [line.get("sealed_at") for line in run.of("form") if line["term"] == term]
    known = [float(time) for time in times if isinstance(time, int | float)]
    return max(known) if known else None
