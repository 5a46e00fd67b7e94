"""`elastic-train ckpt`: look at the commits of a run, check them, delete old ones, take the weights out.

RUN is a run's folder, or the URL where its commits are. A commit is named by its step, by term-step, or by its key;
without a name it is the newest. Every command takes --json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from elastic_train.checkpoint.export import Format, export
from elastic_train.checkpoint.reader import commit_keys, damage_of, discover, read_record, records
from elastic_train.checkpoint.record import CommitRecord
from elastic_train.checkpoint.retention import prune, sweep
from elastic_train.checkpoint.stores import Store, open_store
from elastic_train.errors import CommitError, ConfigError
from elastic_train.fencing import newest_term
from elastic_train.lineage import place_of, tiling_problems

app = App(name="ckpt", help="Look at the commits of a run, check them, delete old ones, take the weights out.")

Json = Annotated[bool, Parameter(name="--json", negative="")]
FormatOption = Annotated[Format, Parameter(name="--format")]


@app.command
def ls(run: str, *, json_: Json = False) -> int:
    """List the commits of RUN, the newest first. Records are checked, files are not: see `ckpt verify`."""
    store = open_store(run)
    rows = [_row(key, record, wrong) for key, record, wrong in records(store)]
    if json_:
        return _print_json(rows)
    columns = ("key", "step", "term", "epoch", "age", "size", "world", "loss", "record")
    table = Table(*columns)
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in columns))
    Console().print(table if rows else f"{store.url}: no commits")
    return 0


@app.command
def show(run: str, commit: str | None = None, *, json_: Json = False) -> int:
    """Show everything that is recorded of one commit of RUN."""
    record = find(open_store(run), commit)
    fields = json.loads(record.encode())
    fields["files"] = {name: {"size": file.size, "sha256": file.sha256} for name, file in record.files.items()}
    fields = {"key": record.key, "digest": record.digest, **fields}
    if json_:
        return _print_json(fields)
    table = Table("field", "value")
    for name, value in fields.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    Console().print(table)
    return 0


@app.command
def verify(run: str, commit: str | None = None, *, json_: Json = False) -> int:
    """Read all files of RUN's commits, or of one, and compare them with their records; 65 if the head would be none.

    Without a commit's name a damaged one is reported, and the code is 0 as long as training can go on from another.
    """
    store = open_store(run)
    keys = commit_keys(store) if commit is None else [find(store, commit).key]
    found = [{"key": key, "wrong": _wrong_with(store, key)} for key in keys]
    if json_:
        _print_json(found)
    else:
        table = Table("commit", "verdict")
        for row in found:
            table.add_row(str(row["key"]), f"[red]{row['wrong']}" if row["wrong"] else "[green]whole")
        Console().print(table if found else f"{store.url}: no commits")
    return CommitError.exit_code if found and all(row["wrong"] for row in found) else 0


@app.command(name="prune")
def prune_(run: str, *, keep_last: int = 5, json_: Json = False) -> int:
    """Delete all but the newest commits of RUN, and what failed saves have left; a whole commit always stays.

    Attempts of the newest term are left alone for six hours, since a writer may be at them.
    """
    if keep_last < 1:
        raise ConfigError(f"--keep-last must be at least 1, not {keep_last}")
    store = open_store(run)
    pruned, swept = prune(store, keep_last), sweep(store, newest_term(store))
    num_bytes = pruned.num_bytes + swept.num_bytes
    if json_:
        return _print_json({"commits": pruned.commits, "attempts": swept.attempts, "bytes": num_bytes})
    Console().print(
        f"{len(pruned.commits)} commits and {len(swept.attempts)} attempts deleted, {_size(num_bytes)} freed"
    )
    return 0


@app.command(name="export")
def export_(
    run: str, target: Path, commit: str | None = None, *, format_: FormatOption = "safetensors", json_: Json = False
) -> int:
    """Write the weights of one commit of RUN to the file TARGET."""
    store = open_store(run)
    record = find(store, commit)
    num_tensors = export(store, record, target, format_)
    if json_:
        return _print_json({"commit": record.key, "target": str(target), "tensors": num_tensors})
    Console().print(f"{num_tensors} tensors of {record.key} written to {target}")
    return 0


def find(store: Store, name: str | None) -> CommitRecord:
    """Return the commit that a person names, or the newest whole one; ConfigError if there is none such."""
    if name is None:
        head = discover(store).head
        if head is None:
            raise ConfigError(f"{store.url}: no commits")
        return head
    keys = commit_keys(store)
    matches = [key for key in keys if name in _names(key)]
    if not matches:
        known = ", ".join(str(_names(key)[1]) for key in keys[:5]) or "none"
        raise ConfigError(f"{store.url}: no commit is called '{name}'; the newest, as term-step: {known}")
    return read_record(store, matches[0])


def _names(key: str) -> tuple[str, str, str, str]:
    term, step = place_of(key) or (0, 0)
    return key, f"{term}-{step}", str(step), key.removeprefix("commits/").removesuffix(".json")


def _wrong_with(store: Store, key: str) -> str | None:
    damage = damage_of(store, key)
    if damage is not None:
        return damage
    record = read_record(store, key)
    problems = tiling_problems(record.intervals, record.step)
    return f"its lineage does not tile: {'; '.join(problems)}" if problems else None


def _row(key: str, record: CommitRecord | None, wrong: str | None) -> dict[str, object]:
    term, step = place_of(key) or (0, 0)
    row: dict[str, object] = {"key": key, "step": step, "term": term, "record": wrong or "sealed"}
    if record is None:
        return {
            **row,
            **dict.fromkeys(("epoch", "age", "age_s", "size", "bytes", "world", "loss", "parent", "metrics")),
        }
    age_s = time.time() - record.created_at
    return {
        **row,
        "epoch": record.cursor.epoch,
        "age": _age(age_s),
        "age_s": round(age_s, 1),
        "size": _size(record.num_bytes),
        "bytes": record.num_bytes,
        "world": record.world_size,
        "loss": record.metrics.get("loss"),
        "parent": record.parent_key,
        "metrics": dict(record.metrics),
    }


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _print_json(value: object) -> int:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return 0
