"""What each fault cost, read from the histories: applied steps computed again, seconds until the next applied step."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.evidence import Evidence, Line, number, whole


@dataclass(frozen=True, slots=True)
class Recovery:
    """From one fault to the first step that the next world applied; seconds, None where a history does not tell.

    detect: until the next round began; form: until its world had formed, processes started and libraries loaded
    included; restore: until the state was read; warm: until the first step was applied.
    """

    kind: str
    node: int
    term: int
    rpo_steps: int
    rto_s: float
    detect_s: float | None
    form_s: float | None
    restore_s: float
    warm_s: float


def recoveries(run: Evidence) -> list[Recovery]:
    """Return the recovery from every fault after which a new world was formed."""
    found = []
    for fault in run.of("fault"):
        form = next((line for line in run.of("form") if number(line, "t") > number(fault, "t")), None)
        if form is not None and (recovery := _recovery(run, fault, form)) is not None:
            found.append(recovery)
    return found


def _recovery(run: Evidence, fault: Line, form: Line) -> Recovery | None:
    term = whole(form, "term")
    restore = next((line for line in run.of("restore") if whole(line, "term") == term), None)
    first = next((line for line in run.of("step") if whole(line, "term") == term), None)
    if restore is None or first is None:
        return None
    before = [whole(line, "step") for line in run.of("step") if whole(line, "term") < term]
    began = form.get("joined_at")
    detected = float(began) if isinstance(began, int | float) and began >= number(fault, "t") else None
    return Recovery(
        kind=str(fault["kind"]),
        node=whole(fault, "node"),
        term=term,
        rpo_steps=max(0, max(before, default=0) - whole(restore, "step")),
        rto_s=number(first, "t") - number(fault, "t"),
        detect_s=None if detected is None else detected - number(fault, "t"),
        form_s=None if detected is None else number(form, "t") - detected,
        restore_s=number(restore, "t") - number(form, "t"),
        warm_s=number(first, "t") - number(restore, "t"),
    )
