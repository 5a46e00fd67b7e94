"""Traces of chosen steps, for Perfetto: torch's operations, phases of the steps, and operations between ranks.

A tracer is told when a step has been applied. It listens to the clock and to the groups between two such moments, so
other steps cost nothing, and results are not affected: if a trace cannot be taken or written, one message says so and
training continues. Each trace records when all ranks have gathered a step's rows, which aligns traces of machines with
different clocks.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from elastic_train.config.monitoring import ProfileConfig
from elastic_train.insight.phases import Phase, StepClock
from elastic_train.parallel.point_to_point import Operation, Traffic
from elastic_train.system.wording import first_line

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)
FOLDER, FACTS = "profile", "elasticTrain"
WRITE_TIMEOUT_S = 60.0
"""Seconds that the end of a world waits for a trace being written."""


_TRACKS = 900_000_000
"""First thread number of artificial tracks, above any real thread's."""
_Span = tuple[str, int, int | None, dict[str, int]]


class Listening(Protocol):
    """A group's interface for a tracer: report operations, or stop."""

    def listen(self, traffic: Traffic | None) -> None: ...


@dataclass(slots=True)
class _Taken:
    """Notes in addition to torch's trace; times are unix nanoseconds of this machine."""

    first: int
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    gathered: dict[int, int] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


class Tracer:
    """Takes the traces of one process in one world."""

    def __init__(
        self, keys: ProfileConfig, run_dir: str | Path, *, rank: int, term: int, clock: StepClock, group: Listening
    ) -> None:
        self._keys, self._folder = keys, Path(run_dir) / FOLDER
        self._rank, self._term, self._clock, self._group = rank, term, clock, group
        self._profile: profile | None = None
        self._taken = _Taken(0)
        self._writing: threading.Thread | None = None
        self._step = 0
        self._has_failed = False

    def applied(self, step: int) -> None:
        """Note an applied step, or the world's initial one: end a trace, begin the next."""
        if self._profile is not None:
            self._taken.applied[step] = time.time_ns()
            if step + 1 not in self._keys.at_steps:
                self._end()
        self._step = step
        if self._profile is None and step + 1 in self._keys.at_steps and not self._has_failed:
            self._begin(step + 1)

    def close(self) -> None:
        """End the current trace, and wait a bounded time until it is written."""
        if self._profile is not None:
            self._end()
        if self._writing is not None:
            self._writing.join(WRITE_TIMEOUT_S)

    def _begin(self, step: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs start and stop to stderr
        import torch
        from torch.profiler import ProfilerActivity, profile

        has_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        made = profile(activities=activities, record_shapes=True, profile_memory=self._keys.memory)
        try:
            made.start()
        except RuntimeError as error:
            self._fail(f"no trace can be taken from step {step} on ({first_line(error)})")
            return
        self._profile, self._taken = made, _Taken(step)
        self._clock.listener = self._note
        self._group.listen(self._taken.traffic)

    def _note(self, phase: Phase, seconds: float) -> None:
        """Take a mark of the clock. A step's first wait ends when all ranks have gathered its rows."""
        now = time.time_ns()
        self._taken.spans.append((phase, now - int(seconds * 1e9), now))
        if phase == "wait":
            self._taken.gathered.setdefault(self._step + 1, now)

    def _end(self) -> None:
        made, self._profile = self._profile, None
        assert made is not None, "only what was begun is ended"
        self._clock.listener = None
        self._group.listen(None)
        taken = self._taken
        writing = threading.Thread(target=lambda: self._write(made, taken), name="trace", daemon=True)
        try:
            made.stop()
            if self._writing is not None:
                self._writing.join(WRITE_TIMEOUT_S)
            writing.start()
        except RuntimeError as error:
            self._fail(f"the trace of step {taken.first} was lost ({first_line(error)})")
            return
        self._writing = writing

    def _write(self, made: profile, taken: _Taken) -> None:
        """Write the trace in the run's folder, under its final name once complete."""
        path = self._folder / trace_name(taken.first, self._term, self._rank)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with tempfile.TemporaryDirectory(prefix="elastic-train-trace-") as folder:
                made.export_chrome_trace(f"{folder}/trace.json")
                tree = json.loads(Path(folder, "trace.json").read_text())
            _add(tree, taken, self._rank, self._term)
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(draft, "wt", compresslevel=3) as file:
                json.dump(tree, file)
            draft.replace(path)
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(f"the trace of step {taken.first} cannot be written to {self._folder} ({first_line(error)})")
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _fail(self, what: str) -> None:
        """Log the first failure, for the user who profiles."""
        if not self._has_failed:
            self._has_failed = True
            log.warning("%s: training continues without traces; make room, or set profile.at_steps to []", what)


def trace_name(step: int, term: int, rank: int) -> str:
    """Return a rank's trace name below the folder of traces."""
    return f"step-{step:012d}/{term:08d}-{rank:05d}.trace.json.gz"


def _add(tree: dict[str, object], taken: _Taken, rank: int, term: int) -> None:
    """Add phases and operations to torch's trace as separate threads, and data to align it with other ranks'."""
    base, pid = tree.get("baseTimeNanoseconds"), os.getpid()
    events = tree.get("traceEvents")
    assert isinstance(base, int) and isinstance(events, list), "torch writes both"
    tracks: dict[str, list[_Span]] = {
        "steps": [(f"step {step}", lo, hi, {}) for step, lo, hi in _steps(taken)],
        "phases": [(name, lo, hi, {}) for name, lo, hi in taken.spans],
        "exchanges": [(op.kind, op.began_ns, op.ended_ns, {"bytes": op.num_bytes}) for op in taken.traffic.operations],
    }
    for place, (name, spans) in enumerate(tracks.items()):
        thread = {"pid": pid, "tid": _TRACKS + place}
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": place - len(tracks)}})
        for what, lo, hi, args in spans:
            times = {"ts": (lo - base) / 1000, "dur": max(0, (hi or lo) - lo) / 1000}
            events.append({"ph": "X", "cat": name, "name": what, **thread, **times, "args": args})
    tree[FACTS] = {
        "rank": rank,
        "term": term,
        "host": socket.gethostname(),
        "first_step": taken.first,
        "gathered_ns": {str(step): at for step, at in taken.gathered.items()},
        "operations": [_facts_of(op) for op in taken.traffic.operations],
        "operations_left_out": taken.traffic.num_left_out,
    }


def _steps(taken: _Taken) -> list[tuple[int, int, int]]:
    lo = min([start for _, start, _ in taken.spans] or list(taken.applied.values()) or [0])
    found = []
    for step, at in sorted(taken.applied.items()):
        found.append((step, lo, at))
        lo = at
    return found


def _facts_of(operation: Operation) -> Sequence[object]:
    seconds = None if operation.ended_ns is None else (operation.ended_ns - operation.began_ns) / 1e9
    return operation.kind, operation.num_bytes, seconds
