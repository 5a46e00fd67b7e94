"""Damage facts that are recorded in two places, by changing one of them consistently with its own seal."""

from __future__ import annotations

import json
from pathlib import Path

from chaos.judge.evidence.run_files import Line, collect, items, number, part, record_files
from chaos.planted.edits import edit, forge, history_of, rewrite


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
    path = history_of(folder, "[0-9]*-00000-*")
    rewrite(path, lambda lines: (line for line in lines if line["op"] not in ("form", "restore")))


def other_hour(folder: Path) -> None:
    path = history_of(folder, "[0-9]*-00000-*", -1)
    rewrite(path, lambda lines: ({**line, "t": number(line, "t") + 3600} for line in lines))


def other_kind(folder: Path) -> None:
    edit(folder, lambda line: {**line, "world": str(line["world"])} if line["op"] == "form" else line)


def formed_twice(folder: Path) -> None:
    path = history_of(folder, "[0-9]*-00000-*")
    rewrite(path, lambda lines: [lines[0], {**lines[0], "t": number(lines[0], "t") + 0.001}, *lines[1:]])


def nobody_killed(folder: Path) -> None:
    edit(folder, lambda line: {**line, "pids": []} if str(line.get("kind")).startswith("kill_") else line)
