"""Any damage to any file of a recorded run: the verdict is a sentence, and it is not valid."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos.judge import verdict as verdict_module
from chaos.judge.evidence.run_files import collect
from chaos.judge.invariants.exactly_once.samples import DealtOrder
from chaos.judge.verdict import REFERENCE, examine

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("weights_loaded_once")]

Damage = Callable[[bytes], bytes | None]
WHOLE_FILE: dict[str, Damage] = {
    "removed": lambda content: None,
    "empty": lambda content: b"",
    "{}": lambda content: b"{}",
    "[]": lambda content: b"[]",
    "null": lambda content: b"null",
    "half": lambda content: content[: len(content) // 2],
}
NOT_READ = {"mlflow_run_id", "num_samples", "seconds", "x"}
"""Names of values that are no evidence, wherever they are."""
TIMES = {"t", "joined_at", "sealed_at", "started_at", "created_at"}
"""Times are compared with the tolerance of a process's duration and of clock differences."""


@pytest.fixture(autouse=True)
def reference_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the run without faults, which no test here damages, and compute orders of samples, once a test."""
    read = {folder / REFERENCE: collect(folder / REFERENCE)}
    monkeypatch.setattr(verdict_module, "collect", lambda at: read[at] if at in read else collect(at))
    monkeypatch.setattr(DealtOrder, "ids_before", functools.cache(DealtOrder.ids_before))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "faulted").rglob("*") if path.is_file())


def verdict_on(folder: Path, path: Path, content: bytes | None) -> tuple[bool, list[str]]:
    """Judge a run with one changed file, and restore the file."""
    before = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        verdict = examine(folder)
        return verdict.is_valid, [f"{x.invariant}: {x.why}" for x in verdict.findings if x.truth != "true"]
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("how", WHOLE_FILE)
def test_no_file_can_be_damaged_unseen(folder: Path, how: str) -> None:
    believed = []
    for path in files_of(folder):
        before = path.read_bytes()
        is_valid, why = verdict_on(folder, path, WHOLE_FILE[how](before))
        if is_valid:
            believed.append(str(path.relative_to(folder)))
        assert all(len(each) > 10 for each in why)
    assert believed == []


def test_a_folder_in_place_of_any_file_is_no_evidence(folder: Path) -> None:
    believed = []
    for path in files_of(folder):
        before = path.read_bytes()
        path.unlink()
        path.mkdir()
        if examine(folder).is_valid:
            believed.append(str(path.relative_to(folder)))
        path.rmdir()
        path.write_bytes(before)
    assert believed == []


def values_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key and item below a value."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from values_of(tree[key], (*path, key))


def changed(tree: Any, path: tuple[Any, ...], *, is_removed: bool) -> Any:
    """Return a copy with one value removed, or one number changed."""
    copy = json.loads(json.dumps(tree))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if is_removed:
        del at[path[-1]]
    else:
        at[path[-1]] += 1
    return copy


def variants(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield variants of the tree, each with one key removed or one number changed."""
    for path in values_of(tree):
        if NOT_READ & {*map(str, path)} or path[-1] in TIMES:
            continue
        value = tree
        for key in path:
            value = value[key]
        where = ".".join(map(str, path))
        if isinstance(path[-1], str):
            yield f"without {where}", changed(tree, path, is_removed=True)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{where} + 1", changed(tree, path, is_removed=False)


EXPLAINED = {
    "form": {"pid"},
    "restore": {"resumed"},
    "scenario": {"seed", "reference"},
    "node": {"node", "pids"},
    "fault": {"target", "node", "seen_step", "pids", "at_step", "is_drawn", "term"},
    "clean": {"leases"},
}
"""Fields whose loss or change cannot be detected: the executor's statements, which nothing else in the folder
repeats."""


@pytest.mark.slow
def test_no_line_of_a_history_can_be_changed_unseen(folder: Path) -> None:
    """One key removed, or one number changed, in the first line of each operation in each history."""
    believed = []
    for path in sorted((folder / "faulted" / "history").iterdir()):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        first = {line["op"]: place for place, line in reversed([*enumerate(lines)])}
        for op, place in first.items():
            for where, tree in variants(lines[place]):
                content = "".join(json.dumps(each) + "\n" for each in [*lines[:place], tree, *lines[place + 1 :]])
                name = where.removeprefix("without ").removesuffix(" + 1").partition(".")[0]
                if name not in EXPLAINED.get(op, ()) and verdict_on(folder, path, content.encode())[0]:
                    believed.append(f"{path.name}, {op}: {where}")
    assert believed == []


@pytest.mark.parametrize("name", ["result.json", "config.yaml", "manifest.json", "tracked.json", "commits"])
def test_no_value_can_be_changed_unseen(folder: Path, name: str) -> None:
    path = folder / "faulted" / name
    path = sorted(path.iterdir())[0] if path.is_dir() else path
    read, write = (yaml.safe_load, yaml.safe_dump) if name.endswith("yaml") else (json.loads, json.dumps)
    found = list(variants(read(path.read_text())))
    believed = [where for where, tree in found if verdict_on(folder, path, write(tree).encode())[0]]
    assert believed == []
