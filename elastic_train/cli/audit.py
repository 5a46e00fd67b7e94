"""`elastic-train audit`: print an audit's findings as text or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from elastic_train.checkpoint.audit.coverage_proof import Audit
from elastic_train.checkpoint.audit.coverage_proof import audit as examine
from elastic_train.checkpoint.audit.sample_forensics import look_closely
from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.reader import read_record
from elastic_train.cli.output import Flag, Json, print_json, print_text
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.errors import ConfigError
from elastic_train.runs.report import manifests_of
from elastic_train.system.wording import counted


def audit(run: str, *, data: list[str] | None = None, forensic: Flag = False, json_: Json = False) -> int:
    """Prove from RUN's commits that every sample counted once.

    It prints what is proven and what is not. RUN is a run's folder or the URL of its commits; the job may still be
    running. --data: folder or URL of the training set, if it has moved since; only an unfinished epoch needs it. Of a
    mixture all sources are needed: give --data once for each, in their order, if they have moved. --forensic names the
    repeated or missing samples of a run that was trained with `run.forensic`. Exit code 0: everything is proven; 65:
    something is wrong; 1: something could not be proven.
    """
    store = open_run(run)
    manifests = [load_manifest(url) for url in data] if data else manifests_of(run)
    found = examine(store, manifests)
    head = read_record(store, found.commit)
    if forensic:
        if "://" in run:
            raise ConfigError(f"{run}: --forensic needs the run's folder, which has its history")
        if head.order is not None and head.account is not None:
            look_closely(found, Path(run), head, manifests)
    if json_:
        print_json({**asdict(found), "is_proven": found.exit_code == 0})
    else:
        print_text(_as_text(found))
    return found.exit_code


def _as_text(found: Audit) -> str:
    lines = [f"{found.commit}: step {found.step}, {counted(found.num_epochs, 'epoch')} finished"]
    lines += [f"proven: {text}" for text in found.proven]
    lines += [f"NOT PROVEN: {text}" for text in found.unproven]
    lines += [f"WRONG: {text}" for text in found.wrong]
    lines += [f"rows truncated because they were too long: {found.num_truncated}"] if found.num_truncated else []
    return "\n".join(lines)
