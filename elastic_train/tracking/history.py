"""The history of a run: one JSON line per event, one file per process.

Training never waits for it: a thread writes the lines in order, within milliseconds. A SIGKILL costs the lines still
queued; readers skip a torn last line (the machine died). Runs are judged by these events: form, restore, step, commit,
rollback, end.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TypeVar

from elastic_train.core.accounting import CoverageSums
from elastic_train.core.arrays import Ranges
from elastic_train.system.process_identity import process_identity, process_usage, slurm_job
from elastic_train.tracking.background_files import ANSWER_S, BackgroundFiles
from elastic_train.tracking.history_files import (
    FOLDER,
    HEAD_FILE,
    LastApplied,
    Stagnation,
    last_applied,
    newest_commit,
    num_ended,
    prune,
    stagnation,
)
from rendezvous.agent.worker_end import has_noted_end, note_end_in
from rendezvous.context import live_context

T = TypeVar("T")
Standing = Literal["settled", "unsettled", "pending"]
"""A rank's knowledge about a step: all ranks can apply it (settled); only that this rank has applied it, having lost a
peer at the point of no return (unsettled); or only that it could, should the survivors find that it may have been
applied (pending)."""
HEAD = ("form", "restore")
"""Lines repeated at the start of every later part of a history, marked `again`: the rest depends on them."""
MOST_BYTES = 256 << 20
"""Most bytes of one process's history of one term; beyond, its older half is deleted."""
MOST_TERMS = 100
"""Number of terms whose histories are kept; older ones are summarised for recovery."""
MOST_NOTED_BYTES = 1 << 16
"""Most bytes kept of a host's failed health checks, or of a process's error."""
MOST_WHY = 2000
"""Most characters kept of an error."""
VALIDATE_FLUSH_S = 1.0
"""Seconds that a validation waits for its start to be on file."""

READ_FLUSH_S = 5.0
"""Seconds that a step waits, with `run.forensic`, for its sample ids to be on file."""


class History:
    """Appends this process's lines to <run.dir>/history/<term>-<rank>-<unique>.jsonl, written by `files`.

    No method raises or waits for the folder, except `read` and `validate`. Lines that cannot be written are lost: the
    chaos judge needs them, the proof in the commits does not.
    """

    def __init__(
        self, files: BackgroundFiles, run_dir: str | Path, term: int, rank: int, most_bytes: int | None = None
    ) -> None:
        """Name the file; `most_bytes` limits what is kept of it (see `LineFile`)."""
        self.term, self._rank = term, rank
        self._run_dir, self._files = run_dir, files
        path = Path(run_dir) / FOLDER / f"{term:08d}-{rank:05d}-{uuid.uuid4().hex[:12]}.jsonl"
        self._lines = files.lines(path, most_bytes)

    @property
    def folder(self) -> str:
        return str(self._run_dir)

    def form(
        self, *, world: int, cause: str, joined_at: float | None, sealed_at: float | None, started_at: float
    ) -> None:
        times = {"joined_at": joined_at, "sealed_at": sealed_at, "started_at": started_at}
        who = _who()
        self._write("form", world=world, cause=cause, **times, **who, **slurm_job(), holds=process_usage())
        # the agent, which lives on, records in its own file what kills this process
        name = f"failed-{self._rank:05d}-{who['host']}-{who.get('boot')}"
        noted = {
            "op": "failed",
            "term": 0,
            "of_rank": self._rank,
            "of_term": self.term,
            "started_at": started_at,
            **who,
        }
        note_end_in(Path(self._run_dir) / FOLDER, name, **noted)

    def restore(
        self,
        *,
        step: int,
        epoch: int,
        offset: int,
        commit: str | None,
        given_by: int | None,
        applied_by: int | None,
        seconds: float,
        skipped: list[tuple[str, str]],
        resumed: Mapping[str, object] | None,
        num_lost: int = 0,
        holds_nothing: bool = False,
    ) -> None:
        """Record how the applied state was obtained: from a commit, kept, received from a rank, or initialised.

        `commit` is the next commit's parent; `applied_by` is the term that applied the state's last step; `resumed` is
        the banner's text. `num_lost` shards had no holder left, so a commit was read; a rank that `holds_nothing` has
        no shard, because it cannot write commits.
        """
        place = {"step": step, "epoch": epoch, "offset": offset, "commit": commit}
        place |= {"given_by": given_by, "applied_by": applied_by}
        shards = ({"lost": num_lost} if num_lost else {}) | ({"holds_nothing": True} if holds_nothing else {})
        self._write("restore", **place, seconds=seconds, skipped=skipped, resumed=resumed, **shards)

    def step(
        self,
        *,
        step: int,
        epoch: int,
        lo: int,
        hi: int,
        lanes: range,
        num_samples: int,
        num_left_out: int = 0,
        world: int,
        loss: float | None,
        standing: Standing = "settled",
        place: int | None = None,
    ) -> None:
        """Record an applied step: every lane's offsets [lo, hi) of the epoch; `step` counts applied steps.

        `place` is this rank's in a cell, whose ranks compute the same lanes; None if every rank is a replica.

        `num_left_out` of the samples are in holes and were not read. `standing` is what this rank knew about the
        others.
        """
        which = (lanes.start, lanes.stop, lanes.step)[: 2 if lanes.step == 1 else 3]
        where = {"epoch": epoch, "lo": lo, "hi": hi, "lanes": which}
        counts = {"num_samples": num_samples, **({"num_left_out": num_left_out} if num_left_out else {})}
        known: dict[str, object] = {} if standing == "settled" else {standing: True}
        known |= {} if place is None else {"place": place}
        self._write("step", step=step, **where, **counts, world=world, loss=loss, **known)

    def nonfinite(self, *, step: int, loss: float, norm: float, samples: Mapping[int, Ranges]) -> None:
        """Record a non-finite loss or gradient; `samples` are the responsible ids of this rank, by lane."""
        self._write("nonfinite", step=step, loss=repr(loss), norm=repr(norm), samples=samples)

    def read(self, *, step: int, epoch: int, ids: Ranges, world: int) -> None:
        """Record the sample ids that a rank is about to use, in a world of size `world`; they count if the step is
        applied.

        Written before the reduction, so an applied step has the lines of all its ranks, even of one that died later.
        Waits at most `READ_FLUSH_S` for a folder that hangs, once: then an audit finds steps without ids.
        """
        self._write("read", step=step, epoch=epoch, ids=ids, world=world)
        self._files.flush(READ_FLUSH_S)

    def commit(
        self,
        *,
        step: int,
        key: str,
        digest: str,
        parent: str | None,
        weights_sha256: str,
        created_at: float,
        seconds: float,
        stall_s: float,
    ) -> None:
        """Record a published commit, `seconds` after its start, of which training waited `stall_s`.

        It is written at a later step boundary, when retention may already have deleted the commit.
        """
        times = {"created_at": created_at, "seconds": seconds, "stall_s": stall_s}
        what = {"key": key, "digest": digest, "parent": parent, "weights_sha256": weights_sha256}
        self._write("commit", step=step, **what, **times)
        self._name_newest(key, step)

    def _name_newest(self, key: str, step: int) -> None:
        self._files.replace(Path(self._run_dir) / HEAD_FILE, json.dumps({"commit": key, "step": step}) + "\n")

    def phases(self, *, step: int, steps: int, seconds: Sequence[Sequence[float]]) -> None:
        """Record every rank's time over the last `steps` steps, by rank: see `RankFacts` for the columns."""
        rows = [[round(value, 6) for value in row] for row in seconds]
        self._write("phases", step=step, steps=steps, seconds=rows)

    def memory(self, *, step: int, facts: Mapping[str, object]) -> None:
        """Record this rank's memory use after a step: see `MemoryFacts` for the fields."""
        self._write("memory", step=step, **facts)

    def event(
        self,
        *,
        kind: str,
        step: int,
        since: int,
        who: tuple[int, str | None] | None,
        measured: tuple[float, float, str],
        is_over: bool,
        then: str | None = None,
        audited: tuple[int, Sequence[int]] | None = None,
    ) -> None:
        """Record that something went wrong, or is over: rank and host, measured and usual value, and unit.

        `then` is the consequence, if any; `audited` the lane and its samples, for events about samples.
        """
        rank, host = who or (None, None)
        value, usual, unit = measured
        evidence = {"value": repr(value) if not math.isfinite(value) else value, "usual": usual, "unit": unit.strip()}
        what = {"kind": kind, "step": step, "since": since, "of_rank": rank, "host": host, "over": is_over}
        of_lane = {} if audited is None else {"lane": audited[0], "samples": [*audited[1]]}
        self._write("event", **what, **({} if is_over else evidence), **of_lane, **({"then": then} if then else {}))

    def unwritable(self, *, step: int, why: str) -> None:
        """Record that this process cannot write commits, although others can."""
        self._write("unwritable", step=step, why=why)

    def no_progress(self, *, step: int) -> None:
        """Record that the job gives up: worlds ended without a further step. Earlier ones do not count again."""
        self._write("no_progress", step=step)

    def validate(self, *, step: int) -> None:
        """Record that this step's state is about to be validated: a crash from here on is due to the validation set.

        Waits a moment until the line is on file, but only once if the folder hangs.
        """
        self._write("validate", step=step)
        self._files.flush(VALIDATE_FLUSH_S)

    def leave(self, *, step: int) -> None:
        """Record a departure on request: other ranks, or a commit, have this step's state."""
        self._write("leave", step=step)

    def rollback(self, *, from_step: int, to_step: int) -> None:
        """Record that this process discards applied steps: its world resumes from `to_step`."""
        self._write("rollback", from_step=from_step, to_step=to_step)

    def end(self, *, status: str, step: int, weights_sha256: str, coverage: CoverageSums) -> None:
        self._write("end", status=status, step=step, weights_sha256=weights_sha256, coverage=asdict(coverage))

    def last_applied(self) -> LastApplied | None:
        """Return the furthest step of earlier terms; None if there is none, or the folder does not answer in time."""

        return self._ask(lambda: last_applied(self._run_dir, self.term), None)

    def newest_commit(self) -> str | None:
        """Return the key of the newest commit published from this folder; None if it does not answer in time."""
        return self._ask(lambda: newest_commit(self._run_dir), None)

    def stagnation(self, most: int) -> Stagnation:
        """Return how many earlier terms in a row, up to `most`, made no progress; 0 if the folder does not answer."""
        return self._ask(lambda: stagnation(self._run_dir, self.term, most), Stagnation())

    def num_ended(self, num_terms: int) -> int:
        """Return how many processes of the last `num_terms` earlier terms ended; 0 if the folder does not answer."""
        return self._ask(lambda: num_ended(self._run_dir, self.term, num_terms), 0)

    def _ask(self, look: Callable[[], T], otherwise: T) -> T:
        """Look at the run's histories, after flushing the lines of this process's earlier terms."""

        def looked() -> T:
            self._files.flush(ANSWER_S)
            return look()

        return self._files.ask(looked, otherwise)

    def prune(self, keep_terms: int) -> None:
        """Delete all but the newest terms' histories, if due, on the thread; returns at once."""
        self._files.attempt(Path(self._run_dir) / FOLDER, lambda: prune(self._run_dir, self.term, keep_terms))

    def close(self) -> None:
        """Close the file after its last line; returns at once."""
        self._lines.close()

    def _write(self, op: str, **fields: object) -> None:
        said = {"op": op, "t": time.time(), "term": self.term, "rank": self._rank, **fields}
        again = json.dumps({**said, "again": True}).encode() if op in HEAD else None
        self._lines.append(json.dumps(said).encode(), again)


class UnformedWorlds:
    """Appends a line for every world that did not form to <run.dir>/history/unformed-<host>-<process>.jsonl.

    The process is identified by pid, birth time and boot id, as hosts with the same name may have the same pids. Such a
    world has no history: its ranks have not met. The file starts with its first line.
    """

    def __init__(self, files: BackgroundFiles, run_dir: str | Path, most_bytes: int | None = None) -> None:
        self._who = _who()
        self._lines = files.lines(Path(run_dir) / FOLDER / f"{_own_name('unformed')}.jsonl", most_bytes)

    def note(self, term: int, rank: int, world: int, why: str) -> None:
        """Record a world of size `world` that did not form, with the reason."""
        said = {"op": "unformed", "t": time.time(), "term": term, "rank": rank, "world": world, "why": why}
        self._lines.append(json.dumps({**said, **self._who}).encode())


def note_unfit(files: BackgroundFiles, run_dir: str | Path, why: str) -> None:
    """Record in <run.dir>/history/unfit-<host>.jsonl that this machine failed its health check and was rejected."""
    _note(files, run_dir, f"unfit-{process_identity()['host']}", "unfit", why=why)


def note_failed(
    run_dir: str | Path, *, exit_code: int, step: int, kind: str, why: str, started_at: float, is_launcher: bool = False
) -> None:
    """Record in <run.dir>/history/failed-<rank>-<host>-<process>.jsonl why this process ends, if the run has begun.

    `kind` is the error's class, `started_at` the process's start (unix seconds). `of_rank` is null for a launcher, and
    in a live job, whose processes have another rank in each world. Waits a moment.
    """
    files = BackgroundFiles()
    if files.ask(lambda: (Path(run_dir) / FOLDER).is_dir(), False):
        rank = int(os.environ.get("RANK", "0"))
        facts = {
            "of_rank": None if is_launcher or live_context() else rank,
            **({"launcher": True} if is_launcher else {}),
            "exit_code": exit_code,
            "step": step,
            "kind": kind,
            "why": why[:MOST_WHY],
        }
        _note(files, run_dir, _own_name(f"failed-{rank:05d}"), "failed", **facts, started_at=started_at)
        files.flush(ANSWER_S)
        has_noted_end()


def _who() -> dict[str, object]:
    return {"pid": os.getpid(), **process_identity()}


def _own_name(what: str) -> str:
    """Return a name unique to this process: hosts with the same name may have the same pids."""
    who = _who()
    return "-".join(str(part) for part in (what, *(who[key] for key in ("host", "pid", "born", "boot"))))


def _note(files: BackgroundFiles, run_dir: str | Path, name: str, op: str, **fields: object) -> None:
    """Append a line to a file of a process that is in no world."""
    lines = files.lines(Path(run_dir) / FOLDER / f"{name}.jsonl", MOST_NOTED_BYTES)
    lines.append(json.dumps({"op": op, "t": time.time(), "term": 0, **fields, **_who()}).encode())
    lines.close()
