"""The tracker against a real MLflow database: what a job logs arrives, once, whatever broke meanwhile."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_train.system.files import write_atomically
from elastic_train.tracking import delivery, mlflow_run
from elastic_train.tracking import tracker as tracking
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.metric_log import Values, final_metrics, metrics_path, read_metrics
from elastic_train.tracking.mlflow_sync import sync
from elastic_train.tracking.run_folder import RunFolder
from tests.conftest import PATIENCE_S, eventually, run_source
from tests.elastic_train.tracking.mlflow.jobs import CONFIG, DOWN, EXPERIMENT, run_of, start, steps, values

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("mlflow")]  # one database is made


def test_values_config_and_status_arrive(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run has every value, the flattened configuration, config.yaml, the weights' hash, and FINISHED."""
    monkeypatch.chdir(tmp_path)
    tracker = start(tmp_path, uri, files=BackgroundFiles())
    for step in range(1, 2101):
        tracker.log(step, {"loss": 1 / step})
    tracker.log(2100, {"validation/accuracy": 0.5, "odd, name": math.nan})
    write_atomically(tmp_path / "result.json", json.dumps({"weights_sha256": "abc", "ended_by": "early stopping"}))
    tracker.finish("FINISHED")
    run = run_of(client, tracker)
    assert run.info.status == "FINISHED"
    assert steps(client, run.info.run_id) == Counter(range(1, 2101))
    assert run.data.metrics["validation/accuracy"] == 0.5
    assert math.isnan(run.data.metrics["odd_ name"])
    assert run.data.params["batch.global_batch"] == "64"
    assert run.data.tags[mlflow_run.WEIGHTS_TAG] == "abc"
    assert run.data.tags[mlflow_run.ENDED_TAG] == "early stopping"
    assert "global_batch: 64" in run.data.tags[mlflow_run.CONFIG_TAG]
    assert [entry.path for entry in client.list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert not list(Path().glob("mlruns")), "artifacts are stored beside the database, not in the current folder"


def test_rollback_and_resume_keep_one_run_and_one_value_a_step(
    tmp_path: Path, uri: str, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A preempted job continues its run, RUNNING again, and steps computed twice are there once."""
    first = start(tmp_path, uri, term=1)
    for step in range(1, 11):
        first.log(step, {"loss": float(step)})
    first.finish("KILLED")
    run_id = run_of(client, first).info.run_id
    assert client.get_run(run_id).info.status == "KILLED"

    second = start(
        tmp_path, uri, term=2, lineage=((1, 0, 5),), config={**CONFIG, "batch": {"global_batch": 32}, "added": 1}
    )
    assert second.wait_run_id(PATIENCE_S) == run_id
    eventually(lambda: client.get_run(run_id).info.status == "RUNNING")
    for step in [*range(6, 13), *range(8, 16)]:  # back to 5 by a restart, then to 7 within the term
        second.log(step, {"loss": float(step)})
    second.finish("FINISHED")
    assert not [record for record in caplog.records if record.name == "elastic_train.tracking.tracker"], (
        "nothing failed"
    )
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert steps(client, run_id) == Counter(range(1, 16))
    assert run.data.params["batch.global_batch"] == "64", "a parameter keeps its first value"
    assert run.data.params["added"] == "1"


def test_the_highest_term_wins(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """Steps computed again are the newest term's, locally and in MLflow, and steps that it has not reached are gone."""
    first = start(tmp_path, uri, term=1)
    for step in range(1, 11):
        first.log(step, {"loss": 1.0})
    first.commit(5, "commits/00000001-000000000005.json")
    first.finish("KILLED")
    run_id = run_of(client, first).info.run_id
    second = start(tmp_path, uri, term=2, lineage=((1, 0, 5),))
    for step in range(6, 9):
        second.log(step, {"loss": 2.0})
    assert final_metrics(tmp_path) == {"loss": 2.0}
    third = start(tmp_path, uri, term=3, lineage=((1, 0, 5), (2, 5, 7)))
    for step in range(8, 10):
        third.log(step, {"loss": 3.0})
    third.finish("FINISHED")
    expected = [*((step, 1.0) for step in range(1, 6)), (6, 2.0), (7, 2.0), (8, 3.0), (9, 3.0)]
    assert values(client, run_id) == expected
    assert [
        (line.step, line.by_name["loss"]) for line in read_metrics(tmp_path) if isinstance(line, Values)
    ] == expected
    assert sync(tmp_path).num_sent == 0
    (tmp_path / "mlflow.json").unlink()
    assert values(client, sync(tmp_path, uri).run_id) == expected


def test_tags_name_the_code_the_world_and_the_newest_commit(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """After a restart the tags are the newest term's; an older term's are replaced, whichever term sends them."""
    first = start(tmp_path, uri, term=1, tags={mlflow_run.WORLD_TAG: "4", mlflow_run.HOSTS_TAG: "2"})
    first.log(1, {"loss": 1.0})
    first.commit(1, "commits/00000001-000000000001.json")
    first.finish("KILLED")
    second = start(tmp_path, uri, term=2, step=1, tags={mlflow_run.WORLD_TAG: "3"})
    second.log(2, {"loss": 1.0})
    second.commit(2, "commits/00000002-000000000002.json")
    second.finish("FINISHED")
    run = run_of(client, second)
    (tmp_path / "mlflow.json").unlink()
    for tags in (run.data.tags, client.get_run(sync(tmp_path, uri).run_id).data.tags):
        assert tags[mlflow_run.COMMIT_TAG] == "commits/00000002-000000000002.json"
        assert (tags[mlflow_run.WORLD_TAG], tags[mlflow_run.HOSTS_TAG]) == ("3", "2")
        assert delivery.code_tags().items() <= tags.items()
        assert tags[mlflow_run.TORCH_TAG] == metadata.version("torch")


def test_the_best_values_outlive_restarts(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """best/<metric> has a value at each step that improved the metric, over all terms; what was given up is none."""
    better = {"f1": True, "loss": False}
    first = start(tmp_path, uri, term=1)
    for step, f1, loss in ((10, 0.5, 2.0), (20, 0.4, 1.0), (30, 0.9, math.nan)):
        first.log(step, {"f1": f1, "loss": loss, "samples": 7}, better)
    first.commit(20, "commits/00000001-000000000020.json")
    first.finish("KILLED")
    second = start(tmp_path, uri, term=2, step=20)
    for step, f1, loss in ((30, 0.6, 3.0), (40, 0.6, 0.5)):
        second.log(step, {"f1": f1, "loss": loss, "samples": 7}, better)
    second.finish("FINISHED")
    run_id = run_of(client, second).info.run_id
    assert values(client, run_id, "best/f1") == [(10, 0.5), (30, 0.6)]
    assert values(client, run_id, "best/loss") == [(10, 2.0), (20, 1.0), (40, 0.5)]
    assert "best/samples" not in client.get_run(run_id).data.metrics
    assert final_metrics(tmp_path)["best/f1"] == client.get_run(run_id).data.metrics["best/f1"] == 0.6


def test_a_killed_process_leaves_its_run_running_and_the_next_term_sends_its_values(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """After SIGKILL the run stays RUNNING; the next term adds to the same run what the killed one could not send."""
    program = (
        "import os, signal; from pathlib import Path; from elastic_train.tracking.tracker import Tracker\n"
        "from elastic_train.tracking.background_files import BackgroundFiles\n"
        "files = BackgroundFiles()\n"
        f"tracker = Tracker.start(files=files, run_dir=Path({str(tmp_path)!r}), term=1, config={{}},"
        f" mlflow_uri={uri!r}, experiment={EXPERIMENT!r}, run_name='x')\n"
        f"print(tracker.wait_run_id({PATIENCE_S}), flush=True)\n"
        "for step in range(1, 6): tracker.log(step, {'loss': 1.0})\n"
        "tracker.commit(5, 'commits/00000001-000000000005.json')\n"
        f"files.flush({PATIENCE_S})  # the lines of its last milliseconds die with a process\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = run_source(program)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run_id = killed.stdout.strip()
    assert client.get_run(run_id).info.status == "RUNNING"
    with metrics_path(tmp_path, 1).open("a") as file:
        file.write('{"t": 1.0, "term": 1, "step": 6, "val')  # the machine died in the middle of a line
    tracker = start(tmp_path, uri, term=2, lineage=((1, 0, 5),))
    tracker.log(6, {"loss": 1.0})
    tracker.finish("FAILED")
    assert tracker.wait_run_id(0) == run_id
    assert client.get_run(run_id).info.status == "FAILED"
    assert steps(client, run_id) == Counter(range(1, 7))


def test_a_tracker_that_is_down_costs_training_nothing(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a tracker nothing blocks, one warning is shown, and `sync` brings everything into a database later."""
    opened, is_asked, has_logged = delivery.Delivery.open, threading.Event(), threading.Event()

    def open_late(self: delivery.Delivery) -> str:
        is_asked.set()
        assert has_logged.wait(PATIENCE_S), "it blocks"
        return opened(self)

    monkeypatch.setattr(delivery.Delivery, "open", open_late)
    monkeypatch.setitem(tracking.FLUSH_TIMEOUT_S, "FINISHED", PATIENCE_S)
    tracker = start(tmp_path, DOWN)
    assert is_asked.wait(PATIENCE_S)
    for step in range(1, 1501):
        tracker.log(step, {"loss": float(step)})
    has_logged.set()
    assert tracker._mlflow is not None
    assert tracker.wait_run_id(PATIENCE_S) is None
    assert tracker._mlflow._has_answer.is_set(), "a few failures are an answer, before the time is over"
    tracker.finish("FINISHED")
    assert tracker._mlflow._is_through.is_set(), "the end does not use up the time that it may wait"
    assert sum("cannot be reached" in record.message for record in caplog.records) == 1
    assert final_metrics(tmp_path) == {"loss": 1500.0}

    synced = sync(tmp_path, uri)
    assert (synced.num_sent, synced.num_present, synced.status) == (1500, 0, "FINISHED")
    assert steps(client, synced.run_id) == Counter(range(1, 1501))
    assert client.get_run(synced.run_id).info.status == "FINISHED"
    again = sync(tmp_path)
    assert (again.run_id, again.num_sent) == (synced.run_id, 0)
    assert "nothing was missing" in str(again)


def test_foreign_lines_among_the_metrics_are_passed_over(tmp_path: Path) -> None:
    """Lines that no tracker has written do not keep the others from being read."""
    tracker = start(tmp_path, None)
    tracker.log(1, {"loss": 1.0})
    with metrics_path(tmp_path, 1).open("a") as file:
        file.write('[]\n7\n"values"\n{"values": 3}\n{"values": {}, "t": 1, "step": null}\n{"tags": 1, "step": 2}\n')
        file.write("[]\n" * 400_000 + '{"to')
    tracker.log(2, {"loss": 2.0})
    assert final_metrics(tmp_path) == {"loss": 1.0}
    tracker.log(3, {"loss": 3.0})
    assert final_metrics(tmp_path) == {"loss": 3.0}


def num_calls(act: Callable[[], object]) -> int:
    """Return the number of functions, of Python and of C, that this thread calls in `act`."""
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        act()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]


def test_log_is_cheap_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes nothing itself, and calls the same few functions however much waits for the thread that writes.

    A full disk is reported once, and does not end the training.
    """
    files, is_free = BackgroundFiles(), threading.Event()
    files.put(lambda: is_free.wait(PATIENCE_S) and None)
    tracker = start(tmp_path, None, files=files)
    numbers_of_calls = [
        num_calls(lambda step=step: tracker.log(step, {"train/loss": 0.25, "train/samples_per_s": 1234.5, "lr": 1e-3}))
        for step in range(2000)
    ]
    assert not metrics_path(tmp_path, 1).exists()
    is_free.set()
    assert numbers_of_calls[0] == statistics.median(numbers_of_calls) == numbers_of_calls[-1] < 50

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        assert files.flush(PATIENCE_S)
        patch.setattr(os, "write", full)
        tracker.log(2000, {"lr": 1.0})
        tracker.log(2001, {"lr": 1.0})
        assert files.flush(PATIENCE_S)
    tracker.log(2002, {"lr": 2.0})
    tracker.finish("FINISHED")
    tracker.log(2003, {"lr": 3.0})
    assert final_metrics(tmp_path)["lr"] == 2.0
    assert sum("make room on the disk" in record.message for record in caplog.records) == 1


def test_without_a_tracker_there_is_only_the_local_file(tmp_path: Path) -> None:
    """With mlflow_uri null nothing is waited for and no link to MLflow is made."""
    tracker = start(tmp_path, None)
    assert tracker.wait_run_id(20) is None
    tracker.finish("FINISHED")
    assert RunFolder(tmp_path).link() is None
    with pytest.raises(ValueError, match="not one of"):
        tracker.finish("DONE")
