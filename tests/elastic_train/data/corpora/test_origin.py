"""Origins: a folder appears whole or not at all, and is never overwritten by accident."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from elastic_train.data.corpora.origin import (
    NAME,
    filled,
    is_finished,
    read_origin,
)
from elastic_train.errors import ConfigError

ORIGIN = {"source": "test", "seed": 1, "files": ("a", "b")}
ENDED_PID = 2**22 + 1  # above the largest pid there can be


def test_a_filled_folder_is_finished(tmp_path: Path) -> None:
    """What the block wrote is there with its origin, and nothing else is beside it."""
    with filled(tmp_path / "deep" / "out", ORIGIN) as partial:
        (partial / "x").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == [NAME, "x"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert is_finished(tmp_path / "deep" / "out", ORIGIN)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """If the block raises, neither the folder nor a part of it remains, and what was there before stays."""
    with filled(tmp_path / "out", ORIGIN) as partial:
        (partial / "x").write_text("old")
    with pytest.raises(RuntimeError, match="planted"), filled(tmp_path / "out", ORIGIN) as partial:
        (partial / "x").write_text("new")
        raise RuntimeError("planted")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "x").read_text() == "old"


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """A partial folder of a process that is gone is deleted; one of a living process is left alone."""
    dead, alive = (tmp_path / f".out.{pid}.partial" for pid in (ENDED_PID, 1))
    for folder in (dead, alive):
        folder.mkdir()
    with filled(tmp_path / "out", ORIGIN):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.1.partial", "out"]


@pytest.mark.slow
def test_a_killed_import_that_nobody_has_reaped_is_dead(tmp_path: Path) -> None:
    """Its number is still taken, in a container without an init for ever: its partial folder would stay as long."""
    with subprocess.Popen(["sleep", "60"]) as killed:
        (tmp_path / f".out.{killed.pid}.partial").mkdir()
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        with filled(tmp_path / "out", ORIGIN):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_replacing_removes_the_old_content(tmp_path: Path) -> None:
    """A folder filled again holds only the new content."""
    for name in ("x", "y"):
        with filled(tmp_path / "out", ORIGIN) as partial:
            (partial / name).touch()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [NAME, "y"]


def test_an_absent_or_empty_folder_is_not_finished(tmp_path: Path) -> None:
    """There is nothing to overwrite in them."""
    assert [is_finished(folder, ORIGIN) for folder in (tmp_path, tmp_path / "absent")] == [False, False]


def test_another_dataset_is_not_overwritten(tmp_path: Path) -> None:
    """The message names every parameter that differs; `replace` allows it."""
    (tmp_path / NAME).write_text(json.dumps({**ORIGIN, "seed": 2, "old": 0}))
    with pytest.raises(ConfigError, match=r"made differently \(seed, old\); choose another folder"):
        is_finished(tmp_path, ORIGIN)
    assert is_finished(tmp_path, ORIGIN, replace=True) is False


@pytest.mark.parametrize("text", [None, "{", "[]"], ids=["none", "torn", "a list"])
def test_a_foreign_folder_is_not_overwritten(tmp_path: Path, text: str | None) -> None:
    """A folder without a readable origin is somebody's work."""
    (tmp_path / "thesis.txt").touch()
    if text is not None:
        (tmp_path / NAME).write_text(text)
    assert read_origin(tmp_path) is None
    with pytest.raises(ConfigError, match="exists and is not an imported dataset"):
        is_finished(tmp_path, ORIGIN)


def test_a_file_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    """The target may be a file by mistake."""
    (tmp_path / "out").write_text("thesis")
    with pytest.raises(ConfigError, match="exists and is not an imported dataset"):
        is_finished(tmp_path / "out", ORIGIN)
