"""Weights & Biases offline, with the real package: one run over all processes, each value of the lineage once."""

from __future__ import annotations

import importlib.util
import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.sources import load
from elastic_train.core.lineage import Interval
from elastic_train.errors import ConfigError
from elastic_train.job.plan import make_plan
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.destinations.weights_and_biases import WeightsAndBiases
from elastic_train.tracking.tracker import Tracker
from tests.conftest import PATIENCE_S
from tests.elastic_train.training.jobs import CLASSIFIER, config

BLOCK, HEADER = 32768, 7


def term(folder: Path, number: int, *, lo: int = 0) -> Tracker:
    return Tracker.start(
        files=BackgroundFiles(),
        run_dir=folder,
        term=number,
        config={},
        mlflow_uri=None,
        experiment="e",
        run_name="run",
        intervals=(Interval(1, 0, lo),) if lo else (),
        settled=lo,
        others=[WeightsAndBiases(folder, {"optimizer": {"lr": 0.5}}, "offline", "project", "run")],
    )


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


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_job_is_one_run_with_each_value_once(tmp_path: Path) -> None:
    """The first term ends with two steps beyond its commit; the second, in the same process, computes them again."""
    first = term(tmp_path, 1)
    for step in range(1, 5):
        first.log(step, {"train/loss": float(step)})
    first.commit(2, "commits/1-2.json")
    eventually(lambda: sent(tmp_path) == 2)
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
