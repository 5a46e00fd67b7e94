"""Origins: a folder appears whole or not at all, and is never overwritten by accident."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from pathlib import Path
from typing import cast

import pytest

from elastic_train.data.corpora.origin import NAME, filled, is_finished, read_origin
from elastic_train.errors import ConfigError, StorageError
from elastic_train.system.process_identity import pid_space, process_identity
from rendezvous.process_table import stat_of

ORIGIN = {"source": "test", "seed": 1, "files": ("a", "b")}
ENDED_PID = 2**22 + 1  # above the largest pid there can be


def test_a_filled_folder_is_finished(tmp_path: Path) -> None:
    """The folder has the block's files and their origin, and nothing else."""
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


def test_a_full_disk_is_named_by_the_folder(tmp_path: Path) -> None:
    """As a library says it that writes Parquet: without the file's name."""
    said = r"/out: cannot write: No space left .*another folder"
    with pytest.raises(StorageError, match=said), filled(tmp_path / "out", ORIGIN):
        raise OSError(errno.ENOSPC, "Error writing bytes to file")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """A draft of a process that is gone is deleted, and one whose pid another has now; a living one's is left alone."""
    me, born = os.getpid(), cast(int, process_identity()["born"])
    ended, again, mine = (f"{who}-{pid_space()}-0" for who in (f"{ENDED_PID}-7", f"{me}-{born - 1}", f"{me}-{born}"))
    drafts = [f".out.{who}.partial" for who in (ended, again, mine)] + [f".out.{again}.old.partial"]
    for draft in drafts:
        (tmp_path / draft).mkdir()
    with filled(tmp_path / "new", ORIGIN):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*drafts, "new"}, "another dataset's"
    with filled(tmp_path / "out", ORIGIN):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {f".out.{mine}.partial", "new", "out"}


@pytest.mark.parametrize("who", ["7-7-another-boot-1-0", str(ENDED_PID)], ids=["another machine", "an earlier version"])
def test_drafts_from_elsewhere_are_left_for_a_day(tmp_path: Path, who: str) -> None:
    """A process of another machine or container that shares the folder cannot be asked for, and may be at work."""
    draft = tmp_path / f".out.{who}.partial"
    for age_s, is_left in ((3600.0, True), (100_000.0, False)):
        draft.mkdir(exist_ok=True)
        os.utime(draft, (time.time() - age_s,) * 2)
        with filled(tmp_path / "out", ORIGIN):
            pass
        assert draft.exists() == is_left


@pytest.mark.slow
def test_a_killed_import_that_nobody_has_reaped_is_dead(tmp_path: Path) -> None:
    """Its number is still taken, in a container without an init for ever: its partial folder would stay as long."""
    with subprocess.Popen(["sleep", "600"]) as killed:
        stat = stat_of(killed.pid)
        assert stat is not None
        (tmp_path / f".out.{killed.pid}-{stat.born}-{pid_space()}-0.partial").mkdir()
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


@pytest.mark.parametrize("folder", [".", "..", "a/..", "/"])
def test_a_dataset_does_not_take_the_place_of_the_working_folder(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder in which somebody works is no name either: it would be moved away."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no name for a dataset; name a folder in it"):
        is_finished(Path(folder), ORIGIN)


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
