"""`elastic-train ckpt`: list, verify, prune and pin a run's commits."""

from __future__ import annotations

import json
import sys
import time

from cyclopts import App
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.text import Text

from elastic_train.checkpoint.commits import lookup, retention_policies
from elastic_train.checkpoint.commits.lookup import best_metric, find, name_to_key, open_run
from elastic_train.checkpoint.commits.pruning import drop_unfinished, prune, sweep
from elastic_train.checkpoint.commits.reader import (
    records,
)
from elastic_train.checkpoint.commits.retention_policies import Best, Retention
from elastic_train.checkpoint.stores.store import Store
from elastic_train.cli.output import Flag, Json, print_json, print_table, print_text
from elastic_train.config.checkpoints import checked_size
from elastic_train.errors import CommitError, ConfigError, StorageError
from elastic_train.system.wording import counted, duration, size

app = App(
    name="ckpt",
    help=(
        "List, verify, prune and pin the commits of a run.\n\n"
        "RUN is a run's folder, or the folder or URL of its commits (s3://bucket/run). Name a COMMIT by its step "
        "(4000), by term-step (3-4000), or by its key; the default is the one that training would resume from. Every "
        "command takes --json."
    ),
)


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
    shown = [
        (
            *(fields[name] for name in ("step", "term", "epoch")),
            None if row.record is None else duration(time.time() - row.record.created_at),
            None if row.record is None else size(row.record.num_bytes),
            *(fields[name] for name in ("world", metric.metric)),
            Text(row.wrong, "red") if row.wrong else Text("whole" if verify else "sizes ok", "green"),
            ", ".join(row.marks),
        )
        for row, fields in zip(found.rows, rows, strict=True)
    ]
    if not shown:
        print_text(f"{store.url}: no commits")
    else:
        print_table(("step", "term", "epoch", "age", "size", "world", metric.metric, "validity", "marks"), shown)
    if rows or found.abandoned:
        left = f"; {size(found.abandoned_bytes)} in {counted(found.abandoned, 'abandoned attempt')}, see `ckpt prune`"
        print_text(f"{size(found.num_bytes)} in {counted(len(rows), 'commit')}{left if found.abandoned else ''}")
    return code


def _show(store: Store, commit: str, *, verifies: bool, is_json: bool) -> int:
    """Show the whole record of one commit; if it is verified, say what is wrong with its files."""
    record = find(store, commit)
    fields = json.loads(record.encode())
    fields["files"] = {name: {"size": file.size, "blake3": file.blake3} for name, file in record.files.items()}
    fields = {"key": record.key, "digest": record.digest, **fields}
    wrong = lookup.wrong_with(store, record) if verifies else None
    if verifies:
        fields["wrong"] = wrong
    code = CommitError.exit_code if wrong else 0
    if is_json:
        print_json(fields)
        return code
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    print_table(("field", "value"), shown.items())
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
    from elastic_train.world.fencing import newest_term  # loads torch

    retention = Retention.of(
        last=int(keep_last) if keep_last.isdecimal() else 1,
        every_steps=keep_every_steps,
        every_s=keep_every_s,
        best=() if keep_best is None else (keep_best,),
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


def _drop_unfinished(store: Store, *, is_rehearsal: bool) -> list[str]:
    """Abort what killed processes have begun to upload; where it may not be listed, the bucket's own rules have to."""
    try:
        return drop_unfinished(store, is_rehearsal=is_rehearsal)
    except StorageError as error:
        sys.stderr.write(f"unfinished uploads are not aborted: {error}\n")
        return []


def _bytes(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(checked_size(text))
    except (ValidationError, ValueError) as error:
        raise ConfigError(
            f"--keep-last '{text}' is neither a number of commits nor a size: write 5, 200GB or 1.5TiB"
        ) from error


def _check_best(store: Store, text: str) -> None:
    """Refuse a metric that no commit has: the rule would keep nothing, and the best commit would be deleted."""
    found = [record for _, record, _ in records(store) if record is not None]
    known = sorted({name for record in found for name in record.metrics})
    if found and Best.parse(text).metric not in known:
        has = f"they have {', '.join(known)}" if known else "no commit was validated"
        raise ConfigError(f"--keep-best '{text}': no commit of {store.url} has this metric; {has}")
