"""Damage a good recorded run such that each file stays well formed and only other evidence contradicts it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from chaos.judge.evidence.run_files import Line, collect, items, number, part, record_files, whole
from chaos.planted.edits import edit, edit_result, forge, history_of, in_records, later_term, rewrite

_CHAOS = "history/chaos.jsonl"


def lanes_swapped(folder: Path) -> None:
    last = later_term(collect(folder))
    lanes: dict[object, object] = {}
    for line in collect(folder).in_term("step", last):
        lanes.setdefault(line["rank"], line["lanes"])
    others: dict[object, object] = {0: lanes[1], 1: lanes[0]}

    def swapped(line: Line) -> Line:
        is_one = line["op"] == "step" and line["term"] == last and line["rank"] in others
        return {**line, "lanes": others[line["rank"]]} if is_one else line

    edit(folder, swapped)


def steps_swapped(folder: Path) -> None:
    def swapped(line: Line) -> Line:
        if line["op"] != "step" or line["step"] not in (2, 3):
            return line
        by = (whole(line, "hi") - whole(line, "lo")) * (1 if line["step"] == 2 else -1)
        return {**line, "lo": whole(line, "lo") + by, "hi": whole(line, "hi") + by}

    edit(folder, swapped)


def line_twice(folder: Path) -> None:
    path = next(
        path for path in sorted((folder / "history").glob("[0-9]*.jsonl")) if '"commit", "t"' in path.read_text()
    )
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, next(line for line in lines if '"commit", "t"' in line)]))


def _claim_fault(folder: Path, change: Line) -> None:
    """Add a fault like the first one, with its effect and some changed fields."""
    first = next(line for process in collect(folder).processes for line in process if line["op"] == "fault")
    fault = {**first, "number": 99, "t": number(first, "t") + 0.2, **change}
    effect = {"op": "effect", "t": fault["t"], "kind": fault["kind"], "fault": 99, "proof": "1 process has ended"}
    rewrite(folder / _CHAOS, lambda lines: [*lines, fault, effect])


def killed_twice(folder: Path) -> None:
    _claim_fault(folder, {})


def kill_survived(folder: Path) -> None:
    run = collect(folder)
    (form, *_) = run.in_term("form", later_term(run))
    node = next(line["node"] for line in run.of("node") if form["pid"] in items(line, "pids"))
    at = whole(run.of("step")[-1], "step")
    _claim_fault(folder, {"pids": [form["pid"]], "node": node, "target": node, "t": form["t"], "seen_step": at - 1})
    edit(folder, lambda line: {**line, "t": line["t"] + 60.0} if line.get("step") == at else line)  # type: ignore[operator]


def kill_elsewhere(folder: Path) -> None:
    def moved(line: Line) -> Line:
        return {**line, "node": 0, "target": 0} if line["op"] == "fault" and line["kind"] == "kill_node" else line

    edit(folder, moved)


def unclaimed_start(folder: Path) -> None:
    starts = {line["number"] for line in collect(folder).of("fault") if line["kind"] == "start_node"}

    def without(line: Line) -> Line | None:
        if line["op"] == "scenario":
            return {**line, "kinds": ["kill_node", "start_node"]}
        return line if starts.isdisjoint({line.get("number"), line.get("fault")}) else None

    edit(folder, without)


def orphan_before(folder: Path) -> None:
    def twice(lines: list[Line]) -> Iterator[Line]:
        for line in lines:
            yield from [{**line, "orphans": [77]}, line] if line["op"] == "clean" else [line]

    rewrite(folder / _CHAOS, twice)


def other_seed(folder: Path) -> None:
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "run": {**config.get("run", {}), "seed": 99}}))


other_draws = in_records(lambda record: {**record, "rng": {"policy": "another", "seed": 99}})


def files_elsewhere(folder: Path) -> None:
    first = json.loads(record_files(folder)[0].read_text())
    elsewhere = folder.parent / "elsewhere"
    shutil.move(folder / first["attempt"], elsewhere)
    outside = {"attempt": "../elsewhere"}
    forge(folder, lambda record: {**record, **outside} if record["attempt"] == first["attempt"] else record)


def linked_history(folder: Path) -> None:
    path = history_of(folder)
    shutil.move(path, folder.parent / path.name)
    path.symlink_to(folder.parent / path.name)


def nan_tracked(folder: Path) -> None:
    path = folder / "tracked.json"
    held = json.loads(path.read_text())
    held["train/loss"][4][1] = float("nan")
    path.write_text(json.dumps(held))


def extra_key(folder: Path) -> None:
    assert part(json.loads((folder / "result.json").read_text()), "metrics"), "a good run"
    edit_result(folder, accuracy=1.0)
