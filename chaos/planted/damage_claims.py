"""Damage a good recorded run without changing its lineage: invented claims, deleted evidence, earlier commits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from chaos.judge.evidence.run_files import MANIFEST, Line, collect, items, part, record_files, whole
from chaos.planted.edits import edit, edit_result, forge, later_term


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


def unsealed_record(folder: Path) -> None:
    forge(folder, lambda record: {**record, "world_size": 99}, seals=False)


def _claim_everywhere(folder: Path, fields: Line, recorded: Line) -> None:
    """Change the result and the records of both runs consistently."""
    for each in (folder, folder.parent / "reference"):
        if each.is_symlink() or not each.exists():
            continue
        edit_result(each, **fields)
        forge(each, lambda record: {**record, **recorded})


def invented_metrics(folder: Path) -> None:
    metrics = {"loss": 0.125, "samples": 16.0}
    _claim_everywhere(folder, {"metrics": metrics}, {"metrics": metrics})


def nan_metrics(folder: Path) -> None:
    nothing: Line = {"loss": None, "samples": 16.0}
    _claim_everywhere(folder, {"metrics": {"loss": float("nan"), "samples": 16.0}}, {"metrics": nothing})


def invented_skips(folder: Path) -> None:
    _claim_everywhere(folder, {"skipped_steps": [[1, 3]]}, {"skipped_steps": [[1, 3]]})


def invented_cuts(folder: Path) -> None:
    edit_result(folder, num_truncated=12)


def invented_end(folder: Path) -> None:
    edit_result(folder, ended_by="early stopping")


def _without(op: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda line: None if line["op"] == op else line)


no_validations, no_exits = _without("validate"), _without("exit")


def no_terms(folder: Path) -> None:
    for path in (folder / "terms").iterdir():
        path.unlink()
    (folder / "terms").rmdir()


def another_claim(folder: Path) -> None:
    number = later_term(collect(folder))
    edit(folder, lambda line: {**line, "boot": "b"} if line["op"] == "form" and line["term"] == number else line)
    (folder / "terms" / f"{number:08d}.json").write_text('{"boot": "c"}')


def empty_proof(folder: Path) -> None:
    edit(folder, lambda line: {**line, "proof": ""} if line["op"] == "effect" else line)


def _other_answer(is_of_end: bool, **fields: object) -> Callable[[Path], None]:
    def change(line: Line) -> Line:
        return {**line, **fields} if line["op"] == "why" and ("fault" not in line) == is_of_end else line

    return lambda folder: edit(folder, change)


survivor_blamed = _other_answer(False, of_rank=0)
fix_advised = _other_answer(False, do="fix", exit_code=65)
other_exit_code = _other_answer(False, exit_code=71)
start_advised_at_the_end = _other_answer(True, do="start", exit_code=75)


def empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


def broken_line(folder: Path) -> None:
    path = sorted((folder / "history").glob("[0-9]*.jsonl"))[0]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[3][:20] + "\n", *lines[4:]]))


def _change_oldest(folder: Path, change: Callable[[Line], Line]) -> None:
    """Change the oldest record; digests and parents are recomputed."""
    oldest = json.loads(record_files(folder)[0].read_text())
    place = oldest["term"], oldest["step"]
    forge(folder, lambda record: change(record) if (record["term"], record["step"]) == place else record)


def other_cursor(folder: Path) -> None:
    _change_oldest(
        folder,
        lambda record: {
            **record,
            "cursor": {**(cursor := part(record, "cursor")), "offset": whole(cursor, "offset") + 4},
        },
    )


def other_sums(folder: Path) -> None:
    _change_oldest(
        folder,
        lambda record: {
            **record,
            "coverage": {**(sums := part(record, "coverage")), "sum_a": whole(sums, "sum_a") ^ 1},
        },
    )


def other_account(folder: Path) -> None:
    _change_oldest(
        folder,
        lambda record: {
            **record,
            "account": {
                **part(record, "account"),
                "epochs": [*items(part(record, "account"), "epochs"), part(record, "coverage")],
            },
        },
    )


def other_improvement(folder: Path) -> None:
    best: Line = {"metric": "min loss", "best": 0.125, "best_step": 1, "validated_at": 1, "num_since": 0}
    _change_oldest(folder, lambda record: {**record, "improvement": best})


def older_metrics(folder: Path) -> None:
    _change_oldest(folder, lambda record: {**record, "metrics": {"loss": 0.125, "samples": 16.0}})


def other_skips(folder: Path) -> None:
    _change_oldest(folder, lambda record: {**record, "skipped_steps": [[0, 1]]})


def other_head(folder: Path) -> None:
    (folder / "head.json").write_text(json.dumps({"commit": "commits/00000099-000000000099.json", "step": 99}))


def other_tracked_run(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "mlflow_run_id": "one"}))
    (folder / "mlflow.json").write_text(json.dumps({"job": "job", "run_id": "another", "mlflow_uri": "sqlite:///x"}))


def other_store(folder: Path) -> None:
    (folder / "store-id").write_text("another store")
