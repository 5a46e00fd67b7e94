"""Damage a good recorded run's commits and terms: records, parents, intervals, and the commits that terms restored."""

from __future__ import annotations

import shutil
from pathlib import Path

from chaos.judge.evidence.applied import formed_at, restored_at
from chaos.judge.evidence.run_files import (
    Line,
    collect,
    items,
    record_files,
    whole,
)
from chaos.planted.edits import Damage, append, edit, forge, history_of, in_records, later_term, rewrite


def damaged_record(folder: Path) -> None:
    path = record_files(folder)[0]
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"', 1))


def torn_record(folder: Path) -> None:
    path = record_files(folder)[0]
    path.write_bytes(path.read_bytes()[:-20])


def wrong_parent(folder: Path) -> None:
    run = collect(folder)
    last = later_term(run)
    first = min(whole(line, "step") for line in run.of("commit") if line["term"] == last)
    other = next(line["digest"] for line in run.of("commit") if line["key"] != restored_at(run)[last]["commit"])

    def orphaned(line: Line) -> Line:
        return {**line, "parent": other} if line["term"] == last and line["step"] == first else line

    forge(folder, orphaned)
    edit(folder, lambda line: orphaned(line) if line["op"] == "commit" else line)


def _moved(by: int) -> Damage:
    """Return the damage of another start of the last interval in all records."""

    def moved(record: Line) -> Line:
        *earlier, last = items(record, "intervals")
        assert isinstance(last, dict)
        return {**record, "intervals": [*earlier, {**last, "lo": last["lo"] + by}]}

    return in_records(moved)


interval_gap, interval_overlap = _moved(1), _moved(-1)


def wrong_terms(folder: Path) -> None:
    last = later_term(collect(folder))
    forge(folder, lambda record: {**record, "intervals": [{"term": last, "lo": 0, "hi": record["step"]}]})


def no_fence(folder: Path) -> None:
    run = collect(folder)
    last = later_term(run)
    key, late = restored_at(run)[last]["commit"], formed_at(run)[last] + 0.001

    def delayed(line: Line) -> Line:
        return {**line, "t": late, "created_at": late} if line["op"] == "commit" and line["key"] == key else line

    edit(folder, delayed)
    place = str(key).removeprefix("commits/").removesuffix(".json")
    at = {tuple(int(number_) for number_ in place.split("-")): late}
    forge(folder, lambda record: {**record, "created_at": at.get(_place(record), record["created_at"])})


def _place(record: Line) -> tuple[int, ...]:
    return whole(record, "term"), whole(record, "step")


def twin_world(folder: Path) -> None:
    path = history_of(folder, place=-1)
    twin = Path(shutil.copy(path, path.with_name(path.name.replace(".jsonl", "9.jsonl"))))
    rewrite(twin, lambda lines: ({**x, "pid": whole(x, "pid") + 1} if x["op"] == "form" else x for x in lines))


def shrinking_terms(folder: Path) -> None:
    run = collect(folder)
    first, last = min(restored_at(run)), later_term(run)
    swapped = {first: last, last: first}
    edit(
        folder,
        lambda line: {**line, "term": swapped.get(whole(line, "term"), line["term"])} if "term" in line else line,
    )


def _restored(folder: Path, term: int, **fields: object) -> None:
    """Change what a term says that it restored."""
    edit(folder, lambda line: {**line, **fields} if line["op"] == "restore" and line["term"] == term else line)


def older_commit(folder: Path) -> None:
    run = collect(folder)
    last = later_term(run)
    newest = restored_at(run)[last]["commit"]
    older = [str(line["key"]) for line in run.of("commit") if str(line["key"]) < str(newest)][-1]
    _restored(folder, last, commit=older)


def half_a_commit(folder: Path) -> None:
    run = collect(folder)
    last = later_term(run)
    key = str(next(line["key"] for line in run.of("commit") if line["term"] == min(restored_at(run))))
    _restored(folder, last, skipped=[[key, "data/step-000000000005/00000001-a/.metadata is missing"]])


def another_damaged(folder: Path) -> None:
    half_a_commit(folder)
    run = collect(folder)
    first = next(line for process in run.processes for line in process if line["op"] == "fault")
    append(folder, {**first, "kind": "flip_bit", "commit": "00000001-000000000001.json", "pids": []})


def passed_over_head(folder: Path) -> None:
    older_commit(folder)
    run = collect(folder)
    last = later_term(run)
    older = str(restored_at(run)[last]["commit"])
    head = next(str(line["key"]) for line in run.of("commit") if str(line["key"]) > older)
    _restored(folder, last, skipped=[[head, "the fence names it as head, but its record is not in the store"]])


def beside_the_lineage(folder: Path) -> None:
    run = collect(folder)
    last = [line for line in run.of("commit") if line["term"] == min(restored_at(run))][-1]
    step = whole(last, "step") + 1
    key = f"commits/{whole(last, 'term'):08d}-{step:012d}.json"
    append(folder, {**last, "step": step, "key": key, "digest": "0" * 64, "parent": last["digest"]})


def begun_anew(folder: Path) -> None:
    _restored(folder, later_term(collect(folder)), commit=None, step=0)
