"""Changes between two starts of a run are reported once, with both values, before the first step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.checkpoint.commits.record import Improvement
from elastic_train.config.schema import Config
from elastic_train.job.state import TrainProgress
from elastic_train.tasks.task_source import source_of
from elastic_train.training.opening.inspection import SOURCE, VALIDATION, say_changes, versions_of

TASK = "import changing_helper\n\nclass Changing:\n    sign = {sign}\n"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's task in its own file, with a helper module in the same folder."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changing_helper.py").write_text("FACTOR = 1\n")
    (tmp_path / "changing_task.py").write_text(TASK.format(sign=1))
    yield importlib.import_module("changing_task").Changing()
    for name in ("changing_task", "changing_helper"):
        sys.modules.pop(name, None)


IMPROVEMENT = Improvement("min loss", 0.5, 2, 4, num_since=2)


def said(
    config: Config, task: Any, versions: dict[str, str], step: int = 5, total: int = 10, validation: str | None = None
) -> list[str]:
    """Return the lines of a start that continues from a commit of these versions."""
    source_of.cache_clear()
    feed = SimpleNamespace(validation_digest=validation)
    plan = SimpleNamespace(config=config, task=task, total_steps=total, feed=feed)
    head = SimpleNamespace(versions=versions, key="commits/a.json", step=step, term=1)
    process = SimpleNamespace(
        plan=plan, state=SimpleNamespace(step=step, reached=TrainProgress(improvement=IMPROVEMENT)), warned=set()
    )
    lines: list[str] = []
    world = SimpleNamespace(is_leader=True, announce=lines.append)
    for _ in range(2):
        say_changes(process, world, head, versions_of(plan))  # type: ignore[arg-type]
    return lines


def config_in(folder: Path, **changes: object) -> Config:
    return Config.model_validate({"data": {"train": "rows"}, "run": {"dir": str(folder)}, **changes})


@pytest.mark.parametrize("file", ["changing_task.py", "changing_helper.py"])
def test_code_that_has_changed_is_named_by_its_file(tmp_path: Path, task: Any, file: str) -> None:
    """The task's file, or a module that it imports from its folder; equal code and older commits report nothing."""
    config = config_in(tmp_path / "run")
    source_of.cache_clear()
    plan = SimpleNamespace(config=config, task=task, feed=SimpleNamespace(validation_digest=None))
    before = versions_of(plan)  # type: ignore[arg-type]
    assert {name for name in before if name.startswith(SOURCE)} == {
        f"{SOURCE}changing_helper",
        f"{SOURCE}changing_task",
    }
    assert said(config, task, before) == [] and said(config, task, {}) == []
    (tmp_path / file).write_text((tmp_path / file).read_text().replace("1", "-1"))
    (line,) = said(config, task, before)
    assert line.startswith(f"WARNING: code has changed since commits/a.json: {tmp_path / file}.")


def test_a_library_of_another_version_is_named(tmp_path: Path, task: Any) -> None:
    config = config_in(tmp_path / "run")
    (line,) = said(config, task, {"torch": "1.0", "numpy": "0.9"})
    assert "torch 1.0, now 2" in line and "numpy 0.9, now" in line


def test_keys_that_have_changed_are_said_with_both_values(tmp_path: Path, task: Any) -> None:
    """Keys of the recipe (stored in the state), keys that belong to one node, and keys about commits are excluded."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_in(folder, threads_per_rank=2).to_yaml())
    now = config_in(folder, optimizer={"lr": 0.25}, checkpoint={"every": "7 steps"}, device="cpu", epochs=2)
    (line,) = said(now, task, {})
    assert line == (
        "The configuration has changed since the last start: threads_per_rank was 2 and is 1 now; bits of the weights "
        "may differ from here on"
    )


def test_a_validation_set_of_other_rows_is_named_whatever_its_path_is(tmp_path: Path, task: Any) -> None:
    """Otherwise its values would be compared with those of other rows; without a validation set nothing is compared."""
    config = config_in(tmp_path / "run", data={"train": "rows", "validation": "held/out"})
    (line,) = said(config, task, {VALIDATION: "a" * 64}, validation="b" * 64)
    assert line.startswith("WARNING: the validation set held/out is not the one of commits/a.json (digest bbbbbbbbbbbb")
    for before, now in (({VALIDATION: "b"}, "b"), ({}, "b"), ({VALIDATION: "b"}, None)):
        assert said(config, task, before, validation=now) == []


def test_a_run_that_is_done_already_says_so(tmp_path: Path, task: Any) -> None:
    (line,) = said(config_in(tmp_path / "run"), task, {}, 10, 10)
    assert line.startswith("All 10 steps are applied already (commits/a.json)")


def test_a_run_that_early_stopping_has_ended_says_so(tmp_path: Path, task: Any) -> None:
    """It says nothing if a higher patience lets it continue."""
    held: Any = {"train": "rows", "validation": "held"}
    for patience, lines in (
        (2, ["Early stopping has ended this run after step 5 of 10 (commits/a.json): raise "]),
        (3, []),
    ):
        validation = {"every": "1 steps", "early_stopping": {"metric": "min loss", "patience": patience}}
        config = config_in(tmp_path / "run", data=held, validation=validation)
        assert [line.partition("valid")[0] for line in said(config, task, {})] == lines
