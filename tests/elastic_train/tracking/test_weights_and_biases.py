"""Weights & Biases offline, with the real package: one run over all processes, each value of the lineage once."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.config.sources import load
from elastic_train.errors import ConfigError
from elastic_train.job.plan import make_plan
from elastic_train.tracking.delivery import LostValuesError
from elastic_train.tracking.destinations import weights_and_biases
from elastic_train.tracking.destinations.weights_and_biases import WeightsAndBiases
from elastic_train.tracking.metric_log import Values
from elastic_train.tracking.tracker import Tracker
from tests.conftest import eventually
from tests.elastic_train.tracking.unqueued import start_term
from tests.elastic_train.training.jobs import CLASSIFIER, config

BLOCK, HEADER = 32768, 7


def term(folder: Path, number: int, *, lo: int = 0) -> Tracker:
    to = WeightsAndBiases(folder, {"optimizer": {"lr": 0.5}}, "offline", "project", "run")
    return start_term(folder, number, lo, [to])


def records(path: Path) -> Iterator[Any]:
    """Read an offline run's file: LevelDB's log format, after a header, of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        whole += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or a last part
            yield Record.FromString(whole)
            whole = b""


def sent(folder: Path) -> int:
    """Return up to which step the loss was given to the package."""
    link = folder / "wandb.json"
    steps = json.loads(link.read_text())["steps"] if link.exists() else {}
    return int(steps.get("train/loss", 0))


def is_written(path: Path) -> bool:
    """Say whether a run's file has its end: another process writes it, some milliseconds after `finish`."""
    return any(record.HasField("exit") for record in records(path))


@pytest.mark.slow
def test_a_job_is_one_run_with_each_value_once(tmp_path: Path) -> None:
    """The first term ends with two steps beyond its commit; the second, in the same process, computes them again."""
    first = term(tmp_path, 1)
    for step in range(1, 5):
        first.log(step, {"train/loss": float(step)})
    first.commit(2, "commits/1-2.json")
    first.pause()
    second = term(tmp_path, 2, lo=2)
    for step in range(3, 5):
        second.log(step, {"train/loss": 10.0 * step})
    second.finish("FINISHED")
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 1, "one run of the package over both terms"
    eventually(lambda: all(map(is_written, files)))
    found = [record for path in files for record in records(path)]
    values = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [(int(row["step"]), float(row["train/loss"])) for row in values] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
    ]
    settings = [item.key for record in found if record.HasField("run") for item in record.run.config.update]
    assert "optimizer.lr" in settings
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0] * len(files)


def test_a_term_does_not_begin_the_run_that_an_earlier_one_is_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes seconds to begin a run, and a process may begin its next term meanwhile."""
    first, second = (WeightsAndBiases(tmp_path, {}, "offline", "project", "run") for _ in range(2))
    monkeypatch.setattr(weights_and_biases, "_INIT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(weights_and_biases, "_RUNS", {})
    begun = []

    def begin(self: WeightsAndBiases) -> FullDisk:
        begun.append(self)
        if self is first:
            with ThreadPoolExecutor() as threads, pytest.raises(TimeoutError, match=r"wandb\.init has not returned"):
                threads.submit(second.open).result()
        return FullDisk(tmp_path / "wandb/offline-run-1/run.wandb", 9)

    monkeypatch.setattr(WeightsAndBiases, "_begun", begin)
    assert first.open() == second.open()
    assert begun == [first]


def test_a_missing_package_is_an_error_before_training(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = load(Path(config(tmp_path, rows, CLASSIFIER, tracking={"wandb": "offline"})), environ={}, arguments=())
    monkeypatch.setattr(
        "elastic_train.tracking.destinations.weights_and_biases.find_spec",
        lambda name: None if name == "wandb" else importlib.util.find_spec(name),
    )
    with pytest.raises(ConfigError, match=r"pip install 'elastic-train\[wandb\]'"):
        make_plan(resolved)


class FullDisk:
    """A stand-in for the package's run: its file takes values until the disk is full, and then nothing more."""

    def __init__(self, path: Path, room: int) -> None:
        self.settings, self.room, self.rows = SimpleNamespace(sync_file=str(path)), room, 0
        self.config = SimpleNamespace(update=lambda *_, **__: None)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b":W&B\x00\x00\x00")

    def log(self, values: dict[str, float]) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        record = Record()
        for name, value in values.items():
            record.history.item.add(key=name, value_json=json.dumps(value))
        content = record.SerializeToString()
        if self.rows < self.room:
            with Path(self.settings.sync_file).open("ab") as file:
                file.write(struct.pack("<IHB", 0, len(content), 1) + content)
        self.rows += 1

    def finish(self, exit_code: int) -> None:
        """Nothing is left to write."""


@pytest.mark.heavy
def test_values_that_a_full_disk_did_not_take_are_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the package's file holds counts as sent; the rest goes to another file of the run, from this process
    or, after a kill, from the next one."""
    pytest.importorskip("wandb")
    monkeypatch.setattr(weights_and_biases, "_WRITTEN_S", 0.0)
    rooms = iter((3, 1, 99))

    def begin(self: WeightsAndBiases) -> FullDisk:
        number = len(list(tmp_path.glob("wandb/*/*")))
        path = tmp_path / f"wandb/offline-run-{number}/run-{self._sent.id}.wandb"
        return FullDisk(path, next(rooms))

    monkeypatch.setattr(WeightsAndBiases, "_begun", begin)
    lines = [Values(0.0, step, {"train/loss": float(step)}) for step in range(1, 7)]

    def give(to: WeightsAndBiases) -> None:
        to.open()
        to.send(lines)
        to.end("FINISHED")

    to = WeightsAndBiases(tmp_path, {}, "offline", "project", "run")
    with pytest.raises(LostValuesError, match="is its disk full"):
        give(to)
    assert sent(tmp_path) == 3
    to.open()
    to.send(lines)
    weights_and_biases._RUNS.clear()  # killed before it ends, and before it has told
    (tmp_path / "wandb.json").write_text(json.dumps({"id": to.known_id(), "steps": {}}))
    give(WeightsAndBiases(tmp_path, {}, "offline", "project", "run"))
    found = [r for path in sorted(tmp_path.glob("wandb/*/*.wandb")) for r in records(path)]
    steps = [int(float(item.value_json)) for r in found for item in r.history.item if item.key == "step"]
    assert steps == [1, 2, 3, 4, 5, 6], "each once"
    assert sent(tmp_path) == 6
