"""TensorBoard's event files: <run>/tensorboard/events.out.tfevents.*, a new one per writing process.

`sent.json` records the last written step of each metric, so that a process that resumes the run appends what is
missing. It is written after the values: a process killed in between leaves values that are written twice, with the same
step and bits. Format and checksums are the tensorboard package's.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.system.files import locked_by, write_atomically
from elastic_train.tracking.delivery import SEND_EVERY_S, count_values, lacking
from elastic_train.tracking.metric_log import LineageReader, Settled, Values, settled_step, terms

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."
FOLDER, SENT, LOCK = "tensorboard", "sent.json", "tensorboard.lock"


class EventFiles:
    """A run's values for TensorBoard; nothing is written before a value is missing."""

    name, lock = "TensorBoard's folder", LOCK
    remedy = "`elastic-train sync RUN --tensorboard` writes the rest"

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._marks: dict[str, int] = {}
        self._writer: RecordWriter | None = None
        self._file: BinaryIO | None = None

    def known_id(self) -> str | None:
        return None

    def open(self) -> str:
        self._close()
        self._marks = {}
        with suppress(OSError, ValueError, AttributeError):  # none yet, or damaged by a power cut
            self._marks = {str(name): int(step) for name, step in json.loads(self._sent.read_text()).items()}
        return str(self._folder)

    def describe(self) -> list[Exception]:
        return []

    def send(self, lines: Sequence[Values | Settled]) -> int:
        missing, marks = lacking(lines, self._marks)
        if missing:
            self._append(missing)
            write_atomically(self._sent, json.dumps(marks) + "\n")
            self._marks = marks
        return count_values(missing)

    def tag(self) -> None:
        """Do nothing: event files have no tags."""

    def end(self, status: str) -> None:
        self._close()

    @property
    def _sent(self) -> Path:
        return self._folder / SENT

    def _append(self, lines: Sequence[Values]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer = self._writer = self._writer or self._begin()
        for line in lines:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.by_name.items()]
            event = Event(step=line.step, wall_time=line.t, summary=Summary(value=values))
            writer.write(event.SerializeToString())
        writer.flush()
        assert self._file is not None, "opened with its writer"
        os.fsync(self._file.fileno())  # `sent.json`, made durable next, must not be ahead

    def _begin(self) -> RecordWriter:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # TensorBoard reads a run's files in name order, which starts with the second: use one after all earlier files',
        # whatever other machines' clocks said.
        before = [_second_of(path) for path in self._folder.glob(f"{_PREFIX}*")]
        second = max(int(now), *(each + 1 for each in before)) if before else int(now)
        name = f"{_PREFIX}{second:010d}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self._file = (self._folder / name).open("xb")
        writer = RecordWriter(self._file)
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        return writer

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # unflushed values are not in `sent.json` either
                writer.close()


def _second_of(path: Path) -> int:
    text = path.name.removeprefix(_PREFIX).partition(".")[0]
    return int(text) if text.isdecimal() else 0


def check_installed() -> None:
    """Raise ConfigError with the install command if the package is missing."""
    with needed_for("tracking.tensorboard"):
        import tensorboard.summary.writer.record_writer  # noqa: F401


def sync_event_files(run_dir: Path) -> int:
    """Write what the event files lack, up to the run's newest commit or its end; return the number of values.

    Raise ConfigError for a folder without metrics, or while the run itself is sending them.
    """
    if not terms(run_dir):
        raise ConfigError(f"{run_dir} has no metrics to write; name the run.dir of a run that has trained")
    check_installed()
    files, lines, settled, num = EventFiles(run_dir), LineageReader(run_dir), settled_step(run_dir), 0
    with (run_dir / LOCK).open("w") as lock:
        if not locked_by(lock.fileno(), 2 * SEND_EVERY_S):
            raise ConfigError(f"{run_dir}: a trainer is running and writes its event files itself; sync afterwards")
        files.open()
        while piece := lines.read(settled):
            num += files.send(piece)
        files.end("")
    return num
