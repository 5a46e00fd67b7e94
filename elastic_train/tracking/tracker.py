"""Tracking without waiting: one thread writes values to a local file, others send its lines to trackers.

The local file is authoritative; a tracker may be down, slow or gone. Since none can take back values, a thread sends
only settled ones: up to the newest commit, and everything once a job is over. It skips steps up to the tracker's
furthest one of the metric. So each value arrives once, and is the lineage's, after restarts, rollbacks and failed
calls. A thread stops when its run has a newer term, which then sends. `sync` does the same afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_train.core.lineage import Interval
from elastic_train.system.files import locked_by
from elastic_train.system.wording import first_line
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.delivery import (
    SEND_EVERY_S,
    Delivery,
    Destination,
    Job,
    LostValuesError,
    attempt,
    code_tags,
)
from elastic_train.tracking.metric_log import (
    LineageReader,
    MetricsWriter,
    Settled,
    Values,
    metrics_path,
    terms,
)
from elastic_train.tracking.mlflow_run import COMMIT_TAG, bound_requests, resolve

log = logging.getLogger(__name__)

STATUSES = ("FINISHED", "FAILED", "KILLED")
FLUSH_TIMEOUT_S = {"FINISHED": 20.0, "FAILED": 20.0, "KILLED": 5.0}
WRITE_TIMEOUT_S = 5.0
"""Seconds that a job's end, and the sending thread, wait for lines still to be written to the file."""
FIRST_STEPS_S = 3.0
"""Seconds that a continuing term leaves the interpreter to its first steps: a process that leads for the first time
imports a tracker's library for seconds, and values are less urgent than the next step."""
MAX_FAILURES_IN_A_ROW = 500
MAX_FAILURES_AWAITED = 3
_LONGEST_PAUSE_S = 60.0


class Tracker:
    """One term's values: `log` records them, a daemon thread sends them once settled."""

    def __init__(
        self, files: BackgroundFiles, writer: MetricsWriter, mlflow: _Sending | None, others: Sequence[_Sending]
    ) -> None:
        self._files = files
        self._writer: MetricsWriter | None = writer
        self._mlflow = mlflow
        self._sendings = [*([mlflow] if mlflow is not None else []), *others]

    @staticmethod
    def start(
        *,
        files: BackgroundFiles,
        run_dir: Path,
        term: int,
        config: Mapping[str, object],
        mlflow_uri: str | None,
        experiment: str,
        run_name: str,
        intervals: Sequence[Interval] = (),
        settled: int = 0,
        tags: Mapping[str, str] | None = None,
        others: Sequence[Destination] = (),
    ) -> Tracker:
        """Begin a term's file, written by `files`, and the threads that send it to trackers.

        The term resumes from the steps in `intervals`, up to `settled` of which are committed; `tags` describe it;
        `others` are trackers beside MLflow.
        """
        writer = MetricsWriter(files.lines(metrics_path(run_dir, term)), term)
        writer.begin(intervals)

        def begin(destination: Destination) -> _Sending:
            return _Sending(destination, run_dir, term, intervals, files)

        mlflow = None
        if mlflow_uri is not None:
            bound_requests()
            job = Job(run_dir, config, resolve(mlflow_uri), experiment, run_name)
            mlflow = begin(Delivery(job, goes_on=True))
        tracker = Tracker(files, writer, mlflow, [begin(destination) for destination in others])
        tracker._settle(settled, code_tags() | dict(tags or {}))
        return tracker

    def log(self, step: int, values: Mapping[str, float], is_higher_better: Mapping[str, bool] | None = None) -> None:
        """Record a step's values; the best is kept for those in `is_higher_better`.

        A folder that does not accept lines costs values, never the training.
        """
        if self._writer is not None:
            self._writer.values(step, values, is_higher_better or {})

    def commit(self, step: int, key: str) -> None:
        """Record a published commit: everything logged up to its step is settled, and is sent."""
        self._settle(step, {COMMIT_TAG: key})

    def wait_run_id(self, timeout_s: float) -> str | None:
        """Return the run's id in MLflow; None after `timeout_s`, or sooner if the tracker fails a few times."""
        return None if self._mlflow is None else self._mlflow.wait_run_id(timeout_s)

    def finish(self, status: str, *, goes_on: bool = False) -> None:
        """Record how the term ended, and give the thread a bounded time to send the rest and the status.

        If the job `goes_on` in another process, uncommitted steps are recomputed and not sent.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
        if self._writer is None:
            return
        self._writer.end(status)
        self._writer = None
        self._files.flush(WRITE_TIMEOUT_S)  # with the status set, the sending thread reads to the end of the file
        for sending in self._sendings:
            sending.ask_to_finish(status, goes_on)
        for sending in self._sendings:
            if not sending.is_finished(FLUSH_TIMEOUT_S[status]):
                log.warning("%s does not have all of this run yet; %s", sending.to.name, sending.to.remedy)

    def pause(self) -> None:
        """Close the term's file without ending the run: another term's tracker continues."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _settle(self, step: int, tags: Mapping[str, str]) -> None:
        if self._writer is not None:
            self._writer.settled(step, tags)
        for sending in self._sendings:
            sending.settled = step


class _Sending:
    """The sending thread: opens the run, sends older terms' lines and then its own as they settle, and ends the run."""

    def __init__(
        self, to: Destination, run_dir: Path, term: int, intervals: Sequence[Interval], files: BackgroundFiles
    ) -> None:
        self.to = to
        self.num_failures = 0
        self.settled: float = 0
        self._run_dir, self._term, self._intervals, self._files = run_dir, term, intervals, files
        self._lock, self._is_locked, self._is_open = contextlib.ExitStack(), False, False
        self._lines: LineageReader | None = None
        self._piece: list[Values | Settled] = []
        self._failures_in_a_row = 0
        self._reported: set[str] = set()
        self._run_id: str | None = None
        self._has_answer = threading.Event()
        self._is_awaited = threading.Event()
        self._num_failures_before = 0
        self._is_through = threading.Event()
        self._status: str | None = None
        self._is_complete = False
        try:
            threading.Thread(target=self._supervise, name=f"elastic-train: {to.name}", daemon=True).start()
        except RuntimeError as error:  # no thread can be started: the next term sends this one's values
            self._show("cannot be reached", error)
            self._is_through.set()

    def wait_run_id(self, timeout_s: float) -> str | None:
        self._has_answer.clear()
        if self._run_id is None and not self._is_through.is_set():
            self._hurry()
            self._has_answer.wait(timeout_s)
            self._is_awaited.clear()
        return self._run_id

    def ask_to_finish(self, status: str, goes_on: bool) -> None:
        if status != "KILLED" and not goes_on:  # a job that was asked to leave resumes later
            self.settled = math.inf
        self._status = status
        self._hurry()

    def is_finished(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return True if it has sent everything."""
        return self._is_through.wait(timeout_s) and self._is_complete

    def _hurry(self) -> None:
        self._num_failures_before = self.num_failures
        self._is_awaited.set()

    def _supervise(self) -> None:
        try:
            self._recall()
            if self._intervals:
                self._is_awaited.wait(FIRST_STEPS_S)
            with self._lock:
                self._deliver_in_spite_of_failures()
        finally:
            self._is_through.set()
            self._has_answer.set()

    def _recall(self) -> None:
        """Take the run's id from the folder; wait for the lines of this process's earlier terms, which come first."""
        with contextlib.suppress(OSError):  # `open` says it
            if (known := self.to.known_id()) is not None:
                self._run_id = known
                self._has_answer.set()
        self._files.flush(WRITE_TIMEOUT_S)

    def _deliver_in_spite_of_failures(self) -> None:
        while self._failures_in_a_row < MAX_FAILURES_IN_A_ROW:
            try:
                if self._is_superseded():  # checked before every try: worlds may come and go while a tracker is down
                    self._is_complete = True
                    return
                self._deliver()
                return
            except LostValuesError as error:
                self._show("has lost values", error)
                self._failures_in_a_row += 1
                self._lines, self._piece = None, []  # from the beginning: the destination knows what it lacks
            except Exception as error:  # noqa: BLE001 - the supervisor: no tracker's failure may end training
                self._show("cannot be reached", error)
                self._failures_in_a_row += 1
            if self._is_awaited.is_set() and self.num_failures - self._num_failures_before >= MAX_FAILURES_AWAITED:
                self._has_answer.set()
                if self._status is not None:
                    break
            self._pause()
        if self._status is not None and self._is_open:
            attempt(lambda: self._is_superseded() or self._end())  # unsendable values must not hide how the run ended

    def _deliver(self) -> None:
        if not self._is_locked:
            lock = self._lock.enter_context((self._run_dir / self.to.lock).open("w"))
            locked_by(lock.fileno(), 10 * SEND_EVERY_S)  # held by a `sync`, or by a stopped older term
            self._is_locked = True
        self._run_id = self.to.open()
        self._is_open = True
        self._has_answer.set()
        if not self._is_superseded():
            self._describe()
        lines = self._lines = self._lines or LineageReader(self._run_dir, (self._term, self._intervals))
        while not self._is_superseded():
            is_ending = self._status is not None  # read first: everything logged before it was set is in the file
            while piece := self._piece or lines.read(self.settled):
                self._piece = piece
                self.to.send(piece)
                self._piece, self._failures_in_a_row = [], 0
            self.to.tag()
            if is_ending:
                self._is_complete = self._end()
                return
            self._is_awaited.wait(SEND_EVERY_S)
        self._is_complete = True

    def _describe(self) -> bool:
        failed = self.to.describe()
        for error in failed:
            self._show("did not take the run's description", error)
        return not failed

    def _end(self) -> bool:
        assert self._status is not None, "the status is set before the thread is asked to end"
        is_described = self._describe()
        self.to.end(self._status)
        return is_described

    def _is_superseded(self) -> bool:
        return any(term > self._term for term in terms(self._run_dir))

    def _pause(self) -> None:
        if self._is_awaited.is_set():
            time.sleep(SEND_EVERY_S)
        else:
            self._is_awaited.wait(min(_LONGEST_PAUSE_S, SEND_EVERY_S * 2 ** min(self._failures_in_a_row, 10)))

    def _show(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        if what not in self._reported:
            self._reported.add(what)
            log.warning("%s %s, training continues with local metrics: %s", self.to.name, what, first_line(error))
