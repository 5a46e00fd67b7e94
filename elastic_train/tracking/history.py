"""The history of a run: one JSON line per event, in one file per process.

A line reaches the operating system before the call returns, so it survives SIGKILL; readers skip a torn last line (the
machine died). The events are those by which a run is judged afterwards: form, restore, step, commit, rollback, end.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_train.core.arrays import Ranges
from elastic_train.core.coverage import CoverageSums
from elastic_train.errors import StorageError

log = logging.getLogger(__name__)

FOLDER = "history"
_TAIL_BYTES = 4096
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LastApplied:
    """The furthest step that any rank of earlier terms has applied, and when (unix seconds)."""

    term: int
    step: int
    world: int
    at: float


class History:
    """Appends this process's lines to <run.dir>/history/<term>-<rank>-<pid>.jsonl.

    Opening raises StorageError if nothing can be written. A later line that cannot be written (a full disk) is counted
    and logged once, and training continues: the proof in the commits does not need it; only the chaos judge does.
    """

    def __init__(self, run_dir: str | Path, term: int, rank: int) -> None:
        self.term, self._rank, self.num_failures = term, rank, 0
        self._path = Path(run_dir) / FOLDER / f"{term:08d}-{rank:05d}-{os.getpid()}.jsonl"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StorageError(f"the run's history cannot be written: {error}") from error

    def form(
        self, *, world: int, cause: str, joined_at: float | None, sealed_at: float | None, started_at: float
    ) -> None:
        """The world has formed."""
        times = {"joined_at": joined_at, "sealed_at": sealed_at, "started_at": started_at}
        self._write("form", world=world, pid=os.getpid(), cause=cause, **times)

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
    ) -> None:
        """The applied state was read from a commit, kept, handed over by a rank, or initialised.

        `commit` is the parent of the next commit; `applied_by` is the term that applied the state's last step;
        `resumed` is what the banner said of it.
        """
        place = {"step": step, "epoch": epoch, "offset": offset, "commit": commit}
        place |= {"given_by": given_by, "applied_by": applied_by}
        self._write("restore", **place, seconds=seconds, skipped=skipped, resumed=resumed)

    def step(
        self,
        *,
        step: int,
        epoch: int,
        lo: int,
        hi: int,
        lanes: tuple[int, int],
        num_samples: int,
        num_left_out: int = 0,
        world: int,
        loss: float,
    ) -> None:
        """A step was applied: every lane's offsets [lo, hi) of the epoch; `step` counts the steps applied so far.

        `num_left_out` of these samples are in holes and were not read.
        """
        where = {"epoch": epoch, "lo": lo, "hi": hi, "lanes": lanes}
        counts = {"num_samples": num_samples, **({"num_left_out": num_left_out} if num_left_out else {})}
        self._write("step", step=step, **where, **counts, world=world, loss=loss)

    def nonfinite(self, *, step: int, loss: float, norm: float, samples: Mapping[int, Ranges]) -> None:
        """A step's loss or gradient was not finite; `samples` are, by lane, ids of this rank's that did it."""
        self._write("nonfinite", step=step, loss=repr(loss), norm=repr(norm), samples=samples)

    def read(self, *, step: int, epoch: int, ids: Ranges) -> None:
        """A rank is about to use the samples of these ids in the step; they count only if the step is applied.

        Written before the reduction, so every applied step has the lines of all ranks, even of one that died later.
        """
        self._write("read", step=step, epoch=epoch, ids=ids)

    def commit(
        self,
        *,
        step: int,
        key: str,
        digest: str,
        parent: str | None,
        created_at: float,
        seconds: float,
        stall_s: float,
    ) -> None:
        """A commit was published, `seconds` after it had begun; training waited `stall_s` of them.

        It is written at a later step boundary, when retention may already have deleted the commit and its record.
        """
        times = {"created_at": created_at, "seconds": seconds, "stall_s": stall_s}
        self._write("commit", step=step, key=key, digest=digest, parent=parent, **times)

    def no_progress(self, *, step: int) -> None:
        """The job gives up: world after world ended without a step after this one. Those before do not count again."""
        self._write("no_progress", step=step)

    def rollback(self, *, from_step: int, to_step: int) -> None:
        """This process gives up steps that it had applied: its world resumes from `to_step`."""
        self._write("rollback", from_step=from_step, to_step=to_step)

    def end(self, *, status: str, step: int, weights_sha256: str, coverage: CoverageSums) -> None:
        """The process has finished."""
        self._write("end", status=status, step=step, weights_sha256=weights_sha256, coverage=asdict(coverage))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, op: str, **fields: object) -> None:
        line = json.dumps({"op": op, "t": time.time(), "term": self.term, "rank": self._rank, **fields})
        content = line.encode() + b"\n"
        try:
            num_written = os.write(self._file, content)
            if num_written < len(content):
                os.write(self._file, b"\n")
                raise OSError(f"a line was cut after {num_written} bytes")
        except OSError as error:
            self.num_failures += 1
            if self.num_failures == 1:
                log.warning("%s: the run's history has gaps from here on: %s; make room on the disk", self._path, error)


def last_applied(run_dir: str | Path, before_term: int) -> LastApplied | None:
    """Return the furthest step that the newest term before `before_term` applied; reads the ends of its files only."""
    files: dict[int, list[Path]] = {}
    for path in (Path(run_dir) / FOLDER).glob("[0-9]*-*-*.jsonl"):
        files.setdefault(term_of(path), []).append(path)
    for term in sorted((term for term in files if term < before_term), reverse=True):
        lines = [line for path in files[term] for line in last_step_lines(path)]
        if lines:
            last = max(lines, key=lambda line: (int(str(line["step"])), float(str(line["t"]))))
            return LastApplied(term, int(str(last["step"])), int(str(last["world"])), float(str(last["t"])))
    return None


def num_without_step(run_dir: str | Path, before_term: int, most: int) -> int:
    """Count the newest terms before `before_term` that ended without a step, up to `most` of them.

    Reads rank 0's histories, newest first, to the first with a step, or in which the job gave up.
    """
    num = 0
    for path in reversed(leader_files(run_dir)):
        if num == most:
            break
        if term_of(path) < before_term:
            if last_step_lines(path) or b'"no_progress"' in path.read_bytes():
                break
            num += 1
    return num


def leader_files(run_dir: str | Path) -> list[Path]:
    """Return the histories of rank 0, the oldest term first."""
    return sorted((Path(run_dir) / FOLDER).glob("[0-9]*-00000-*.jsonl"))


def term_of(path: Path) -> int:
    """Return the term that a history's file name says."""
    return int(path.name.partition("-")[0])


def restore_line(path: Path) -> dict[str, object] | None:
    """Return the line that says how a process's state was restored; reads the beginning of its file only."""
    with path.open("rb") as file:
        return next((line for line in lines_of(file.read(_HEAD_BYTES)) if line["op"] == "restore"), None)


def last_step_lines(path: Path) -> list[dict[str, object]]:
    """Return the step lines at the end of a history: at least one if it has any; reads the end of its file only."""
    size, num_bytes = path.stat().st_size, _TAIL_BYTES
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - num_bytes))
            content = file.read()
        # The first line is torn by where we began to read, and no JSON object then.
        steps = [line for line in lines_of(content) if line["op"] == "step"]
        if steps or num_bytes >= size:
            return steps
        num_bytes *= 4


def lines_of(content: bytes) -> Iterator[dict[str, object]]:
    """Yield the lines of a history, each with its `op`; torn ones are passed over."""
    for line in content.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and "op" in fields:
            yield fields
