"""Damage facts that are recorded in two places, by changing one of them consistently with its own seal."""

from __future__ import annotations

import json
from pathlib import Path

from chaos.judge.evidence.run_files import Line, collect, items, part, record_files
from chaos.planted.edits import edit, forge


def _oldest(folder: Path) -> Line:
    oldest: Line = json.loads(record_files(folder)[0].read_bytes())
    return oldest


def _newest(folder: Path) -> Line:
    newest: Line = json.loads(record_files(folder)[-1].read_bytes())
    return newest


def unwritten_commit(folder: Path) -> None:
    newest = _newest(folder)
    place = newest["term"], newest["step"]
    edit(folder, lambda line: None if line["op"] == "commit" and (line["term"], line["step"]) == place else line)


def one_of_another_job(folder: Path) -> None:
    seal = _oldest(folder)["seal"]
    forge(
        folder,
        lambda record: {**record, "rng": {**part(record, "rng"), "seed": 99}} if record["seal"] == seal else record,
    )


def other_credit(folder: Path) -> None:
    oldest = _oldest(folder)
    first = {"term": 0, "lo": 0, "hi": 1}

    def change(record: Line) -> Line:
        if record["seal"] != oldest["seal"]:
            return record
        intervals = [dict(each) for each in items(record, "intervals") if isinstance(each, dict)]
        rest = [{**intervals[0], "lo": 1}, *intervals[1:]]
        return {**record, "intervals": [first, *(each for each in rest if each["lo"] < each["hi"])]}

    forge(folder, change)


def unlisted_file(folder: Path) -> None:
    oldest = _oldest(folder)
    listed = sorted(name for name in part(oldest, "files") if name != ".metadata")[1:]

    def change(record: Line) -> Line:
        files = {name: file for name, file in part(record, "files").items() if name in (".metadata", *listed)}
        return {**record, "files": files} if record["seal"] == oldest["seal"] else record

    forge(folder, change)


def other_digest(folder: Path) -> None:
    parents = {line["parent"] for line in collect(folder).of("commit")}
    done = list[object]()

    def change(line: Line) -> Line:
        if line["op"] != "commit" or line["digest"] not in parents or done:
            return line
        done.append(line["digest"])
        return {**line, "digest": "0" * 64}

    edit(folder, change)


def headless(folder: Path) -> None:
    path = min((folder / "history").glob("[0-9]*-00000-*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["op"] not in ("form", "restore")))


def other_hour(folder: Path) -> None:
    path = max((folder / "history").glob("[0-9]*-00000-*.jsonl"))
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "t": line["t"] + 3600}) + "\n" for line in lines))


def quick_restore(folder: Path) -> None:
    edit(folder, lambda line: {**line, "seconds": -1.0} if line["op"] == "restore" else line)


def other_kind(folder: Path) -> None:
    edit(folder, lambda line: {**line, "world": str(line["world"])} if line["op"] == "form" else line)


def other_end(folder: Path) -> None:
    edit(folder, lambda line: {**line, "status": "preempted"} if line["op"] == "end" else line)


def formed_twice(folder: Path) -> None:
    path = min((folder / "history").glob("[0-9]*-00000-*.jsonl"))
    first, *rest = path.read_text().splitlines(keepends=True)
    again = {**json.loads(first), "t": json.loads(first)["t"] + 0.001}
    path.write_text("".join([first, json.dumps(again) + "\n", *rest]))


def unknown_operation(folder: Path) -> None:
    edit(folder, lambda line: {**line, "op": "comit"} if line["op"] == "commit" else line)


def nobody_killed(folder: Path) -> None:
    edit(folder, lambda line: {**line, "pids": []} if str(line.get("kind")).startswith("kill_") else line)
