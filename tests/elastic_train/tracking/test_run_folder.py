"""A run's folder: what is read from its files, and what is said of a folder that is not a run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.errors import ConfigError
from elastic_train.tracking.run_folder import Link, RunFolder


def test_a_running_jobs_folder_has_a_configuration_and_no_result(tmp_path: Path) -> None:
    """Settings are text, None where they are unset or null; result and link are None until they are written."""
    (tmp_path / "config.yaml").write_text("data: {train: rows}\ntracking: {mlflow_uri: null}\nepochs: 1\n")
    run = RunFolder(tmp_path)
    assert run.config()["epochs"] == 1
    assert run.setting("data", "train") == "rows"
    assert [run.setting(*key) for key in (("tracking", "mlflow_uri"), ("run", "name"), ("epochs", "x"))] == [None] * 3
    assert run.result() is None
    assert run.link() is None


def test_a_link_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """The job's name, its run and its tracker survive a restart."""
    link = Link("job", "run", "sqlite:///mlflow.db")
    RunFolder(tmp_path).write_link(link)
    assert RunFolder(tmp_path).link() == link


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    """No config.yaml: the configuration is refused with the folder's name, and no setting is known."""
    with pytest.raises(ConfigError, match=rf"{tmp_path} is not a run's folder: it has no config\.yaml"):
        RunFolder(tmp_path).config()
    assert RunFolder(tmp_path).setting("data", "train") is None


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "\x00"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    """Content that no run writes is refused with its path, never taken for an absent file."""
    (tmp_path / "config.yaml").write_text(content)
    (tmp_path / "result.json").write_text(content)
    for read, name in ((RunFolder(tmp_path).config, "config.yaml"), (RunFolder(tmp_path).result, "result.json")):
        with pytest.raises(ConfigError, match=rf"^{tmp_path}/{name} (cannot be read|has no keys)"):
            read()
