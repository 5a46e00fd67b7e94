"""A run in Weights & Biases, online or as offline folders below <run>/wandb for a later `wandb sync`.

`wandb.json` in the run's folder has the run's id, so that all processes of a job continue one run, and the last step of
each metric that the package has written (`transaction_log`). Values that it was given but has not written, after a full
disk or a kill, are given again, to another file of the same run; uploading is the package's task. Values use their own
`step` metric, not the package's call count, which a resumed run may not decrease. A process has one package run for all
its terms, written by the package's own process, which ends some milliseconds after ours.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from elastic_train.system.extras import needed_for
from elastic_train.system.files import write_atomically
from elastic_train.tracking.delivery import LostValuesError, count_values, lacking, tags_of
from elastic_train.tracking.metric_log import Settled, Values
from elastic_train.tracking.mlflow_run import flatten

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

_BLOCK, _HEADER = 1 << 15, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


class TransactionLog:
    """The last step of each metric in a run's file; each read continues where the last one ended.

    Read what Weights & Biases has written of a run: its .wandb file, LevelDB's log format of protobuf records.

    The package takes values in memory and writes them in blocks from another process, which reports nothing when a
    disk is full, and then writes nothing more to that file. So only values read back from the file count as
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, int] = {}
        """Furthest step of each metric."""
        self._at = _HEADER

    def read(self) -> None:
        """Read what was appended, up to the first incomplete record, after making it durable."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            os.fsync(file.fileno())
            for content in self._records(file.seek(0, os.SEEK_END), file.fileno()):
                self._take(content)

    def _records(self, size: int, descriptor: int) -> Iterator[bytes]:
        at, whole = self._at, b""
        while at + _HEADER <= size:
            if _BLOCK - at % _BLOCK < _HEADER:
                at += _BLOCK - at % _BLOCK
                continue
            _, length, kind = struct.unpack("<IHB", os.pread(descriptor, _HEADER, at))
            if not _WHOLE <= kind <= _LAST or at + _HEADER + length > size:
                return
            whole = (b"" if kind in (_WHOLE, _FIRST) else whole) + os.pread(descriptor, length, at + _HEADER)
            at += _HEADER + length
            if kind in (_WHOLE, _LAST):
                self._at = at
                yield whole

    def _take(self, content: bytes) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        try:
            record = Record.FromString(content)
        except DecodeError:
            return
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if (step := values.pop("step", None)) is not None:
                self.steps |= {name: max(int(float(step)), self.steps.get(name, -1)) for name in values}


LINK, LOCK = "wandb.json", "wandb.lock"
Mode = Literal["online", "offline"]
_INIT_TIMEOUT_S = 60.0
_MOST_UNWRITTEN = 1 << 18
"""Characters of values that the package may hold before it writes a block: several times its usual number."""
_WRITTEN_S, _LOOK_S = 10.0, 0.1
"""Seconds for a finished run's file to become complete, and between looks at it."""


@dataclass(slots=True)
class _Open:
    """A run of this process: its file's content, and the last step of each metric that it was given."""

    run: Run
    log: TransactionLog
    given: dict[str, int] = field(default_factory=dict)
    num_unwritten: int = 0
    """Characters given since the file last grew."""


_RUNS: dict[str, _Open] = {}
"""Unfinished runs of this process by id: the next term continues its predecessor's."""
_OPENING = threading.Lock()
"""Held while a run begins, so that the next term does not begin a second one meanwhile."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """The folder's record of the run: its id and the last written step of each metric."""

    id: str
    steps: Mapping[str, int] = field(default_factory=dict)


class WeightsAndBiases:
    """A run's values for Weights & Biases; the sending thread imports the package and starts its process."""

    name, lock = "Weights & Biases", LOCK
    remedy = "the run's metrics/*.jsonl have all of it; the same line, started again, gives it the rest"

    def __init__(self, run_dir: Path, config: Mapping[str, object], mode: Mode, project: str, run_name: str) -> None:
        self._run_dir, self._config, self._mode = run_dir, config, mode
        self._project, self._run_name = project, run_name
        self._sent = _Sent("")
        self._open: _Open | None = None
        self._tags: dict[str, str] = {}

    def known_id(self) -> str | None:
        return self._recalled().id or None

    def open(self) -> str:
        """Begin or continue the run, and read which steps it has.

        Raise TimeoutError if an earlier term of this process is still beginning it.
        """
        if not _OPENING.acquire(timeout=_INIT_TIMEOUT_S):
            raise TimeoutError("an earlier term's wandb.init has not returned")
        try:
            return self._open_run()
        finally:
            _OPENING.release()

    def _open_run(self) -> str:
        found = self._recalled()
        self._sent = found if found.id else _Sent(uuid.uuid4().hex)
        if self._sent.id not in _RUNS:
            self._recall_files()
            run = self._begun()
            _RUNS[self._sent.id] = _Open(run, TransactionLog(Path(run.settings.sync_file)))
        self._open = _RUNS[self._sent.id]
        return self._sent.id

    def _recall_files(self) -> None:
        """Read the files of earlier processes, which may have more than these recorded."""
        for path in sorted((self._run_dir / "wandb").glob(f"*run-*/run-{self._sent.id}.wandb")):
            log = TransactionLog(path)
            log.read()
            self._note(log.steps)
        self._keep(self._sent)

    def _note(self, steps: Mapping[str, int]) -> None:
        self._sent = replace(self._sent, steps=_furthest(self._sent.steps, steps))

    def _begun(self) -> Run:
        """Begin the run in this process, leaving a task's own package run alone."""
        import wandb

        self._run_dir.mkdir(parents=True, exist_ok=True)
        logging.getLogger("wandb").setLevel(logging.ERROR)
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, save_code=False, init_timeout=_INIT_TIMEOUT_S
        )
        run = wandb.init(
            id=self._sent.id,
            resume="allow",
            reinit="create_new",
            mode=self._mode,
            dir=str(self._run_dir),
            project=self._project,
            name=self._run_name,
            config=dict(flatten(self._config)),
            settings=quiet,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def describe(self) -> list[Exception]:
        """Do nothing: the configuration is given when the run begins."""
        return []

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Log the values that the run lacks, by step."""
        assert self._open is not None, "a run is opened before it is sent to"
        missing, marks = lacking(lines, _furthest(self._sent.steps, self._open.given))
        self._tags |= tags_of(lines)
        for line in missing:
            self._open.run.log({**line.by_name, "step": line.step})
            self._open.num_unwritten += len(str(line.by_name))
        self._open.given = marks
        self._confirm(self._open)
        if self._open.num_unwritten > _MOST_UNWRITTEN:
            self._give_up(self._open)
        return count_values(missing)

    def _confirm(self, opened: _Open) -> bool:
        """Record what the run's file has; return True if that is everything it was given."""
        before = dict(opened.log.steps)
        opened.log.read()
        if opened.log.steps != before:
            opened.num_unwritten = 0
            self._note(opened.log.steps)
            with suppress(OSError):  # whoever continues the run reads the files again
                self._keep(self._sent)
        return all(step <= self._sent.steps.get(name, -1) for name, step in opened.given.items())

    def _give_up(self, opened: _Open) -> None:
        """End a run whose file accepts nothing more; raise LostValuesError, after which `open` begins another file."""
        _RUNS.pop(self._sent.id, None)
        opened.run.finish(exit_code=0)
        self._confirm(opened)
        raise LostValuesError(f"{opened.log.path} does not have all values that were logged; is its disk full?")

    def tag(self) -> None:
        """Put the newest tags into the run's configuration, which it shows next to its values."""
        if self._tags and self._open is not None:
            self._open.run.config.update({"elastic_train": self._tags}, allow_val_change=True)
            self._tags = {}

    def end(self, status: str) -> None:
        """Finish the run, as failed if `status` says so; raise LostValuesError if its file lacks values."""
        opened = _RUNS.pop(self._sent.id, None)
        if opened is None:
            return
        opened.run.finish(exit_code=1 if status == "FAILED" else 0)
        deadline = time.monotonic() + _WRITTEN_S
        while not self._confirm(opened):
            if time.monotonic() > deadline:
                self._give_up(opened)
            time.sleep(_LOOK_S)  # the package's process writes the last block

    def _recalled(self) -> _Sent:
        with suppress(OSError, ValueError, TypeError):  # none yet, or damaged by a power cut
            return _Sent(**json.loads((self._run_dir / LINK).read_text()))
        return _Sent("")

    def _keep(self, sent: _Sent) -> None:
        write_atomically(self._run_dir / LINK, json.dumps(asdict(sent)) + "\n")


def _furthest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, -1), other.get(name, -1)) for name in {**one, **other}}


def check_installed() -> None:
    """Raise ConfigError with the install command if the package is missing, without its slow import."""
    with needed_for("tracking.wandb"):
        if find_spec("wandb") is None:
            raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
