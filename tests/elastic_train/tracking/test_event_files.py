"""TensorBoard's event files: TensorBoard's own reader finds each value of the lineage, once, whatever broke."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli.main import main
from elastic_train.errors import ConfigError
from elastic_train.job.plan import make_plan
from elastic_train.tracking.destinations.event_files import FOLDER, SENT, EventFiles, sync_event_files
from elastic_train.tracking.tracker import Tracker
from tests.conftest import start
from tests.elastic_train.tracking.unqueued import start_term
from tests.elastic_train.training.jobs import CLASSIFIER, config, succeed


def term(folder: Path, number: int, *, lo: int = 0, tensorboard: bool = True) -> Tracker:
    return start_term(folder, number, lo, [EventFiles(folder)] if tensorboard else [])


def found(folder: Path, metric: str = "train/loss") -> list[tuple[int, float]]:
    """Read with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / FOLDER), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(metric)]


@pytest.mark.heavy
def test_steps_that_a_fault_undid_are_not_there_twice(tmp_path: Path) -> None:
    """The first term is killed with two steps beyond its commit; the second computes them again, with other values."""
    first = term(tmp_path, 1)
    for step in range(1, 6):
        first.log(step, {"train/loss": float(step)})
    first.commit(3, "commits/1-3.json")
    first.finish("KILLED")
    assert found(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    second = term(tmp_path, 2, lo=3)
    for step in range(4, 8):
        second.log(step, {"train/loss": 10.0 * step, "validation/f1": 0.5})
    second.finish("FINISHED")
    assert found(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)]
    assert found(tmp_path, "validation/f1") == [(step, 0.5) for step in range(4, 8)]


def test_sync_writes_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was not tracked so gets its files afterwards; a second time nothing is missing."""
    tracker = term(tmp_path, 1, tensorboard=False)
    for step in range(1, 4):
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish("FINISHED")
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(SystemExit) as left:
        main(["sync", str(tmp_path), "--tensorboard"])
    assert (left.value.code, "wrote 3 values" in capsys.readouterr().out) == (0, True)
    assert found(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert sync_event_files(tmp_path) == 0
    (tmp_path / FOLDER / SENT).write_text("{")
    assert sync_event_files(tmp_path) == 3, "what it has is not known any more: the same values come once more"
    with pytest.raises(ConfigError, match="no metrics to write"):
        sync_event_files(tmp_path / "none")


@pytest.mark.slow
def test_a_folder_that_takes_no_files_costs_values_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    tracker = term(tmp_path, 1)
    tracker.log(1, {"train/loss": 1.0})
    with caplog.at_level(logging.WARNING):
        tracker.finish("FINISHED")
    said = " ".join(record.message for record in caplog.records)
    assert "TensorBoard's folder cannot be reached, training continues with local metrics" in said
    assert "elastic-train sync RUN --tensorboard" in said


def test_a_missing_package_is_an_error_before_training(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *arguments, **named)

    from elastic_train.config.sources import load

    resolved = load(Path(config(tmp_path, rows, CLASSIFIER, tracking={"tensorboard": True})), environ={}, arguments=())
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'elastic-train\[tensorboard\]'"):
        make_plan(resolved)


@pytest.mark.slow
def test_a_real_run_is_read_by_tensorboard(tmp_path: Path, rows: Path) -> None:
    tree = {**CLASSIFIER, "max_steps": 4, "tracking": {"tensorboard": True}}
    succeed(start([config(tmp_path, rows, tree)]))
    assert [step for step, _ in found(tmp_path / "run")] == [1, 2, 3, 4]
    assert found(tmp_path / "run", "train/learning_rate")
