"""Claims of terms name the claimant: a newer claim with another run id belongs to another job in the same folder.

Two such jobs would fence each other off in turn: correct, but most of the work would be in vain, and unnoticed. So a
job that is fenced off by another one ends, and a starting job first checks if the last claimant is still running. A job
restarted under a new run id, because the last one died, continues.

Two jobs with one run id but different etcds are also two jobs. A term is claimed in etcd before it is in the store, so
a claim above the newest term of this job's etcd was made through another etcd.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastic_train.checkpoint.stores.store import KeyMissing, Store, read
from elastic_train.errors import ConfigError, OtherJobError, StorageError
from elastic_train.system.process_identity import pid_space, process_identity
from elastic_train.tracking.history_files import FOLDER, last_step_lines
from elastic_train.tracking.run_folder import RunFolder
from rendezvous.process_table import is_alive

TERMS = "terms/"
LOOK_S, MOST_LOOK_S, PATIENCE_S = 3.0, 60.0, 15.0
"""Seconds between looks for signs of life, more of them where steps take longer, and for how long there must be some.

By then the traces of a killed job, including its members' leases, are gone.
"""
RECENT_S = 600.0
_LOOPBACK = re.compile(r"(^|,)\W*(127\.|localhost|::1)")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """The claimant of a term; fields that an older version does not write are empty."""

    term: int
    run_id: str | None = None
    """Run id of the job; empty for a process without launcher, None if unknown."""
    host: str = ""
    pid: int = 0
    boot: str = ""
    born: int = 0
    space: str = ""
    """PID namespace of the process: the machine's boot, and the container."""
    at: float = 0.0
    etcd: str = ""
    """Endpoints of the etcd in which it was claimed first; empty without etcd."""

    @property
    def owner(self) -> str:
        by, through = f"process {self.pid} on {self.host}", f" on etcd {self.etcd}" if self.etcd else ""
        return f"the job of run id {self.run_id!r}{through} (rank 0: {by})" if self.run_id else by

    def is_of(self, run_id: str) -> bool:
        """Return True if the claim is this job's, or its job is unknown; without a run id, a job is one process."""
        if self.run_id is None or self.run_id != run_id:
            return self.run_id is None
        mine = process_identity()
        return bool(run_id) or (self.pid, self.boot, self.born) == (os.getpid(), mine["boot"], mine["born"])


class HeadLike(Protocol):
    """The newest claim, and the commit last published under it."""

    @property
    def term(self) -> int: ...

    @property
    def commit(self) -> str | None: ...


def term_key(term: int) -> str:
    return f"{TERMS}{term:08d}.json"


class Own:
    """Recognizes this job's claims: those of its run id, unless made through another etcd.

    `etcd` has the endpoints of this job's etcd, and `head` reads its newest term; both only with etcd.
    """

    def __init__(self, run_id: str = "", etcd: str = "", head: Callable[[], HeadLike | None] | None = None) -> None:
        self.run_id, self.etcd, self._head = run_id, etcd, head

    def has(self, claim: Claim, *, otherwise: bool = True) -> bool:
        """Return True if a claim is this job's.

        Returns `otherwise` if the claim's etcd has another address and ours has no term yet.
        """
        if not claim.is_of(self.run_id) or not claim.run_id or self._is_here(claim):
            return claim.is_of(self.run_id)
        try:
            newest = None if self._head is None else self._head()
        except StorageError:
            return True
        return otherwise if newest is None else newest.term >= claim.term

    def _is_here(self, claim: Claim) -> bool:
        """Return True if a claim was made without etcd, or at this job's etcd address; loopback is per host."""
        is_same_host = claim.host == process_identity()["host"]
        return not claim.etcd or (claim.etcd == self.etcd and (is_same_host or not _LOOPBACK.search(claim.etcd)))


def new_claim(own: Own) -> tuple[bytes, str]:
    """Return a claim's content, and its nonce, by which a retried create and the other ranks recognize it."""
    nonce = uuid.uuid4().hex
    who = {"pid": os.getpid(), **process_identity(), "run_id": own.run_id, "etcd": own.etcd}
    return json.dumps({**who, "at": time.time(), "claim": nonce}).encode(), nonce


def has_claim(store: Store, term: int, nonce: str) -> bool:
    """Return True if a store has the claim of a term with this nonce; StorageError if it does not answer."""
    try:
        claim = json.loads(read(store, term_key(term)))
    except (KeyMissing, ValueError):
        return False
    return isinstance(claim, dict) and claim.get("claim") == nonce


def read_claim(store: Store, term: int) -> Claim:
    """Return the claimant of a term, as far as it can be read."""
    try:
        found = json.loads(read(store, term_key(term)))
        return Claim(term, **{name: found[name] for name in Claim.__dataclass_fields__ if name in found})
    except (StorageError, ValueError, TypeError):
        return Claim(term)


def nothing_to_check(newest: int) -> None:
    """Allow every claim."""


class Rivals:
    """Looks for other jobs in this job's folder.

    `last_term` is the newest term that this process has trained in, 0 before its first world; `num_members` returns the
    number of members that etcd knows of a run id.
    """

    def __init__(self, store: Store, run_dir: str, own: Own, last_term: int, num_members: Callable[[str], int]) -> None:
        self._store, self._run_dir, self._own = store, Path(run_dir), own
        self._last_term, self._num_members = last_term, num_members

    def check(self, newest: int) -> None:
        """Return if this job may claim a term above the newest one.

        Raise OtherJobError if another job is running here.
        """
        if newest <= self._last_term:
            return
        claim = read_claim(self._store, newest)
        if self._own.has(claim, otherwise=bool(self._last_term)):
            return
        if self._last_term:
            raise taken_over(self._store, self._last_term, claim)
        if _has_ended_here(claim) or self._has_said_its_end(newest):
            return
        if self._is_at_work(claim):
            raise OtherJobError(
                f"{self._store.url}: {claim.owner} has claimed term {newest} at {_moment(claim.at)} and is at work "
                f"here, {_only_one}. Nothing was trained: wait for its end, or stop it, or give this job "
                f"{self._way_to_join(claim)}another run.dir and checkpoint.url"
            )
        if time.time() - claim.at < RECENT_S and claim.run_id != self._own.run_id:
            log.warning(
                "%s: %s has not been heard of since term %d (%s): this job continues in its place",
                *(self._store.url, claim.owner, newest, _moment(claim.at)),
            )

    def _has_said_its_end(self, newest: int) -> bool:
        """Return True if the newest term has a result: all its ranks have finished, or were asked to leave."""
        with contextlib.suppress(ConfigError):
            term = (RunFolder(self._run_dir).result() or {}).get("term")
            return isinstance(term, int) and term >= newest
        return False

    def _is_at_work(self, claim: Claim) -> bool:
        """Return True if a job keeps showing signs of life, False once there are none for a while."""
        if _is_one_process_here(claim):
            return is_alive(claim.pid, claim.born)
        look_s = min(max(LOOK_S, 2 * self._step_s(claim.term)), MOST_LOOK_S)
        deadline, seen = time.monotonic() + PATIENCE_S, self._traces()
        while time.monotonic() < deadline:
            time.sleep(look_s)
            before, seen = seen, self._traces()
            if before == seen and not self._has_members(claim):
                return False
        return True

    def _step_s(self, term: int) -> float:
        """Return the seconds between the last two steps of a term, which write lines; 0 if they are not known."""
        files = sorted((self._run_dir / FOLDER).glob(f"{term:08d}-00000-*.jsonl"))[-2:]
        with contextlib.suppress(OSError, TypeError, ValueError, KeyError):
            *_, before, last = sorted(float(str(line["t"])) for path in files for line in last_step_lines(path))
            return last - before
        return 0.0

    def _has_members(self, claim: Claim) -> bool:
        """Return True if this job's etcd knows members of the other job; members of this run id do not count."""
        return claim.run_id not in (None, "", self._own.run_id) and self._num_members(claim.run_id or "") > 0

    def _way_to_join(self, claim: Claim) -> str:
        is_joinable = claim.etcd and claim.run_id == self._own.run_id
        return f"its etcd (--endpoint {claim.etcd}) to be part of it, or " if is_joinable else ""

    def _traces(self) -> set[tuple[str, int]]:
        """Return what changes while a job works here: claims, and sizes of histories."""
        claims = {(entry.key, entry.size) for entry in self._store.list(TERMS)}
        try:
            return claims | {(path.name, path.stat().st_size) for path in (self._run_dir / FOLDER).glob("*.jsonl")}
        except OSError:
            return claims


def _is_one_process_here(claim: Claim) -> bool:
    """Return True if a claim is of a process without launcher on this machine, in the same container.

    A claim of an older version does not name the container.
    """
    here = process_identity()
    is_near = (claim.host, claim.boot) == (here["host"], here["boot"]) and claim.space in ("", pid_space())
    return not claim.run_id and is_near


def _has_ended_here(claim: Claim) -> bool:
    """Return True if a claim is of a process of this machine that has ended: an ordinary restart."""
    return _is_one_process_here(claim) and not is_alive(claim.pid, claim.born)


_only_one = "and two jobs in one folder fence each other off"


def taken_over(store: Store, term: int, by: Claim) -> OtherJobError:
    """Return the error that ends a job whose lineage another one continues."""
    return OtherJobError(
        f"{store.url}: {by.owner} has claimed term {by.term} at {_moment(by.at)}, above term {term} of this job, "
        f"{_only_one}: this one ends. What it has not committed is lost; the other continues from its newest commit. "
        "Give each job a run.dir and checkpoint.url of its own, and all nodes of a job one etcd"
    )


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
