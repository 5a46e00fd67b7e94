"""`elastic-train ckpt`: list, verify, prune, pin and export a run's commits; plan how often to save."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_train.checkpoint.commits import listing, pins_and_holds
from elastic_train.checkpoint.commits.export import Format, export
from elastic_train.checkpoint.commits.lookup import find, find_trained, name_to_key, open_run
from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.reader import (
    DAMAGE,
    commit_keys,
    read_record,
    records,
)
from elastic_train.checkpoint.commits.retention_policies import Best, Retention
from elastic_train.checkpoint.commits.sweeping import drop_unfinished, sweep
from elastic_train.checkpoint.commits.weights import Weights
from elastic_train.checkpoint.interval.forecast import Outlook, forecast
from elastic_train.checkpoint.interval.measured import Measured, measure
from elastic_train.checkpoint.interval.young_daly import SaveCost
from elastic_train.checkpoint.stores.store import Store
from elastic_train.cli.output import Flag, Json, cell, narrow_table, print_json, print_text
from elastic_train.errors import CommitError, ConfigError, StorageError
from elastic_train.system.wording import counted, duration, size
from elastic_train.world.fencing import newest_term

app = App(
    name="ckpt",
    help=(
        "List, verify, prune and pin the commits of a run; plan how often to save.\n\n"
        "RUN is a run's folder, or the folder or URL of its commits (s3://bucket/run). Name a COMMIT by its step "
        "(4000), by term-step (3-4000), or by its key; the default is the one that training would resume from. Every "
        "command takes --json."
    ),
)

STALL_S_PER_GB, WRITE_MB_S = 0.11, 500.0
"""Assumed cost of a save that no run has measured: the most that the benchmarks allow, and a local disk's rate."""

FormatOption = Annotated[Format, Parameter(name="--format")]


@app.command
def ls(run: str, *, best: str = "min loss", verify: Flag = False, json_: Json = False) -> int:
    """List the commits of RUN, newest first; mark the head, the best, pinned and held ones.

    --best 'max macro_f1' is the metric to show and to choose the best by. Records and file sizes are checked; --verify
    also reads all files.
    """
    store, metric = open_run(run), Best.parse(best)
    found = listing.survey_store(store, metric, is_thorough=verify)
    rows = [row.fields(metric.metric, time.time()) for row in found.rows]
    if json_:
        return print_json(rows)
    table = narrow_table("step", "term", "epoch", "age", "size", "world", metric.metric, "validity", "marks")
    for row, fields in zip(found.rows, rows, strict=True):
        age_s = None if row.record is None else time.time() - row.record.created_at
        table.add_row(
            *(cell(fields[name]) for name in ("step", "term", "epoch")),
            "-" if age_s is None else duration(age_s),
            "-" if row.record is None else size(row.record.num_bytes),
            *(cell(fields[name]) for name in ("world", metric.metric)),
            Text(row.wrong, "red") if row.wrong else Text("whole" if verify else "sizes ok", "green"),
            ", ".join(row.marks),
        )
    _print_commits(store, table)
    if rows or found.abandoned:
        left = f"; {size(found.abandoned_bytes)} in {counted(found.abandoned, 'abandoned attempt')}, see `ckpt prune`"
        print_text(f"{size(found.num_bytes)} in {counted(len(rows), 'commit')}{left if found.abandoned else ''}")
    return 0


@app.command
def show(run: str, commit: str | None = None, *, json_: Json = False) -> int:
    """Show the whole record of one commit of RUN."""
    record = find(open_run(run), commit)
    fields = json.loads(record.encode())
    fields["files"] = {name: {"size": file.size, file.algorithm: file.digest} for name, file in record.files.items()}
    fields = {"key": record.key, "digest": record.digest, **fields}
    if json_:
        return print_json(fields)
    table = narrow_table("field", "value")
    for name, value in fields.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    Console(markup=False).print(table)
    return 0


@app.command
def verify(run: str, commit: str | None = None, *, json_: Json = False) -> int:
    """Read all files of RUN's commits, or of one COMMIT, and compare them with their records.

    Exit code 65 if none of them is whole. A damaged commit is reported, but the code is 0 while training can resume
    from another.
    """
    store = open_run(run)
    keys = commit_keys(store) if commit is None else [name_to_key(store, commit)]
    found = [{"key": key, "wrong": _wrong_with(store, key)} for key in keys]
    if json_:
        print_json(found)
    else:
        table = narrow_table("commit", "verdict")
        for row in found:
            table.add_row(str(row["key"]), Text(row["wrong"], "red") if row["wrong"] else Text("whole", "green"))
        _print_commits(store, table)
    return CommitError.exit_code if found and all(row["wrong"] for row in found) else 0


@app.command(name="prune")
def prune_(
    run: str,
    *,
    keep_last: int = 5,
    keep_every_steps: int | None = None,
    keep_every_s: float | None = None,
    keep_best: str | None = None,
    storage_budget: str | None = None,
    dry_run: Flag = False,
    json_: Json = False,
) -> int:
    """Delete the commits of RUN that no rule keeps and the remains of failed saves; try --dry-run first.

    A commit is kept if any rule asks for it: --keep-last N, --keep-every-steps K and --keep-every-s S (the first of
    every period), --keep-best 'max macro_f1'. --storage-budget 200GB replaces --keep-last: as many of the newest as
    fit. Pinned commits, those that a reader holds, and the newest whole one are always kept. Attempts of the newest
    term are left alone for six hours, because a save may still be writing them, and so are unfinished uploads to S3.
    """
    retention = Retention.of(
        last=keep_last,
        every_steps=keep_every_steps,
        every_s=keep_every_s,
        best=keep_best,
        budget=_bytes(storage_budget) if storage_budget else None,
    )
    store = open_run(run)
    if keep_best is not None:
        _check_best(store, keep_best)
    pruned = prune(store, retention, is_rehearsal=dry_run)
    swept = sweep(store, newest_term(store), is_rehearsal=dry_run)
    unfinished = _drop_unfinished(store, is_rehearsal=dry_run)
    num_bytes = pruned.num_bytes + swept.num_bytes
    if json_:
        return print_json(
            {"commits": pruned.commits, "attempts": swept.attempts, "uploads": unfinished, "bytes": num_bytes}
        )
    for key in (*pruned.commits, *swept.attempts, *unfinished):
        print_text(key)
    return print_text(
        f"{'would be ' if dry_run else ''}deleted: {counted(len(pruned.commits), 'commit')}, "
        f"{counted(len(swept.attempts), 'attempt')}, {counted(len(unfinished), 'unfinished upload')}, {size(num_bytes)}"
    )


@app.command
def pin(run: str, commit: str, *, json_: Json = False) -> int:
    """Keep COMMIT of RUN, whatever the retention rules say, until `ckpt unpin`."""
    store = open_run(run)
    record = find(store, commit)
    pins_and_holds.pin(store, record.key)
    return print_json({"pinned": record.key}) if json_ else print_text(f"{record.key} is pinned")


@app.command
def unpin(run: str, commit: str, *, json_: Json = False) -> int:
    """Let the retention rules delete COMMIT of RUN again."""
    store = open_run(run)
    key = name_to_key(store, commit)
    pins_and_holds.unpin(store, key)
    return print_json({"unpinned": key}) if json_ else print_text(f"{key} is no longer pinned")


@app.command(name="export", show=False)
def export_(
    run: str,
    target: Path,
    commit: str | None = None,
    *,
    format_: FormatOption = "safetensors",
    weights: Weights = "trained",
    json_: Json = False,
) -> int:
    """Write the weights of one commit to a file, as `elastic-train export RUN TARGET --to safetensors` does.

    --format safetensors (the default) names the commit in its header; --format torch is a state dict for torch.load.
    --weights ema: their average, of a run with optimizer.ema_decay.
    """
    store, (record, why) = open_run(run), find_trained(run, commit)
    if why is not None:
        sys.stderr.write(f"{why}\n")
    num_tensors = export(store, record, target, format_, weights)
    if json_:
        return print_json({"commit": record.key, "target": str(target), "tensors": num_tensors})
    return print_text(f"{counted(num_tensors, 'tensor')} of {record.key} written to {target}")


@app.command
def plan(
    run: str | None = None,
    *,
    state_gb: float | None = None,
    mtbf_h: float | None = None,
    rpo_min: float = 15.0,
    stall_s: float | None = None,
    write_mb_s: float | None = None,
    restart_s: float = 30.0,
    keep_last: int = 5,
    json_: Json = False,
) -> int:
    """Show what saving more or less often costs in time, lost work and storage, for RUN's measurements or your numbers.

    RUN's folder gives the size, stall, time to publication and fault rate; options override them. --state-gb: size of a
    commit (for AdamW in fp32 three times the weights). --mtbf-h: hours between faults that end the whole job (N nodes
    fail N times as often as one). --rpo-min: minutes of training that a fault may cost at most. --stall-s: how long a
    save stops training (without RUN 0.11 s per GB). --write-mb-s: the store's write rate (500). --restart-s: seconds
    from a fault to training again.
    """
    facts = measure(run) if run else Measured(None, None, None, 0)
    state_gb, mtbf_s = state_gb or facts.state_gb, mtbf_h * 3600 if mtbf_h else facts.mtbf_s
    if state_gb is None or mtbf_s is None:
        raise ConfigError("give --state-gb and --mtbf-h, or name a RUN that has commits")
    cost = _cost(facts.cost, state_gb, stall_s, write_mb_s)
    choice, rows = forecast(cost, mtbf_s, rpo_min * 60, restart_s)
    if json_:
        stated = {"chosen_s": choice.interval_s, "reason": choice.reason, "num_saves_measured": facts.num_saves}
        taken = {"state_gb": state_gb, "mtbf_s": mtbf_s, "stall_s": cost.stall_s, "publish_s": cost.publish_s}
        return print_json({**stated, **taken, "rows": [_outlook(r) for r in rows]})
    table = narrow_table("interval", "wasted", "by stalls", "by faults", "lost at most", "written a day", "")
    for row in rows:
        chosen = ("chosen ", "green") if row.interval_s == choice.interval_s else ""
        mark = Text.assemble(chosen, "" if row.is_allowed else ("over the RPO", "red"))
        shares = (f"{share:.2%}" for share in (row.waste, row.stall_share, row.fault_share))
        written = size(86400 / row.interval_s * state_gb * 1e9)
        table.add_row(duration(row.interval_s), *shares, duration(row.rpo_s), written, mark)
    Console(markup=False).print(table)
    source = f"measured from the last {facts.num_saves} saves of {run}" if facts.cost else "assumed, not measured"
    return print_text(
        f"{choice.reason}\na save's cost is {source}\n"
        f"keep_last {keep_last} takes {size((keep_last + 1) * state_gb * 1e9)} at most"
    )


def _cost(measured: SaveCost | None, state_gb: float, stall_s: float | None, write_mb_s: float | None) -> SaveCost:
    """Return the cost of a save: as given, else as measured, else as assumed."""
    if stall_s is None:
        stall_s = measured.stall_s if measured else STALL_S_PER_GB * state_gb
    if measured and write_mb_s is None:
        return SaveCost(stall_s, max(stall_s, measured.publish_s))
    return SaveCost(stall_s, max(stall_s, state_gb * 1000 / (write_mb_s or WRITE_MB_S)))


def _print_commits(store: Store, table: Table) -> None:
    if table.row_count:
        Console(markup=False).print(table)
    else:
        print_text(f"{store.url}: no commits")


def _wrong_with(store: Store, key: str) -> str | None:
    try:
        return listing.wrong_with(store, read_record(store, key))
    except DAMAGE as error:
        return str(error)


def _drop_unfinished(store: Store, *, is_rehearsal: bool) -> list[str]:
    """Abort what killed processes have begun to upload; where it may not be listed, the bucket's own rules have to."""
    try:
        return drop_unfinished(store, is_rehearsal=is_rehearsal)
    except StorageError as error:
        sys.stderr.write(f"unfinished uploads are not aborted: {error}\n")
        return []


def _bytes(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise ConfigError(
            f"--storage-budget '{text}' is not a size; write 200GB, 1.5TiB or a number of bytes"
        ) from error


def _outlook(row: Outlook) -> dict[str, object]:
    return {name: getattr(row, name) for name in Outlook.__dataclass_fields__}


def _check_best(store: Store, text: str) -> None:
    """Refuse a metric that no commit has: the rule would keep nothing, and the best commit would be deleted."""
    found = [record for _, record, _ in records(store) if record is not None]
    known = sorted({name for record in found for name in record.metrics})
    if found and Best.parse(text).metric not in known:
        has = f"they have {', '.join(known)}" if known else "no commit was validated"
        raise ConfigError(f"--keep-best '{text}': no commit of {store.url} has this metric; {has}")
