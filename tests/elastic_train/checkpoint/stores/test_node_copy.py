"""The node copy is read if it matches the record, and is not needed otherwise."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.commits.pruning import drop_unfinished, prune
from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.checkpoint.stores.fsspec_store import FsspecStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, KeyMissing, Store
from tests.elastic_train.checkpoint.commit_samples import facts, small_state, writer


@pytest.fixture
def far_url() -> str:
    """Return a remote store's URL."""
    return f"memory://{uuid.uuid4().hex}/run"


def value_of(store: Store, record: CommitRecord) -> float:
    """Return the value that identifies a small state."""
    model = read_state(store, record)["model"]
    assert isinstance(model, dict)
    return float(model["w"][0])


def near_files(folder: Path) -> list[Path]:
    """Return the files of the local copy."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_commit_saved_on_this_node_is_read_from_it(far_url: str, tmp_path: Path) -> None:
    """Without the remote files the state still loads where it was saved, and nowhere else."""
    store, far = open_store(far_url, str(tmp_path)), open_store(far_url)
    record = writer(store).save(small_state(7), facts(1))
    assert discover(far).head == record
    assert value_of(far, record) == 7
    for name in record.files:
        far.delete(f"{record.attempt}/{name}")
    assert value_of(store, record) == 7
    with pytest.raises(KeyMissing):
        read_state(far, record)


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "all"])
def test_a_node_copy_that_does_not_match_is_not_read(far_url: str, tmp_path: Path, harm: str) -> None:
    """If it is damaged, torn or missing, the store's file is read instead."""
    store = open_store(far_url, str(tmp_path))
    record = writer(store).save(small_state(7), facts(1))
    files = near_files(tmp_path)
    assert len(files) == 2
    for path in files:
        if harm == "flip":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        elif harm == "truncate":
            os.truncate(path, 9)
        elif harm == "all" or path.name != ".metadata":
            path.unlink()
    assert value_of(store, record) == 7


def test_the_record_decides_and_not_the_node_copy(far_url: str, tmp_path: Path) -> None:
    """A node copy without a record in the store is not a commit."""
    store = open_store(far_url, str(tmp_path))
    with store.write("data/step-000000000009/00000001-dead/__0_0.distcp") as sink:
        sink.write(b"whole")
    assert len(near_files(tmp_path)) == 1
    assert discover(store).head is None


def test_the_newest_attempts_are_kept_on_the_node(far_url: str, tmp_path: Path) -> None:
    """The newest commit's files stay, and those of the one before it, so that memory is bounded."""
    store = open_store(far_url, str(tmp_path))
    commits = writer(store)
    records = [commits.save(small_state(step), facts(step)) for step in range(1, 5)]
    kept = {path.parent.relative_to(tmp_path).as_posix().partition("/")[2] for path in near_files(tmp_path)}
    assert kept == {records[-1].attempt, records[-2].attempt}
    assert [value_of(store, record) for record in records] == [1, 2, 3, 4]
    prune(store, Retention.of(last=1))
    assert {path.parent.name for path in near_files(tmp_path)} == {records[-1].attempt.rpartition("/")[2]}


def test_an_unwritable_node_copy_fails_no_save(far_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged, and the commit in the store is valid."""
    (tmp_path / "file").write_text("")
    store = open_store(far_url, str(tmp_path / "file"))
    record = writer(store).save(small_state(7), facts(1))
    assert "no copy is kept on this node" in caplog.text
    assert value_of(store, record) == 7


def test_a_full_node_copy_disk_fails_no_save(
    far_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The incomplete copy is removed, and the store's file is complete."""
    store = open_store(far_url, str(tmp_path))
    full, real_open = Path("/dev/full"), Path.open

    def open_on_a_full_disk(path: Path, mode: str = "r", **more: Any) -> object:
        return real_open(full if path.name.endswith("distcp.partial") else path, mode, **more)

    monkeypatch.setattr(Path, "open", open_on_a_full_disk)
    record = writer(store).save({"w": torch.arange(1_000_000.0)}, facts(1))
    assert "No space left" in caplog.text
    assert [path.name for path in near_files(tmp_path)] == [".metadata"]
    assert torch.equal(read_state(store, record)["w"], torch.arange(1_000_000.0))


def test_a_failed_save_leaves_nothing_in_the_node_copy(far_url: str, tmp_path: Path) -> None:
    """A file whose writing ended with an error is in neither place."""
    store = open_store(far_url, str(tmp_path))
    with pytest.raises(ZeroDivisionError), store.write("data/x/y/file") as sink:
        sink.write(b"half")
        raise ZeroDivisionError
    assert near_files(tmp_path) == []
    assert store.list("data/") == []


def test_checking_a_node_copy_counts_as_progress(far_url: str, tmp_path: Path) -> None:
    """Reading a large one takes long: the watchdog sees every block."""
    reports: list[None] = []
    store = DeadlineStore(open_store(far_url, str(tmp_path)), lambda: reports.append(None))
    record = writer(store).save({"w": torch.zeros(1_000_000)}, facts(1))
    reports.clear()
    store.near({f"{record.attempt}/{name}": file for name, file in record.files.items()})
    assert len(reports) >= sum(len(file.blocks) for file in record.files.values()) >= 5


def test_uploads_that_killed_processes_left_are_dropped_where_copies_are_kept(
    far_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the far store has any."""
    monkeypatch.setattr(FsspecStore, "drop_unfinished", lambda store, *asked, **how: [*asked, how["is_rehearsal"]])
    store = open_store(far_url, str(tmp_path))
    assert drop_unfinished(store, now=10.0, safe_age_s=3.0, is_rehearsal=True) == ["data/", 7.0, True]
    assert drop_unfinished(open_store(str(tmp_path / "far"), str(tmp_path)), now=10.0) == []
