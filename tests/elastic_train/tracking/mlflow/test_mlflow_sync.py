"""`sync`: what a run could not send is sent later, once, and nothing that may still change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_train.cli import main
from elastic_train.errors import ConfigError, StorageError
from elastic_train.tracking.delivery import LOCK
from elastic_train.tracking.mlflow_sync import sync
from tests.elastic_train.tracking.mlflow.jobs import DOWN, run_of, start, steps

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mlflow")]  # one database is made


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
    with pytest.raises(ConfigError, match="is not a run's folder"):
        sync(tmp_path, DOWN)
    (tmp_path / "config.yaml").write_text("epochs: 1\n")
    with pytest.raises(ConfigError, match="no metrics to send"):
        sync(tmp_path, DOWN)
    start(tmp_path, None).finish("FINISHED")
    with pytest.raises(ConfigError, match="--mlflow-uri"):
        sync(tmp_path)
    with pytest.raises(StorageError, match="cannot be reached"):
        sync(tmp_path, DOWN)
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).mkdir()
    with pytest.raises(OSError, match=f"Is a directory: '{tmp_path}/{LOCK}'"):  # which was said of the tracker
        sync(tmp_path, DOWN)


def test_sync_leaves_a_live_run_alone(tmp_path: Path, uri: str, client: MlflowClient) -> None:
    """While a trainer sends, `sync` refuses instead of sending the same values beside it."""
    tracker = start(tmp_path, uri)
    run_of(client, tracker)
    with pytest.raises(StorageError, match="a trainer is running"):
        sync(tmp_path)
    tracker.finish("FINISHED")
    assert sync(tmp_path).status == "FINISHED"


@pytest.mark.parametrize("content", ["", "- a list", "epochs: [", "just text"])
def test_sync_of_a_damaged_config_is_a_user_error(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty or foreign config.yaml ends `elastic-train sync` with one line that names it, and code 2."""
    start(tmp_path, None).finish("FINISHED")
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(SystemExit) as left:
        main.main(["sync", str(tmp_path), "--mlflow-uri", DOWN])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/config.yaml" in line
    assert "name the folder of a run" in line


def test_sync_into_a_file_that_is_not_a_database_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A garbage database ends `elastic-train sync` with one line that names it, and code 2; so does a missing run."""
    start(tmp_path, None).finish("FINISHED")
    (tmp_path / "garbage.db").write_bytes(b"no database " * 1000)
    for run, expected in ((tmp_path, "is not an MLflow database"), (tmp_path / "none", "is not a run's folder")):
        with pytest.raises(SystemExit) as left:
            main.main(["sync", str(run), "--mlflow-uri", f"sqlite:///{tmp_path}/garbage.db"])
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line
