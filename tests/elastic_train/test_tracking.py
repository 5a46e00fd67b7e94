"""The tracker against a real MLflow database: each value once, one run a job, statuses that are true."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from elastic_train import cli, delivery, mlflow_run, tracking
from elastic_train.errors import ConfigError, StorageError
from elastic_train.files import write_atomically
from elastic_train.metrics import Values, final_metrics, metrics_path, read_metrics
from elastic_train.mlflow_run import Link, flatten, read_link, resolve, without_password
from elastic_train.sync import sync
from elastic_train.tracking import Tracker

DOWN = "http://127.0.0.1:1"
EXPERIMENT = "tests"
CONFIG: dict[str, object] = {
    "run": {"dir": "runs/x", "name": "x", "seed": 1},
    "batch": {"global_batch": 64},
    "tracking": {"mlflow_uri": None, "experiment": EXPERIMENT},
}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sqlite tracker in a folder that does not exist yet."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/new/mlflow.db"


@pytest.fixture(scope="module")
def client(uri: str) -> MlflowClient:
    """A client of its own, for the tests to look with."""
    return mlflow_run.connect(uri)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread looks often, so that tests need not wait."""
    monkeypatch.setattr(tracking, "SEND_EVERY_S", 0.02)


def start(
    run_dir: Path,
    mlflow_uri: str | None,
    term: int = 1,
    config: dict[str, object] | None = None,
    step: int = 0,
    begins_at: int = 0,
    tags: dict[str, str] | None = None,
) -> Tracker:
    run_dir.mkdir(exist_ok=True)
    resolved = config or CONFIG
    write_atomically(run_dir / "config.yaml", json.dumps(resolved))
    return Tracker.start(
        run_dir=run_dir,
        term=term,
        config=resolved,
        mlflow_uri=mlflow_uri,
        experiment=EXPERIMENT,
        run_name="x",
        begins_at=max(begins_at, step),
        settled=step,
        tags=tags,
    )


def steps(client: MlflowClient, run_id: str, name: str = "loss") -> Counter[int]:
    return Counter(metric.step for metric in client.get_metric_history(run_id, name))


def run_of(client: MlflowClient, tracker: Tracker) -> Run:
    run_id = tracker.wait_run_id(30)
    assert run_id is not None
    return client.get_run(run_id)


def values(client: MlflowClient, run_id: str, name: str = "loss") -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))


def test_values_config_and_status_arrive(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run has every value, the flattened configuration, config.yaml, the weights' hash, and FINISHED."""
    monkeypatch.chdir(tmp_path)
    tracker = start(tmp_path, uri)
    for step in range(1, 2101):
        tracker.log(step, {"loss": 1 / step})
    tracker.log(2100, {"validation/accuracy": 0.5, "odd, name": math.nan})
    write_atomically(tmp_path / "result.json", json.dumps({"weights_sha256": "abc"}))
    tracker.finish("FINISHED")
    run = run_of(client, tracker)
    assert run.info.status == "FINISHED"
    assert steps(client, run.info.run_id) == Counter(range(1, 2101))
    assert run.data.metrics["validation/accuracy"] == 0.5
    assert math.isnan(run.data.metrics["odd_ name"])
    assert run.data.params["batch.global_batch"] == "64"
    assert run.data.tags[mlflow_run.WEIGHTS_TAG] == "abc"
    assert "global_batch: 64" in run.data.tags[mlflow_run.CONFIG_TAG]
    assert [entry.path for entry in client.list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert not list(Path().glob("mlruns")), "artifacts lie beside the database, not in the current folder"


def test_rollback_and_resume_keep_one_run_and_one_value_a_step(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """A preempted job goes on in its run, RUNNING again, and steps computed twice are there once."""
    first = start(tmp_path, uri, term=1)
    for step in range(1, 11):
        first.log(step, {"loss": float(step)})
    first.finish("KILLED")
    run_id = run_of(client, first).info.run_id
    assert client.get_run(run_id).info.status == "KILLED"

    second = start(tmp_path, uri, term=2, begins_at=5, config={**CONFIG, "batch": {"global_batch": 32}, "added": 1})
    assert second.wait_run_id(0) == run_id, "a job that has a run knows it at once"
    wait_until(lambda: client.get_run(run_id).info.status == "RUNNING")
    for step in [*range(6, 13), *range(8, 16)]:  # back to 5 by a restart, then to 7 within the term
        second.log(step, {"loss": float(step)})
    second.finish("FINISHED")
    assert second.num_failures == 0
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
    second = start(tmp_path, uri, term=2, begins_at=5)
    for step in range(6, 9):
        second.log(step, {"loss": 2.0})
    assert final_metrics(tmp_path) == {"loss": 2.0}
    third = start(tmp_path, uri, term=3, begins_at=7)
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


def test_a_value_is_sent_once_a_commit_holds_its_step(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """What a rollback may still change is not in MLflow; a commit sends it, and so does the end of a failed run."""
    tracker = start(tmp_path, uri)
    for step in range(1, 11):
        tracker.log(step, {"loss": 1.0})
    run_id = run_of(client, tracker).info.run_id
    tracker.commit(5, "commits/00000001-000000000005.json")
    wait_until(lambda: mlflow_run.COMMIT_TAG in client.get_run(run_id).data.tags)
    assert steps(client, run_id) == Counter(range(1, 6))
    tracker.finish("FAILED")
    assert steps(client, run_id) == Counter(range(1, 11))


def test_sync_leaves_what_will_be_computed_again(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """`sync` of a run without an end sends what live tracking would have sent, and says how much waits."""
    tracker = start(tmp_path, None)
    for step in range(1, 11):
        tracker.log(step, {"loss": 1.0})
    tracker.commit(4, "commits/00000001-000000000004.json")
    synced = sync(tmp_path, uri)
    assert (synced.num_sent, synced.num_waiting, synced.status) == (4, 6, None)
    assert "6 wait for a commit" in str(synced)
    assert steps(client, synced.run_id) == Counter(range(1, 5))
    tracker.finish("FINISHED")
    assert sync(tmp_path).num_sent == 6


def test_tags_name_the_code_the_world_and_the_newest_commit(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """After a restart the tags are the newest term's; an older term's are replaced, whoever sends them."""
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


def test_code_tags_need_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout, and where there is no git, the code's version is that of the packages alone."""
    monkeypatch.chdir(tmp_path)
    assert mlflow_run.GIT_TAG not in delivery.code_tags()
    monkeypatch.setenv("PATH", "")
    assert mlflow_run.GIT_TAG not in delivery.code_tags()
    assert mlflow_run.TORCH_TAG in delivery.code_tags()


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


def test_artifacts_that_cannot_be_kept_stop_neither_metrics_nor_status(
    tmp_path: Path, uri: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A config upload that fails is told, tried again at the end, and left to `sync`."""
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise RuntimeError("no artifacts here")

        patch.setattr(MlflowClient, "log_text", refuse)
        tracker = start(tmp_path, uri)
        tracker.log(1, {"loss": 1.0})
        tracker.finish("FINISHED")
        run = run_of(client, tracker)
        assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.0})
        assert run.data.params["batch.global_batch"] == "64"
        assert tracker.num_failures == 2
        assert sum("no artifacts here" in record.message for record in caplog.records) == 1
        with pytest.raises(StorageError, match="no artifacts here"):
            sync(tmp_path)
    sync(tmp_path)
    assert [entry.path for entry in client.list_artifacts(run.info.run_id)] == ["config.yaml"]


def test_metrics_that_cannot_be_sent_do_not_hide_the_end(
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


def test_what_mlflow_has_is_asked_without_its_history(
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
        patch.setattr(MlflowClient, "get_metric_history", refuse)
        run = mlflow_run.MlflowRun(tmp_path, uri, EXPERIMENT, "x")
        assert run.marks() == {"a/loss_ odd": 3, "at 1": 1, "at 2": 2, "at 3": 3}
        assert sync(tmp_path).num_sent == 0


def test_a_killed_process_leaves_its_run_running_and_the_next_term_sends_its_values(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """After SIGKILL the run stays RUNNING; the next term adds to the same run what the killed one could not send."""
    program = (
        "import sys; from pathlib import Path; from elastic_train.tracking import Tracker\n"
        f"tracker = Tracker.start(run_dir=Path({str(tmp_path)!r}), term=1, config={{}}, mlflow_uri={uri!r},"
        f" experiment={EXPERIMENT!r}, run_name='x')\n"
        "print(tracker.wait_run_id(60), flush=True)\n"
        "for step in range(1, 6): tracker.log(step, {'loss': 1.0})\n"
        "tracker.commit(5, 'commits/00000001-000000000005.json')\n"
        "print('logged', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    assert process.stdout.readline() == "logged\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert client.get_run(run_id).info.status == "RUNNING"
    with metrics_path(tmp_path, 1).open("a") as file:
        file.write('{"t": 1.0, "term": 1, "step": 6, "val')  # the machine died in the middle of a line
    tracker = start(tmp_path, uri, term=2, begins_at=5)
    tracker.log(6, {"loss": 1.0})
    tracker.finish("FAILED")
    assert tracker.wait_run_id(0) == run_id
    assert client.get_run(run_id).info.status == "FAILED"
    assert steps(client, run_id) == Counter(range(1, 7))


def test_a_tracker_that_is_down_costs_training_nothing(
    tmp_path: Path, uri: str, client: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a tracker nothing blocks, one warning is shown, and `sync` brings everything into a database later."""
    began = time.monotonic()
    tracker = start(tmp_path, DOWN)
    for step in range(1, 1501):
        tracker.log(step, {"loss": float(step)})
    assert time.monotonic() - began < 1.0
    assert tracker.wait_run_id(20) is None
    tracker.finish("FINISHED")
    assert time.monotonic() - began < 15.0
    assert tracker.num_failures >= 1
    assert sum("cannot be reached" in record.message for record in caplog.records) == 1
    assert final_metrics(tmp_path) == {"loss": 1500.0}

    synced = sync(tmp_path, uri)
    assert (synced.num_sent, synced.num_present, synced.status) == (1500, 0, "FINISHED")
    assert steps(client, synced.run_id) == Counter(range(1, 1501))
    assert client.get_run(synced.run_id).info.status == "FINISHED"
    again = sync(tmp_path)
    assert (again.run_id, again.num_sent) == (synced.run_id, 0)
    assert "nothing was missing" in str(again)


def test_a_new_database_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    """While another process holds the lock beside a database, it is not opened; afterwards it is."""
    opening = threading.Thread(target=mlflow_run.connect, args=(f"sqlite:///{tmp_path}/mlflow.db",))
    with (tmp_path / "mlflow.db.lock").open("w") as lock:
        assert mlflow_run.locked_by(lock.fileno(), 0)
        with (tmp_path / "mlflow.db.lock").open("w") as other:
            assert not mlflow_run.locked_by(other.fileno(), 0)
        opening.start()
        opening.join(0.2)
        assert opening.is_alive()
        assert not (tmp_path / "mlflow.db").exists()
    opening.join(60)
    assert (tmp_path / "mlflow.db").exists()


def test_a_new_database_appears_as_a_whole(tmp_path: Path) -> None:
    """A process killed while MLflow builds its tables leaves no database, and the next one makes it."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    program = (
        "import os, signal, sqlalchemy.event; from sqlalchemy.engine import Engine\n"
        "def kill(connection, cursor, statement, *_):\n"
        "    if statement.strip().startswith('ALTER TABLE'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "sqlalchemy.event.listen(Engine, 'after_cursor_execute', kill)\n"
        f"from elastic_train.mlflow_run import connect; connect({uri!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    assert mlflow_run.connect(uri).search_experiments()


def test_sync_of_a_run_without_an_end_says_running(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """`sync` does not invent an end: a run whose last term was killed is RUNNING."""
    start(tmp_path, None, term=1).finish("KILLED")
    tracker = start(tmp_path, None, term=2)
    tracker.log(1, {"loss": 1.0})
    synced = sync(tmp_path, uri)
    assert synced.status is None
    assert client.get_run(synced.run_id).info.status == "RUNNING"
    assert "RUNNING" in str(synced)


def test_sync_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    """No run's folder and no known tracker are the user's error; a tracker that is down is a StorageError."""
    with pytest.raises(ConfigError, match="no run's folder"):
        sync(tmp_path, DOWN)
    start(tmp_path, None).finish("FINISHED")
    with pytest.raises(ConfigError, match="--mlflow-uri"):
        sync(tmp_path)
    with pytest.raises(StorageError, match="cannot be reached"):
        sync(tmp_path, DOWN)


def test_sync_leaves_a_live_run_alone(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """While a trainer sends, `sync` refuses instead of sending the same values beside it."""
    tracker = start(tmp_path, uri)
    run_of(client, tracker)
    with pytest.raises(StorageError, match="a trainer is running"):
        sync(tmp_path)
    tracker.finish("FINISHED")
    assert sync(tmp_path).status == "FINISHED"


def test_an_older_term_neither_sends_nor_ends_the_run_of_a_newer_one(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """A leader that was left behind by a newer term cannot end its run."""
    old = start(tmp_path, uri, term=1)
    run_id = run_of(client, old).info.run_id
    new = start(tmp_path, uri, term=2)
    old.finish("FAILED")
    new.log(1, {"loss": 1.0})
    new.finish("FINISHED")
    assert client.get_run(run_id).info.status == "FINISHED"
    assert new.wait_run_id(0) == run_id


def test_a_process_killed_between_naming_and_making_the_run_makes_no_second(
    tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    """A run that was made but not yet written down is found again by the job's name."""
    tracker = start(tmp_path, uri)
    tracker.finish("FINISHED")
    link = read_link(tmp_path)
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
    assert tracker.num_failures == 1
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
    assert is_over.wait(30)
    tracker.finish("FAILED")
    assert tracker.num_failures == 4


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
    assert client.get_run(tracker.wait_run_id(30) or "").info.status == "RUNNING"
    tracker.finish("FINISHED")

    is_over = threading.Event()
    monkeypatch.setattr(delivery.Delivery, "open", lambda self: opened(self) if is_over.is_set() else 1 / 0)
    tracker = start(tmp_path / "b", uri)
    assert tracker.wait_run_id(30) is None
    assert tracker.num_failures >= tracking.MAX_FAILURES_AWAITED
    is_over.set()
    assert tracker.wait_run_id(30) is not None
    tracker.finish("FINISHED")


@pytest.mark.parametrize("content", ["", "- a list", "epochs: [", "just text"])
def test_sync_of_a_damaged_config_is_the_users_error(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty or foreign config.yaml ends `elastic-train sync` with one line that names it, and code 2."""
    start(tmp_path, None).finish("FINISHED")
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(SystemExit) as left:
        cli.main(["sync", str(tmp_path), "--mlflow-uri", DOWN])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/config.yaml" in line
    assert "name the folder of a run" in line


def test_sync_into_a_file_that_is_no_database_is_the_users_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A garbage database ends `elastic-train sync` with one line that names it, and code 2; so does a missing run."""
    start(tmp_path, None).finish("FINISHED")
    (tmp_path / "garbage.db").write_bytes(b"no database " * 1000)
    for run, expected in ((tmp_path, "is no MLflow database"), (tmp_path / "none", "no run's folder")):
        with pytest.raises(SystemExit) as left:
            cli.main(["sync", str(run), "--mlflow-uri", f"sqlite:///{tmp_path}/garbage.db"])
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


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


def test_log_is_cheap_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A call takes less than 50 µs; a disk that is full is told once, and does not end the training."""
    tracker = start(tmp_path, None)
    costs = []
    for step in range(2000):
        began = time.perf_counter()
        tracker.log(step, {"train/loss": 0.25, "train/samples_per_s": 1234.5, "lr": 1e-3})
        costs.append(time.perf_counter() - began)
    assert statistics.median(costs) < 50e-6

    def full(file: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        tracker.log(2000, {"lr": 1.0})
        tracker.log(2001, {"lr": 1.0})
    tracker.log(2002, {"lr": 2.0})
    tracker.finish("FINISHED")
    tracker.log(2003, {"lr": 3.0})
    assert final_metrics(tmp_path)["lr"] == 2.0
    assert sum("being lost" in record.message for record in caplog.records) == 1


def test_without_a_tracker_there_is_only_the_local_file(tmp_path: Path) -> None:
    """With mlflow_uri null nothing is waited for and no link to MLflow is made."""
    tracker = start(tmp_path, None)
    assert tracker.wait_run_id(20) is None
    tracker.finish("FINISHED")
    assert read_link(tmp_path) is None
    with pytest.raises(ValueError, match="none of"):
        tracker.finish("DONE")


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
    assert without_password("a: text with @") == "a: text with @"


def test_a_damaged_link_is_as_none(tmp_path: Path) -> None:
    """mlflow.json that cannot be read does not stop a job."""
    (tmp_path / "mlflow.json").write_text('{"job"')
    assert read_link(tmp_path) is None
    (tmp_path / "mlflow.json").write_text('{"job": "a"}')
    assert read_link(tmp_path) == Link("a")


def wait_until(is_true: object, timeout_s: float = 30) -> None:
    assert callable(is_true)
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not is_true():
        assert time.monotonic() < deadline
        pause.wait(0.02)
