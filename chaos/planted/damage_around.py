"""Damage to a good recorded run around its training: what was logged of it, what outlived it, how it healed."""

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
    """Change what the tracker holds of the loss."""
    path = folder / "tracked.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({**held, "train/loss": change(held["train/loss"])}))


def _edit_metrics(folder: Path, change: Callable[[Line], list[Line]]) -> None:
    """Change the last term's lines of a step."""
    path = sorted((folder / "metrics").glob("*.jsonl"))[-1]
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    changed = [new for line in lines for new in (change(line) if line.get("step") == STEP else [line])]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def _with_loss(line: Line, loss: float) -> Line:
    return {**line, "values": {**part(line, "values"), "train/loss": loss}}


def sent_twice(folder: Path) -> None:
    """A batch that reached the tracker, although its call failed, was sent again."""
    _edit_tracked(folder, lambda points: [*points, points[-1]])


def sent_before_it_held(folder: Path) -> None:
    """A value was sent before its step was in a commit, and the step was computed again with another."""
    _edit_tracked(folder, lambda points: [[step, -1.5 if step == STEP else value] for step, value in points])


def sent_of_nothing(folder: Path) -> None:
    """A value of a step that was given up stayed in the tracker."""
    _edit_tracked(folder, lambda points: [*points, [1000, 0.5]])


def not_sent(folder: Path) -> None:
    """The tracker was down, and was not synchronised later."""
    _edit_tracked(folder, lambda points: points[:-1])


def logged_twice(folder: Path) -> None:
    """One term logged two values of one step."""
    _edit_metrics(folder, lambda line: [line, _with_loss(line, -1.5)])


def other_loss(folder: Path) -> None:
    """What was logged as the loss is not what was trained on; the tracker holds the same."""
    _edit_metrics(folder, lambda line: [_with_loss(line, -1.5)])
    sent_before_it_held(folder)


def nobody_asked(folder: Path) -> None:
    """Nobody looked at what the tracker holds."""
    (folder / "tracked.json").unlink()


def nothing_logged(folder: Path) -> None:
    """No metric was logged at all."""
    for path in (folder / "metrics").glob("*.jsonl"):
        path.unlink()


def _looked(folder: Path, **found: object) -> None:
    edit(folder, lambda line: {**line, **found} if line["op"] == "clean" else line)


def leaked_lease(folder: Path) -> None:
    """A member's key outlived its lease: something renews it still."""
    _looked(folder, leases=["/elastic/x/members/a"])


def leaked_draft(folder: Path) -> None:
    """A file was written and never given its name, with nothing wrong."""
    _looked(folder, drafts=[["commits/x.json.ab.unfinished", 1.0]])


def unseen_leases(folder: Path) -> None:
    """Etcd did not say which leases were left."""
    _looked(folder, leases=None)


def leaked_memory(folder: Path) -> None:
    """Shared memory of a worker was not unlinked."""
    _looked(folder, shared_memory=["torch_4711_1"])


def never_healed(folder: Path) -> None:
    """With all undone, the whole world did not train again."""
    _waited(folder, {"op": "stuck", "why": "training by the whole world did not come"})


def unwatched(folder: Path) -> None:
    """Nobody wrote how long it took to heal."""
    _waited(folder, {"op": "healed", "seconds": None})


def never_came(folder: Path) -> None:
    """A scenario that is not a soak planted a fault at a place that no process came to."""
    _waited(folder, {"op": "missed", "kind": "kill", "point": "form", "node": 1, "why": "no process came there"})


def no_proof(folder: Path) -> None:
    """Nobody has looked whether the faults had an effect."""
    edit(folder, lambda line: None if line["op"] == "effect" else line)


def _waited(folder: Path, fields: Line) -> None:
    """Put a line in the place of those that say how long was waited."""
    last = max(number(line, "t") for line in collect(folder).of("step"))
    edit(folder, lambda line: None if line["op"] == "healed" else line)
    with (folder / "history" / "waited.jsonl").open("a") as file:
        file.write(json.dumps({"t": last, **fields}) + "\n")
