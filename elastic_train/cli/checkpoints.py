"""`elastic-train ckpt`: list, verify, prune and pin a run's commits; plan how often to save."""

from __future__ import annotations

import json
import sys
import time

from cyclopts import App
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_train.checkpoint.commits import lookup, retention_policies
from elastic_train.checkpoint.commits.lookup import best_metric, find, name_to_key, open_run
from elastic_train.checkpoint.commits.pruning import drop_unfinished, prune, sweep
from elastic_train.checkpoint.commits.reader import (
    records,
)
from elastic_train.checkpoint.commits.retention_policies import Best, Retention
from elastic_train.checkpoint.interval.cadence import SaveCost
from elastic_train.checkpoint.interval.measured import Measured, Outlook, forecast, measure
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


@app.command
def ls(
    run: str, commit: str | None = None, *, best: str | None = None, verify: Flag = False, json_: Json = False
) -> int:
    """List the commits of RUN, newest first, or show one COMMIT.

    The head, the best, pinned and held commits are marked. --best 'max macro_f1' is the metric to show and to choose
    the best by, by default the run's own, or 'min loss'. Records and file sizes are checked; --verify also reads all
    files, and the exit code is 65 if no commit is whole, or the one that is named is not. `newest` names the COMMIT
    that training would resume from.
    """
    if commit is not None:
        return _show(open_run(run), commit, verifies=verify, is_json=json_)
    store = open_run(run)
    metric = Best.parse(best or best_metric(run, store))
    found = lookup.survey_store(store, metric, is_thorough=verify)
    rows = [row.fields(metric.metric, time.time()) for row in found.rows]
    code = CommitError.exit_code if verify and rows and not any(row["is_valid"] for row in rows) else 0
    if json_:
        print_json(rows)
        return code
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
    return code


def _show(store: Store, commit: str, *, verifies: bool, is_json: bool) -> int:
    """Show the whole record of one commit; if it is verified, say what is wrong with its files."""
    record = find(store, commit)
    fields = json.loads(record.encode())
    fields["files"] = {name: {"size": file.size, file.algorithm: file.digest} for name, file in record.files.items()}
    fields = {"key": record.key, "digest": record.digest, **fields}
    wrong = lookup.wrong_with(store, record) if verifies else None
    if verifies:
        fields["wrong"] = wrong
    code = CommitError.exit_code if wrong else 0
    if is_json:
        print_json(fields)
        return code
    table = narrow_table("field", "value")
    for name, value in fields.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    Console(markup=False).print(table)
    return code


@app.command(name="prune")
def prune_(
    run: str,
    *,
    keep_last: str = "5",
    keep_every_steps: int | None = None,
    keep_every_s: float | None = None,
    keep_best: str | None = None,
    dry_run: Flag = False,
    json_: Json = False,
) -> int:
    """Delete the commits of RUN that no rule keeps.

    The remains of failed saves are deleted as well; try --dry-run first. A commit is kept if any rule asks for it:
    --keep-last N, --keep-every-steps K and --keep-every-s S (the first of every period), --keep-best 'max macro_f1'.
    --keep-last 200GB keeps as many of the newest as fit. Pinned commits, those that a reader holds, and the newest
    whole one are always kept. Attempts of the newest term are left alone for six hours, because a save may still be
    writing them, and so are unfinished uploads to S3.
    """
    retention = Retention.of(
        last=int(keep_last) if keep_last.isdecimal() else 1,
        every_steps=keep_every_steps,
        every_s=keep_every_s,
        best=keep_best,
        budget=None if keep_last.isdecimal() else _bytes(keep_last),
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
def pin(run: str, commit: str, *, remove: Flag = False, json_: Json = False) -> int:
    """Keep COMMIT of RUN, whatever the retention rules say.

    --remove: let the rules delete it again.
    """
    store = open_run(run)
    if remove:
        key = name_to_key(store, commit)
        retention_policies.unpin(store, key)
        return print_json({"unpinned": key}) if json_ else print_text(f"{key} is no longer pinned")
    record = find(store, commit)
    retention_policies.pin(store, record.key)
    return print_json({"pinned": record.key}) if json_ else print_text(f"{record.key} is pinned")


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
    """Show the cost of saving more or less often.

    The cost is in time, lost work and storage, by RUN's measurements or your numbers. RUN's folder gives the size,
    stall, time to publication and fault rate; options override them. --state-gb: size of a commit (for AdamW in fp32
    three times the weights). --mtbf-h: hours between faults that end the whole job (N nodes fail N times as often as
    one). --rpo-min: minutes of training that a fault may cost at most. --stall-s: how long a save stops training
    (without RUN 0.11 s per GB). --write-mb-s: the store's write rate (500). --restart-s: seconds from a fault to
    training again.
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
            f"--keep-last '{text}' is neither a number of commits nor a size: write 5, 200GB or 1.5TiB"
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
