"""Comparing runs by their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.cli import main
from elastic_train.cli.runs.compare import show
from elastic_train.errors import ConfigError
from elastic_train.runs.compare import Comparison, compare
from elastic_train.system.files import write_atomically
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.tracker import Tracker
from tests.elastic_train.runs.folders import faulted

pytestmark = pytest.mark.slow
Shown = Callable[[Comparison], str]


def write_run(folder: Path, *, lr: float, accuracy: float, weights: str | None) -> None:
    config = {"optimizer": {"lr": lr}, "epochs": 1}
    write_atomically(folder / "config.yaml", json.dumps(config))
    tracker = Tracker.start(
        files=BackgroundFiles(),
        run_dir=folder,
        term=1,
        config=config,
        mlflow_uri=None,
        experiment="compare",
        run_name=folder.name,
    )
    tracker.log(1, {"train/loss": 2.0})
    tracker.log(2, {"train/loss": accuracy * 2, "validation/accuracy": accuracy})
    if weights is not None:
        result = {"weights_sha256": weights, "metrics": {"accuracy": accuracy}}
        write_atomically(folder / "result.json", json.dumps(result))
    tracker.finish("FINISHED")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What is printed of a comparison."""
    monkeypatch.setenv("COLUMNS", "120")

    def printed(comparison: Comparison) -> str:
        show(comparison)
        return capsys.readouterr().out

    return printed


def test_folders_are_compared_by_config_metrics_and_weights(tmp_path: Path, shown: Shown) -> None:
    """Only keys that differ are listed; metrics stand beside each other; the weights are different."""
    write_run(tmp_path / "a", lr=0.1, accuracy=0.5, weights="aa")
    write_run(tmp_path / "b", lr=0.2, accuracy=0.75, weights="bb")
    comparison = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert comparison.config() == {"optimizer.lr": ("0.1", "0.2")}
    assert comparison.metrics() == {"train/loss": (1.0, 1.5), "validation/accuracy": (0.5, 0.75)}
    assert comparison.same_weights() is False
    assert comparison.as_json()["metrics"]["train/loss"] == {"a": 1.0, "b": 1.5, "difference": 0.5}
    text = shown(comparison)
    assert "weights: different" in text
    assert "optimizer.lr" in text
    assert "0.25" in text


def test_equal_runs_say_so(tmp_path: Path, shown: Shown) -> None:
    """Two runs with one configuration and one hash differ in nothing."""
    write_run(tmp_path / "a", lr=0.1, accuracy=0.5, weights="aa")
    write_run(tmp_path / "b", lr=0.1, accuracy=float("nan"), weights="aa")
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert comparison.same_weights() is True
    assert "no key differs" in shown(comparison)
    assert comparison.as_json()["metrics"]["validation/accuracy"]["b"] == "nan"


def test_hashes_of_different_versions_say_nothing_about_the_weights(tmp_path: Path, shown: Shown) -> None:
    """Weights that can be cut have another hash since format 4."""
    for name, weights, version in (("a", "aa", 3), ("b", "bb", 3), ("c", "bb", 4)):
        write_run(tmp_path / name, lr=0.1, accuracy=0.5, weights=weights)
        result = json.loads((tmp_path / name / "result.json").read_text())
        (tmp_path / name / "result.json").write_text(json.dumps({**result, "format": version}))
    assert compare(tmp_path / "a", tmp_path / "b").same_weights() is False
    assert compare(tmp_path / "b", tmp_path / "c").same_weights() is True, "where no tensor is cut"
    comparison = compare(tmp_path / "a", tmp_path / "c")
    assert comparison.same_weights() is None
    assert "unknown (versions with different hashes" in shown(comparison)


def test_a_run_without_a_result_has_unknown_weights(tmp_path: Path, shown: Shown) -> None:
    """A run that has not ended is compared by its local metrics; its weights are unknown."""
    write_run(tmp_path / "a", lr=0.1, accuracy=0.5, weights="aa")
    write_run(tmp_path / "b", lr=0.1, accuracy=0.5, weights=None)
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert comparison.same_weights() is None
    assert comparison.metrics()["validation/accuracy"] == (0.5, 0.5)
    assert "unknown" in shown(comparison)


@pytest.mark.parametrize("name", ["no/such/folder", "0123abc"])
def test_a_missing_run_is_a_user_error(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        compare(name, name)


def test_a_folder_that_is_not_a_run_is_a_user_error(tmp_path: Path) -> None:
    """A folder without config.yaml is refused by name, and so is a damaged result."""
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        compare(tmp_path, tmp_path)
    (tmp_path / "config.yaml").write_text("epochs: 1\n")
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        compare(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.yaml", ""), ("config.yaml", "- 1"), ("config.yaml", "a: ["), ("result.json", "[1]"), ("result.json", "")],
)
def test_a_damaged_file_ends_compare_with_one_line(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty, foreign or damaged file of a run is named in one line, and the exit code is 2."""
    (tmp_path / "config.yaml").write_text("epochs: 1\n")
    (tmp_path / name).write_text(content)
    assert lines_of_failure([str(tmp_path), str(tmp_path)], capsys)[0].startswith(f"error: {tmp_path}/{name} ")


def test_metrics_of_a_foreign_result_are_left_out(tmp_path: Path) -> None:
    """A result whose metrics are no mapping is compared by what else is known."""
    write_run(tmp_path / "a", lr=0.1, accuracy=0.5, weights="aa")
    (tmp_path / "a" / "result.json").write_text('{"metrics": [1], "weights_sha256": "aa"}')
    assert compare(tmp_path / "a", tmp_path / "a").same_weights() is True


def lines_of_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as left:
        main.main(["compare", *arguments])
    assert left.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines


def test_three_runs_stand_side_by_side(tmp_path: Path, shown: Shown) -> None:
    """By letters, with what their histories say, where they have one; a difference is of two runs only."""
    told = faulted(tmp_path, "a")
    told.config(optimizer={"lr": 0.3})
    write_run(tmp_path / "b", lr=0.1, accuracy=0.5, weights="aa")
    write_run(tmp_path / "c", lr=0.1, accuracy=0.5, weights="aa")
    comparison = compare(*(tmp_path / name for name in "abc"))
    found = comparison.as_json()
    assert found["config"]["optimizer.lr"] == {"a": "0.3", "b": "0.1", "c": "0.1"}
    assert found["figures"]["steps_lost"] == {"a": 3.0, "b": None, "c": None}
    assert found["figures"]["goodput"]["a"] == pytest.approx(76.75 / 92.5)
    assert found["weights"] == {"a": "ab" * 32, "b": "aa", "c": "aa", "same": False}
    assert found["metrics"]["train/loss"] == {"a": 2.0 / 77, "b": 1.0, "c": 1.0}
    text = shown(comparison)
    assert "weights: different" in text and "longest_rto_s" in text and "b - a" not in text


def test_runs_that_do_not_exist_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        compare(tmp_path / "no" / "one", tmp_path / "no" / "two")
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match="2 to 26 runs"):
        compare(tmp_path)
