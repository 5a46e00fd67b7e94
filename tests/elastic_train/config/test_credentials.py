"""Passwords in a configuration: those that may be there are shown nowhere, others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from elastic_train.config.credentials import has_password, without_password
from elastic_train.config.schema import Config
from elastic_train.config.sources import load
from elastic_train.errors import ConfigError
from elastic_train.system.wording import first_line

TRACKER = "postgresql://me:planted@host:5432/mlflow"


def written(folder: Path, **tree: object) -> Path:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump({"data": {"train": "rows"}, **tree}))
    return path


@pytest.mark.parametrize(
    ("url", "shown", "is_secret"),
    [
        ("postgresql://me:secret@host/x", "postgresql://***@host/x", True),
        ("sftp://me:se@cret@host/x", "sftp://***@host/x", True),
        ("hdfs://me@host/x", "hdfs://***@host/x", False),
        ("http://host:5000", "http://host:5000", False),
        ("a: text with @", "a: text with @", False),
        ("http://[", "http://[", False),
    ],
)
def test_what_a_url_says_without_its_password(url: str, shown: str, is_secret: bool) -> None:
    assert without_password(url) == shown
    assert has_password(url) == is_secret
    assert "cret" not in first_line(OSError(f"cannot reach {url} now"))


def test_what_is_written_leaves_passwords_out(tmp_path: Path) -> None:
    path = written(tmp_path, tracking={"mlflow_uri": TRACKER})
    config = load(path, environ={})
    assert config.tracking.mlflow_uri == TRACKER
    assert "planted" not in config.to_yaml() and "postgresql://***@host:5432/mlflow" in config.to_yaml()
    assert config.left_out() == {"tracking.mlflow_uri": TRACKER}
    plain = load(path, environ={}, overrides={"tracking.mlflow_uri": "http://host"})
    assert plain.left_out() == {} and "mlflow_uri: http://host" in plain.to_yaml()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train", "sftp://me:planted@host/rows"),
        ("checkpoint.url", "sftp://me:planted@host/run"),
        ("task.params", {"words": ["http://me:planted@host/words"]}),
        ("data.mixture", [{"source": "sftp://me:planted@host/rows", "weight": 1.0}]),
    ],
)
def test_elsewhere_a_password_is_refused(tmp_path: Path, key: str, value: object) -> None:
    path = written(tmp_path, data={} if key == "data.mixture" else {"train": "rows"})
    with pytest.raises(ConfigError, match=r"://\*\*\*@host/.* with a password, which would be written") as refused:
        load(path, environ={}, overrides={key: value})  # type: ignore[dict-item]
    assert key in str(refused.value) and "planted" not in str(refused.value)


def test_a_program_that_makes_a_configuration_is_not_told_its_password() -> None:
    with pytest.raises(ValidationError) as refused:
        Config.model_validate({"data": {"train": "sftp://me:planted@host/rows"}})
    assert "planted" not in str(refused.value)


def test_a_user_alone_is_no_password(tmp_path: Path) -> None:
    config = load(written(tmp_path, checkpoint={"url": "hdfs://me@host/run"}), environ={})
    assert "hdfs://me@host/run" in config.to_yaml()
