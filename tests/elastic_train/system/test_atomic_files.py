"""A small file is replaced whole, whoever else replaces it at the same time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_train.system.atomic_files import publish, write_atomically
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History
from tests.conftest import PATIENCE_S


def test_processes_with_equal_ids_do_not_share_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers of one folder, each with a process of the same id: one replaces while the other has its draft."""
    path, real, texts = tmp_path / "config.yaml", Path.write_text, ["first", "second"]

    def interrupted(draft: Path, text: str) -> int:
        written = real(draft, text)
        if len(texts) == 2 and texts.pop() == "second":
            write_atomically(path, "second")
        return written

    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(Path, "write_text", interrupted)
    write_atomically(path, "first")
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_processes_with_equal_ids_do_not_share_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two jobs that have claimed one term, each in a store of its own, with one `run.dir`."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    files = BackgroundFiles()
    for _ in range(2):
        history = History(files, tmp_path, 3, 0)
        history.no_progress(step=1)
        history.close()
    assert files.flush(PATIENCE_S)
    assert [len(path.read_text().splitlines()) for path in (tmp_path / "history").iterdir()] == [1, 1]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder of it, and afterwards the folder that it is in."""
    draft, target, done = tmp_path / "draft", tmp_path / "target", list[str]()
    (draft / "within").mkdir(parents=True)
    for name in ("config.json", "within/weights"):
        (draft / name).write_bytes(b"text")
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def renamed(source: Path, name: Path) -> Path:
        done.append("renamed")
        return rename(source, name)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    publish(draft, target)
    before, after = done[: done.index("renamed")], done[done.index("renamed") + 1 :]
    assert sorted(before) == sorted(
        map(str, [draft, draft / "config.json", draft / "within", draft / "within/weights"])
    )
    assert after == [str(tmp_path)] and (target / "within/weights").read_bytes() == b"text" and not draft.exists()
