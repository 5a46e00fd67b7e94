"""Damage a good recorded run without changing its lineage: invented claims, deleted evidence, earlier commits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from chaos.judge.evidence.run_files import Line, collect, items, part, record_files, whole
from chaos.planted.edits import Damage, edit, edit_result, forge, history_of, in_records, later_term, written


def _first_attempt(folder: Path) -> tuple[Path, Line]:
    """Return the folder of the oldest commit's files, and the files listed in its record."""
    record = json.loads(record_files(folder)[0].read_text())
    return folder / str(record["attempt"]), part(record, "files")


def earlier_flip(folder: Path) -> None:
    attempt, files = _first_attempt(folder)
    path = attempt / max(files)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def earlier_files(folder: Path) -> None:
    attempt, _ = _first_attempt(folder)
    for path in attempt.iterdir():
        path.unlink()


unsealed_record = in_records(lambda record: {**record, "world_size": 99}, seals=False)


def _claimed_everywhere(fields: Line, recorded: Line | None = None) -> Damage:
    """Return the damage of other fields in the result and, as `recorded`, in the records of both runs."""

    def damage(folder: Path) -> None:
        for each in (folder, folder.parent / "reference"):
            if not each.is_symlink() and each.exists():
                edit_result(each, **fields)
                forge(each, lambda record: {**record, **(recorded or fields)})

    return damage


invented_metrics = _claimed_everywhere({"metrics": {"loss": 0.125, "samples": 16.0}})
nan_metrics = _claimed_everywhere(
    {"metrics": {"loss": float("nan"), "samples": 16.0}}, {"metrics": {"loss": None, "samples": 16.0}}
)
invented_skips = _claimed_everywhere({"skipped_steps": [[1, 3]]})


def no_terms(folder: Path) -> None:
    for path in (folder / "terms").iterdir():
        path.unlink()
    (folder / "terms").rmdir()


def another_claim(folder: Path) -> None:
    number = later_term(collect(folder))
    edit(folder, lambda line: {**line, "boot": "b"} if line["op"] == "form" and line["term"] == number else line)
    (folder / "terms" / f"{number:08d}.json").write_text('{"boot": "c"}')


def _other_answer(is_of_end: bool, **fields: object) -> Damage:
    def change(line: Line) -> Line:
        return {**line, **fields} if line["op"] == "why" and ("fault" not in line) == is_of_end else line

    return lambda folder: edit(folder, change)


survivor_blamed = _other_answer(False, of_rank=0)
fix_advised = _other_answer(False, do="fix", exit_code=65)
other_exit_code = _other_answer(False, exit_code=71)
start_advised_at_the_end = _other_answer(True, do="start", exit_code=75)


def broken_line(folder: Path) -> None:
    path = history_of(folder)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[3][:20] + "\n", *lines[4:]]))


def _in_oldest(name: str, change: Callable[[Line, Line], object]) -> Damage:
    """Return the damage of one field of the oldest record, by its value (if a mapping) and the record."""

    def damage(folder: Path) -> None:
        oldest = json.loads(record_files(folder)[0].read_text())
        place = oldest["term"], oldest["step"]
        changed = {name: change(oldest.get(name), oldest)}
        forge(folder, lambda record: {**record, **changed} if (record["term"], record["step"]) == place else record)

    return damage


_BEST = {"metric": "min loss", "best": 0.125, "best_step": 1, "validated_at": 1, "num_since": 0}
other_cursor = _in_oldest("cursor", lambda cursor, _: {**cursor, "offset": whole(cursor, "offset") + 4})
other_sums = _in_oldest("coverage", lambda sums, _: {**sums, "sum_a": whole(sums, "sum_a") ^ 1})
other_account = _in_oldest(
    "account", lambda account, record: {**account, "epochs": [*items(account, "epochs"), part(record, "coverage")]}
)
other_improvement = _in_oldest("improvement", lambda *_: _BEST)
older_metrics = _in_oldest("metrics", lambda *_: {"loss": 0.125, "samples": 16.0})
other_skips = _in_oldest("skipped_steps", lambda *_: [[0, 1]])
other_head = written("head.json", json.dumps({"commit": "commits/00000099-000000000099.json", "step": 99}))


def other_tracked_run(folder: Path) -> None:
    edit_result(folder, mlflow_run_id="one")
    (folder / "mlflow.json").write_text(json.dumps({"job": "job", "run_id": "another", "mlflow_uri": "sqlite:///x"}))
