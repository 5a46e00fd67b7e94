"""Delivery to a real MLflow database: each value once, one run a job, statuses that are true, and bounded tries."""

from __future__ import annotations

import json
import math
import signal
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_train.errors import StorageError
from elastic_train.system.files import locked_by
from elastic_train.tracking import delivery, mlflow_run
from elastic_train.tracking import tracker as tracking
from elastic_train.tracking.mlflow_run import flatten, resolve
from elastic_train.tracking.mlflow_sync import sync
from elastic_train.tracking.run_folder import Link, RunFolder
from tests.conftest import PATIENCE_S, eventually, run_source
from tests.elastic_train.tracking.mlflow.jobs import CONFIG, DOWN, EXPERIMENT, run_of, start, steps

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("mlflow")]  # one database is made


def test_a_value_is_sent_once_a_commit_holds_its_step(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """Values that a rollback may change are not in MLflow; a commit or the end of a failed run sends them."""
    tracker = start(tmp_path, uri)
    for step in range(1, 11):
        tracker.log(step, {"loss": 1.0})
    run_id = run_of(client, tracker).info.run_id
    tracker.commit(5, "commits/00000001-000000000005.json")
    eventually(lambda: mlflow_run.COMMIT_TAG in client.get_run(run_id).data.tags)
    assert steps(client, run_id) == Counter(range(1, 6))
    tracker.finish("FAILED")
    assert steps(client, run_id) == Counter(range(1, 11))


def test_names_that_are_no_paths_do_not_keep_metrics_from_mlflow(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """A class may be called '.' or 'and//or', and a mixture's source ../a: MLflow would refuse the whole call."""
    names = ["recall/.", "recall/..", "recall/", "recall/and//or", "recall/a/", "samples/../a", "/a", "..", "..a/b"]
    names += ["x" * 249 + "/a", "recall/...", "recall/.a", "recall/a.b"]
    tracker = start(tmp_path, uri, config={**CONFIG, "task": {"params": {"//": 1}}})
    tracker.log(1, {"loss": 1.0, **dict.fromkeys(names, 2.0)})
    run_id = run_of(client, tracker).info.run_id
    tracker.finish("FINISHED")
    found = client.get_run(run_id).data
    assert len(found.metrics) == 1 + len(names)
    assert {"recall/_", "recall/__", "recall/and_/or", "samples/__/a", "recall/...", "recall/a.b"} <= set(found.metrics)
    assert found.params["task.params.__"] == "1"


def test_code_tags_need_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout, and where there is no git, the code's version is that of the packages alone."""
    monkeypatch.chdir(tmp_path)
    assert mlflow_run.GIT_TAG not in delivery.code_tags()
    monkeypatch.setenv("PATH", "")
    assert mlflow_run.GIT_TAG not in delivery.code_tags()
    assert mlflow_run.TORCH_TAG in delivery.code_tags()


def test_a_failed_artifact_upload_stops_neither_metrics_nor_status(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A config upload that fails is logged, tried again at the end, and left to `sync`."""
    tries: list[int] = []
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            tries.append(1)
            raise RuntimeError("no artifacts here")

        patch.setattr("mlflow.MlflowClient.log_text", refuse)
        tracker = start(tmp_path, uri)
        tracker.log(1, {"loss": 1.0})
        tracker.finish("FINISHED")
        run = run_of(client, tracker)
        assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.0})
        assert run.data.params["batch.global_batch"] == "64"
        assert len(tries) == 2
        assert sum("no artifacts here" in record.message for record in caplog.records) == 1
        with pytest.raises(StorageError, match="no artifacts here"):
            sync(tmp_path)
    sync(tmp_path)
    assert [entry.path for entry in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


def test_the_end_is_sent_even_if_metrics_are_refused(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose values MLflow refuses is ended all the same."""

    def refuse(*_: object) -> None:
        raise ConnectionError("no metrics today")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_run.MlflowRun, "append", refuse)
        tracker = start(tmp_path, uri)
        tracker.log(1, {"loss": 1.0})
        tracker.finish("FAILED")
        assert run_of(client, tracker).info.status == "FAILED"
    assert sync(tmp_path).num_sent == 1


def test_the_furthest_steps_in_mlflow_are_read_in_one_call(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The furthest steps of all metrics come in one call, whatever the run's length."""
    tracker = start(tmp_path, uri)
    for step in range(1, 4):
        tracker.log(step, {"a/loss, odd": math.nan, f"at {step}": 1.0})
    tracker.finish("FINISHED")

    def refuse(*_: object) -> None:
        raise AssertionError("the history is long")

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.get_metric_history", refuse)
        run = mlflow_run.MlflowRun(tmp_path, uri, EXPERIMENT, "x")
        assert run.marks() == {"a/loss_ odd": 3, "at 1": 1, "at 2": 2, "at 3": 3}
        assert sync(tmp_path).num_sent == 0


def test_a_new_database_appears_as_a_whole_and_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    """A process killed while MLflow builds its tables leaves no database, and the next one makes it.

    While another process holds the lock beside it, it is not opened; afterwards it is.
    """
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    program = (
        "import os, signal, sqlalchemy.event; from sqlalchemy.engine import Engine\n"
        "def kill(connection, cursor, statement, *_):\n"
        "    if statement.strip().startswith('ALTER TABLE'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "sqlalchemy.event.listen(Engine, 'after_cursor_execute', kill)\n"
        f"from elastic_train.tracking.mlflow_run import connect; connect({uri!r})\n"
    )
    assert run_source(program).returncode == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    opening = threading.Thread(target=mlflow_run.connect, args=(uri,))
    with (tmp_path / "mlflow.db.lock").open("w") as lock:
        assert locked_by(lock.fileno(), 0)
        with (tmp_path / "mlflow.db.lock").open("w") as other:
            assert not locked_by(other.fileno(), 0)
        opening.start()
        opening.join(0.2)
        assert opening.is_alive()
        assert not (tmp_path / "mlflow.db").exists()
    opening.join(PATIENCE_S)
    assert mlflow_run.connect(uri).search_experiments()


def test_an_older_term_neither_sends_nor_ends_the_run_of_a_newer_one(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """A leader overtaken by a newer term cannot end its run."""
    old = start(tmp_path, uri, term=1)
    run_id = run_of(client, old).info.run_id
    new = start(tmp_path, uri, term=2)
    old.finish("FAILED")
    new.log(1, {"loss": 1.0})
    new.finish("FINISHED")
    assert client.get_run(run_id).info.status == "FINISHED"
    assert new.wait_run_id(0) == run_id


def test_many_terms_during_a_tracker_outage_leave_one_sender_and_one_run(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the newest keeps retrying; if all of them did, each would make a run once the tracker is back."""
    opened, is_back, asking = delivery.Delivery.open, threading.Event(), Counter[int]()

    def open_later(self: delivery.Delivery) -> str:
        asking[threading.get_ident()] += 1
        if not is_back.is_set():
            raise ConnectionError("down")
        return opened(self)

    monkeypatch.setattr(delivery.Delivery, "open", open_later)
    monkeypatch.setattr(tracking, "SEND_EVERY_S", 0.05)
    monkeypatch.setattr(tracking, "_LONGEST_PAUSE_S", 0.1)
    before = set(threading.enumerate())
    for term in range(1, 7):
        tracker = start(tmp_path, uri, term=term)
        tracker.log(1, {"loss": 1.0})
        if term < 6:
            tracker.pause()
    senders = [thread for thread in threading.enumerate() if thread not in before]
    eventually(lambda: sum(thread.is_alive() for thread in senders) == 1)
    is_back.set()
    tracker.finish("FINISHED")
    experiment = client.get_experiment_by_name(EXPERIMENT)
    link = RunFolder(tmp_path).link()
    assert link is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`{mlflow_run.JOB_TAG}` = '{link.job}'")
    assert run.info.status == "FINISHED"
    assert steps(client, run.info.run_id) == Counter([1])


def test_a_process_killed_between_naming_and_making_the_run_makes_no_second(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """A run that was made but not yet written down is found again by the job's name."""
    tracker = start(tmp_path, uri)
    tracker.finish("FINISHED")
    link = RunFolder(tmp_path).link()
    assert link is not None
    (tmp_path / "mlflow.json").write_text(json.dumps({"job": link.job}))
    assert sync(tmp_path, uri).run_id == link.run_id
    (tmp_path / "mlflow.json").write_text(json.dumps({"job": link.job, "run_id": uuid.uuid4().hex}))
    assert sync(tmp_path, uri).run_id == link.run_id


def test_a_failed_call_that_arrived_is_not_repeated(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that reached MLflow although its call failed is there once after the retry."""
    append, calls = mlflow_run.MlflowRun.append, []

    def arrive_and_fail(self: mlflow_run.MlflowRun, lines: list[mlflow_run.Values]) -> None:
        append(self, lines)
        calls.append(len(lines))
        if len(calls) == 1:
            raise TimeoutError("no answer")

    monkeypatch.setattr(mlflow_run.MlflowRun, "append", arrive_and_fail)
    tracker = start(tmp_path, uri)
    for step in range(1, 4):
        tracker.log(step, {"loss": 1.0})
    tracker.finish("FINISHED")
    run = run_of(client, tracker)
    assert len(calls) == 2
    assert run.info.status == "FINISHED"
    assert steps(client, run.info.run_id) == Counter([1, 2, 3])


def test_sending_is_tried_a_bounded_number_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that never answers is given up after MAX_FAILURES_IN_A_ROW calls."""
    calls, is_over = [], threading.Event()

    def fail(self: delivery.Delivery) -> str:
        calls.append(1)
        if len(calls) == 4:
            is_over.set()
        raise ConnectionError("down")

    monkeypatch.setattr(delivery.Delivery, "open", fail)
    monkeypatch.setattr(tracking, "MAX_FAILURES_IN_A_ROW", 4)
    tracker = start(tmp_path, DOWN)
    assert is_over.wait(PATIENCE_S)
    tracker.finish("FAILED")
    assert len(calls) == 4


def test_the_runs_id_is_waited_for_beyond_the_first_failure(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker that answers on a later try gives its run's id; one that never does is asked a few times."""
    opened, calls = delivery.Delivery.open, []

    def fail_twice(self: delivery.Delivery) -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("not yet")
        return opened(self)

    monkeypatch.setattr(delivery.Delivery, "open", fail_twice)
    tracker = start(tmp_path / "a", uri)
    assert client.get_run(tracker.wait_run_id(PATIENCE_S) or "").info.status == "RUNNING"
    tracker.finish("FINISHED")

    is_over, tries = threading.Event(), []

    def fail_until_over(self: delivery.Delivery) -> str:
        tries.append(1)
        if not is_over.is_set():
            raise ConnectionError("not yet")
        return opened(self)

    monkeypatch.setattr(delivery.Delivery, "open", fail_until_over)
    tracker = start(tmp_path / "b", uri)
    assert tracker.wait_run_id(PATIENCE_S) is None
    assert len(tries) >= tracking.MAX_FAILURES_AWAITED
    is_over.set()
    assert tracker.wait_run_id(PATIENCE_S) is not None
    tracker.finish("FINISHED")


def test_passwords_are_not_recorded(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """A password in a URL reaches neither the parameters, nor the tag, nor mlflow.json."""
    config: dict[str, object] = {"tracking": {"mlflow_uri": "https://me:secret@host/x", "list": [1]}}
    tracker = start(tmp_path, uri, config=config)
    tracker.finish("FINISHED")
    run = run_of(client, tracker)
    assert "secret" not in f"{run.data.params}{run.data.tags}"
    assert run.data.params == {"tracking.mlflow_uri": "https://***@host/x", "tracking.list": "[1]"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sqlite:///mlflow.db", f"sqlite:///{Path.cwd()}/mlflow.db"),
        ("sqlite:////tmp/a.db?x=1", "sqlite:////tmp/a.db?x=1"),
        ("http://host:5000", "http://host:5000"),
    ],
)
def test_a_sqlite_path_means_the_same_from_every_folder(given: str, expected: str) -> None:
    """Relative sqlite paths are made absolute; other trackers stay as they are."""
    assert resolve(given) == expected


def test_flatten_names_nested_keys_with_dots() -> None:
    """Every leaf has one dotted name, an empty section included."""
    assert flatten({"a": {"b": {"c": None}, "d": {}}, "e": 1.5}) == {"a.b.c": "None", "a.d": "{}", "e": "1.5"}
    sources = [{"source": "s3://me:secret@host/x"}, {"source": "y"}]
    assert flatten({"a": {"mixture": sources}}) == {"a.mixture.0.source": "s3://***@host/x", "a.mixture.1.source": "y"}


def test_a_damaged_link_is_treated_as_missing(tmp_path: Path) -> None:
    """An unreadable mlflow.json does not stop a job."""
    (tmp_path / "mlflow.json").write_text('{"job"')
    assert RunFolder(tmp_path).link() is None
    (tmp_path / "mlflow.json").write_text('{"job": "a"}')
    assert RunFolder(tmp_path).link() == Link("a")
