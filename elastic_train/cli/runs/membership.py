"""Find members of a run's job in its etcd: seen from another machine, a job that waits looks like one that ended."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import replace

from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import ElasticTrainError
from elastic_train.runs.stopped.cause import Cause
from elastic_train.system.process_identity import process_identity
from elastic_train.system.wording import counted
from elastic_train.world.claims import TERMS, Claim, read_claim

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
