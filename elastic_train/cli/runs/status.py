"""`elastic-train status`: whether a run is done, can be resumed, or has failed, and why it stopped."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from elastic_train.checkpoint.commits.lookup import open_run, survey_store
from elastic_train.checkpoint.commits.retention_policies import Best
from elastic_train.checkpoint.stores.store import DeadlineStore, Store
from elastic_train.cli.output import Json, LaunchFlags, Overrides, print_json, print_text
from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.errors import CommitError, ConfigError, ElasticTrainError, Preempted, StorageError
from elastic_train.launch.options import Flags
from elastic_train.runs.stopped.advice import ANEW, RESUME
from elastic_train.runs.stopped.cause import Cause, cause_of, in_words
from elastic_train.system.process_identity import process_identity
from elastic_train.system.wording import counted
from elastic_train.tracking.history_files import newest_commit
from elastic_train.tracking.run_folder import EARLY_STOPPING, RunFolder, look_up_left_out, weights_command
from elastic_train.world.claims import TERMS, Claim, read_claim

_NO_FLAGS = Flags()
CODES = {
    "done": 0,
    "resumable": Preempted.exit_code,
    "failed": CommitError.exit_code,
    "unknown": StorageError.exit_code,
}


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run: `step` is its last step, or the one from which training would continue.

    The state is unknown if the store of its commits does not answer.
    """

    state: str
    step: int | None
    why: str
    stopped: Cause | None = None
    """Why it stopped, as far as its folder tells."""

    @property
    def exit_code(self) -> int:
        return CODES[self.state]


def status(
    run: str,
    /,
    *overrides: Overrides,
    flags: Annotated[LaunchFlags, Parameter(show=False)] = _NO_FLAGS,
    why: Annotated[bool, Parameter(negative="")] = False,
    json_: Json = False,
) -> int:
    """Say if RUN is done, resumable or failed, and --why it stopped.

    RUN is a run's folder, or a configuration; then the rest of the job's line can follow, as keys such as --run.dir or
    --epochs decide what is asked, while flags of `launch` change nothing. Of a URL of commits it can be said whether it
    can be resumed. Exit code 0: done; 75: the same line again continues, or begins; 65: it has commits, and none is
    whole; 1: the store of its commits does not answer.

    With --why, the cause in one sentence, which rank and machine it was, what to do, what the run survived before, and
    the files that say so. Exit code 0: nothing, it is done, runs or waits; 75: start it again; 71: leave that machine
    out; 65: fix something first. Slurm is asked about a job that ran there, and etcd for members that live.
    """
    config = _config_of(run, overrides)
    place = run if config is None else config.run.dir
    found = status_of(place, config)
    if why and found.stopped is None:
        raise ConfigError(f"{run}: commits do not say why a run stopped; give its folder (run.dir)")
    if why and found.stopped is not None and found.state == "done":
        found = replace(found, stopped=replace(found.stopped, advice=_export_of(place)))
    code = found.stopped.exit_code if why and found.stopped is not None else found.exit_code
    if json_:
        print_json({**asdict(found), "exit_code": code})
        return code
    if not why:
        print_text(f"{found.state}: {found.why}")
    if found.stopped is not None and (why or found.stopped.ended_with is not None or _waits(found)):
        print_text(in_words(found.stopped))
    return code


def _waits(found: Status) -> bool:
    """Return True for a run that is not done and needs no start: it is running, or its scheduler starts it."""
    return found.state != "done" and found.stopped is not None and found.stopped.do == "nothing"


def status_of(run: str, config: Config | None = None) -> Status:
    """Find out where a run stands, of a configuration also whether it goes further than the run did.

    Raises ConfigError if there is none.
    """
    found = _status_of(run, config)
    return found if "://" in run else replace(found, stopped=_cause_of(run, found))


def _store_of(run: str, *, may_be_new: bool) -> Store:
    return DeadlineStore(open_run(run, may_be_new=may_be_new), lambda: None)


def _cause_of(run: str, found: Status) -> Cause:
    if found.state == "done":
        return Cause(found.why, "nothing", f"{weights_command(run)} writes its weights", step=found.step)
    cause = cause_of(run)
    if found.state != "unknown":
        cause = unless_members_live(cause, _store_of(run, may_be_new=True))
    if found.state == "resumable" and found.step is None:
        cause = replace(cause, advice=cause.advice.replace(RESUME, ANEW))
    if found.state == "failed" and cause.do == "start":
        return replace(cause, do="fix", advice=f"no commit can be read: {found.why}")
    if found.state == "unknown" and cause.do == "start":
        return replace(cause, advice=f"{cause.advice}; from here {found.why}")
    return cause


def _export_of(run: str) -> str:
    """Return what exports a run's model, by its task; that of a task that cannot be used here is its weights."""
    from elastic_train.inference.opening import plan_of
    from elastic_train.training.result import export_command

    try:
        return f"{export_command(run, plan_of(run).task)} writes its model"
    except Exception:  # noqa: BLE001 - of the code of a task, which may need what is not here
        return f"{weights_command(run)} writes its weights"


def _status_of(run: str, config: Config | None) -> Status:
    result = None if "://" in run else RunFolder(Path(run)).result()
    done = result.get("step") if result is not None and result.get("status") == "done" else None
    is_longer = config is not None and result is not None and _goes_further(config, result)
    store = _store_of(run, may_be_new=config is not None)
    try:
        rows = survey_store(store, Best.parse("min loss")).rows
    except StorageError as error:
        if "://" in run:
            raise
        if isinstance(done, int) and not is_longer:
            return Status("done", done, f"all of its {done} steps are trained; its commits cannot be read: {error}")
        return Status("unknown", None, f"its commits cannot be read: {error}")
    head = next((row.record for row in rows if "head" in row.marks), None)
    if isinstance(done, int) and (head is None or done >= head.step) and not is_longer:
        return Status("done", done, f"all of its {done} steps are trained{_left_out(run, result)}")
    if head is not None:
        return Status("resumable", head.step, f"training would continue from step {head.step} ({head.key})")
    if rows:
        return Status("failed", None, "; ".join(f"{row.key}: {row.wrong}" for row in rows))
    if "://" not in run and (named := newest_commit(run)) is not None:
        return Status("failed", None, f"{named}, its newest commit, is not in {store.url}: is that mounted?")
    return Status("resumable", None, f"no commits in {store.url} yet: training would begin with the first step")


def _left_out(run: str, result: Mapping[str, object] | None) -> str:
    """Return how many updates of a result were left out, with a separator; empty if none was."""
    steps = (result or {}).get("skipped_steps")
    return f"; {look_up_left_out(run, steps)}" if isinstance(steps, list) and steps else ""


def _goes_further(config: Config, result: Mapping[str, object]) -> bool:
    """Say whether a configuration has more steps, or epochs, than the run that is done."""
    if result.get("ended_by") == EARLY_STOPPING:
        return False
    if config.max_steps is not None:
        step = result.get("step")
        return isinstance(step, int) and step < config.max_steps
    epochs = result.get("epochs")
    return isinstance(epochs, int) and epochs < config.epochs


def _config_of(run: str, overrides: Sequence[str]) -> Config | None:
    """Return the configuration that this is, with its overrides; None of a run's folder or URL."""
    if Path(run).is_file():
        return sources.load(Path(run), environ=os.environ, arguments=overrides)
    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: keys are for a configuration, and {run} is not one")
    return None


GONE_S = 15.0
"""Seconds after which the leases of ended members have expired."""
ANSWERS_WITHIN_S = 3.0
_LOOPBACK = re.compile(r"(^|,)\W*(127\.|localhost|::1)")


def unless_members_live(cause: Cause, store: Store) -> Cause:
    """Return `cause`, or that the job is at work if etcd knows members of it."""
    if cause.do == "nothing" or (cause.at is not None and time.time() - cause.at < GONE_S):
        return cause
    with contextlib.suppress(ElasticTrainError):
        newest = max((entry.key for entry in store.list(TERMS)), default=None)
        if newest is not None and (claim := _reachable(read_claim(store, int(newest[len(TERMS) :].split(".")[0])))):
            return _with_members(cause, claim)
    return cause


def _reachable(claim: Claim) -> Claim | None:
    """Return a claim of a job whose etcd has an address that means the same here; else None."""
    is_here = claim.host == process_identity()["host"]
    is_known = bool(claim.run_id and claim.etcd) and (is_here or not _LOOPBACK.search(claim.etcd))
    return claim if is_known else None


def _with_members(cause: Cause, claim: Claim) -> Cause:
    from elastic_train.cli.places.job import etcd_of, row_of
    from elastic_train.errors import translated
    from elastic_train.launch.schedulers import said_to_torchrun
    from rendezvous.etcd.store import EtcdStore
    from rendezvous.membership.records import Keys, read_view

    options = etcd_of(claim.etcd, said_to_torchrun(os.environ, [], []))
    assert options is not None and claim.run_id, "the claim names both"
    keys = Keys(claim.run_id)
    with translated(), contextlib.closing(EtcdStore(options, give_up_after_s=ANSWERS_WITHIN_S)) as etcd:
        row = row_of(claim.run_id, read_view(etcd.get(keys.prefix), keys))
    if not row.workers:
        return cause
    nodes, workers = counted(row.nodes, "node"), counted(row.workers, "worker")
    sentence = f"it is {row.state}: etcd at {claim.etcd} knows {workers} of {nodes}; {cause.sentence}"
    look = f"elastic-train top {claim.run_id} --etcd {claim.etcd}"
    return replace(cause, do="nothing", sentence=sentence, advice=f"wait ({look} shows its nodes)")
