"""Damage a good recorded run outside its training: the metrics logged, the leftovers, and the recovery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.judge.evidence.run_files import (
    Line,
    collect,
    number,
    part,
)
from chaos.planted.edits import Damage, append, edit_json, in_lines, rewrite, without

STEP = 29
"""A step of the lineage that has a metric."""


def _in_tracked(change: Callable[[list[list[float]]], list[list[float]]]) -> Damage:
    """Return the damage of other values of the loss in the tracker."""

    def damage(folder: Path) -> None:
        path = folder / "tracked.json"
        edit_json(path, **{"train/loss": change(json.loads(path.read_text())["train/loss"])})

    return damage


def _in_metrics(change: Callable[[Line], list[Line]]) -> Damage:
    """Return the damage of other metric lines of a step in the last term."""

    def changed(lines: list[Line]) -> Iterator[Line]:
        for line in lines:
            yield from change(line) if line.get("step") == STEP else [line]

    return lambda folder: rewrite(sorted((folder / "metrics").glob("*.jsonl"))[-1], changed)


def _with_other_loss(line: Line) -> Line:
    return {**line, "values": {**part(line, "values"), "train/loss": -1.5}}


sent_twice = _in_tracked(lambda points: [*points, points[-1]])
sent_before_it_held = _in_tracked(lambda points: [[step, -1.5 if step == STEP else value] for step, value in points])
sent_of_nothing = _in_tracked(lambda points: [*points, [1000, 0.5]])
not_sent = _in_tracked(lambda points: points[:-1])
logged_twice = _in_metrics(lambda line: [line, _with_other_loss(line)])


def other_loss(folder: Path) -> None:
    _in_metrics(lambda line: [_with_other_loss(line)])(folder)
    sent_before_it_held(folder)


def nothing_logged(folder: Path) -> None:
    for path in (folder / "metrics").glob("*.jsonl"):
        path.unlink()


leaked_lease = in_lines("clean", leases=["/elastic/x/members/a"])
leaked_draft = in_lines("clean", drafts=[["commits/x.json.ab.unfinished", 1.0]])
leaked_memory = in_lines("clean", shared_memory=["torch_4711_1"])


def _waited(op: str, **fields: object) -> Damage:
    """Return the damage of one line in place of those about the recovery time."""

    def damage(folder: Path) -> None:
        last = max(number(line, "t") for line in collect(folder).of("step"))
        without("healed")(folder)
        append(folder, {"t": last, "op": op, **fields})

    return damage


never_healed = _waited("stuck", why="training by the whole world did not come")
unwatched = _waited("healed", seconds=None)
never_came = _waited("missed", kind="kill", point="form", node=1, why="no process came there")
