"""Damage a good recorded run outside its training: the metrics logged, the leftovers, and the recovery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from chaos.judge.evidence.run_files import (
    Line,
    collect,
    number,
    part,
)
from chaos.planted.edits import edit

STEP = 29
"""A step of the lineage that has a metric."""


def _edit_tracked(folder: Path, change: Callable[[list[list[float]]], list[list[float]]]) -> None:
    """Change the tracker's values of the loss."""
    path = folder / "tracked.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({**held, "train/loss": change(held["train/loss"])}))


def _edit_metrics(folder: Path, change: Callable[[Line], list[Line]]) -> None:
    """Change the last term's metric lines of a step."""
    path = sorted((folder / "metrics").glob("*.jsonl"))[-1]
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    changed = [new for line in lines for new in (change(line) if line.get("step") == STEP else [line])]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def _with_loss(line: Line, loss: float) -> Line:
    return {**line, "values": {**part(line, "values"), "train/loss": loss}}


def sent_twice(folder: Path) -> None:
    _edit_tracked(folder, lambda points: [*points, points[-1]])


def sent_before_it_held(folder: Path) -> None:
    _edit_tracked(folder, lambda points: [[step, -1.5 if step == STEP else value] for step, value in points])


def sent_of_nothing(folder: Path) -> None:
    _edit_tracked(folder, lambda points: [*points, [1000, 0.5]])


def not_sent(folder: Path) -> None:
    _edit_tracked(folder, lambda points: points[:-1])


def logged_twice(folder: Path) -> None:
    _edit_metrics(folder, lambda line: [line, _with_loss(line, -1.5)])


def other_loss(folder: Path) -> None:
    _edit_metrics(folder, lambda line: [_with_loss(line, -1.5)])
    sent_before_it_held(folder)


def nobody_asked(folder: Path) -> None:
    (folder / "tracked.json").unlink()


def nothing_logged(folder: Path) -> None:
    for path in (folder / "metrics").glob("*.jsonl"):
        path.unlink()


def _looked(folder: Path, **found: object) -> None:
    edit(folder, lambda line: {**line, **found} if line["op"] == "clean" else line)


def leaked_lease(folder: Path) -> None:
    _looked(folder, leases=["/elastic/x/members/a"])


def leaked_draft(folder: Path) -> None:
    _looked(folder, drafts=[["commits/x.json.ab.unfinished", 1.0]])


def unseen_leases(folder: Path) -> None:
    _looked(folder, leases=None)


def leaked_memory(folder: Path) -> None:
    _looked(folder, shared_memory=["torch_4711_1"])


def never_healed(folder: Path) -> None:
    _waited(folder, {"op": "stuck", "why": "training by the whole world did not come"})


def unwatched(folder: Path) -> None:
    _waited(folder, {"op": "healed", "seconds": None})


def never_came(folder: Path) -> None:
    _waited(folder, {"op": "missed", "kind": "kill", "point": "form", "node": 1, "why": "no process came there"})


def no_proof(folder: Path) -> None:
    edit(folder, lambda line: None if line["op"] == "effect" else line)


def _waited(folder: Path, fields: Line) -> None:
    """Replace the lines about the recovery time by one line."""
    last = max(number(line, "t") for line in collect(folder).of("step"))
    edit(folder, lambda line: None if line["op"] == "healed" else line)
    with (folder / "history" / "waited.jsonl").open("a") as file:
        file.write(json.dumps({"t": last, **fields}) + "\n")
