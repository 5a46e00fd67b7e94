"""A real MLflow database for all tests of what MLflow is sent, and a sender that looks often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_train.tracking import mlflow_run, tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture(scope="session")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sqlite tracker in a folder that does not exist yet."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/new/mlflow.db"


@pytest.fixture(scope="session")
def client(uri: str) -> MlflowClient:
    """A separate client, for the tests to look with."""
    return mlflow_run.connect(uri)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread looks often, so that tests need not wait."""
    monkeypatch.setattr(tracker, "SEND_EVERY_S", 0.02)
