"""Ranks that cannot write commits are excluded, and the store's keeper deletes what nobody needs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.checkpoint.commits.reader import discover
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving import store_health
from elastic_train.checkpoint.saving.store_health import MOST_UNWRITTEN, StoreHealth, StoreKeeper, probe
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import NotAllowed
from elastic_train.errors import StorageError
from elastic_train.system.file_systems import location_of
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History
from elastic_train.tracking.history_files import FOLDER
from elastic_train.world import one_store
from elastic_train.world.claims import term_key
from elastic_train.world.fencing import StoreFence
from tests.conftest import PATIENCE_S, eventually
from tests.elastic_train.checkpoint.commit_samples import facts, small_state


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Set an action that runs before a key is created."""

    def before(act: Callable[[], None]) -> None:
        real = LocalStore.create

        def create(store: LocalStore, key: str, content: bytes) -> None:
            act()
            real(store, key, content)

        monkeypatch.setattr(LocalStore, "create", create)

    return before


def refuse() -> None:
    raise StorageError("read-only file system")


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    probe(str(tmp_path))
    assert LocalStore(tmp_path).list(store_health.PROBES) == []


def test_a_process_vouches_for_itself_once_it_has_found_out(tmp_path: Path) -> None:
    """It does not do so at the first question, nor after its own saves have failed."""
    use = StoreHealth(str(tmp_path))
    assert not use.confirm_writable()
    eventually(use.confirm_writable)
    use.note_unwritten(StorageError("full"), is_silent=False)
    assert not use.confirm_writable()
    use.note_written()
    eventually(use.confirm_writable)


def test_a_barred_process_writes_again_when_it_can(
    tmp_path: Path, create: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use = StoreHealth(str(tmp_path))
    assert use.try_again()
    use.exclude()
    with monkeypatch.context():
        create(refuse)
        assert not use.try_again() and use.why == "read-only file system"
    monkeypatch.undo()
    assert use.try_again() and not use.is_barred


def test_storage_that_hangs_holds_nobody_up(
    tmp_path: Path, create: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An excluded process waits for an answer only briefly, and starts no second check meanwhile."""
    monkeypatch.setattr(store_health, "ANSWER_S", 0.05)
    thawed, num_asked = threading.Event(), [0]

    def hang() -> None:
        num_asked[0] += 1
        thawed.wait(PATIENCE_S)

    create(hang)
    use = StoreHealth(str(tmp_path))
    use.exclude()
    assert not use.try_again()
    eventually(lambda: num_asked == [1])
    assert not use.try_again() and num_asked == [1]
    thawed.set()
    eventually(use.try_again)


def test_a_process_that_cannot_even_say_so_counts_at_once(tmp_path: Path) -> None:
    """Otherwise rank 0 would wait for its part in vain, at every save."""
    use = StoreHealth(str(tmp_path))
    use.note_unwritten(NotAllowed("read-only"), is_silent=True)
    assert use.num_unwritten == MOST_UNWRITTEN and use.is_refused
    use.note_unwritten(StorageError("input/output error"), is_silent=False)
    assert not use.is_refused


class KeptJob:
    """A job with a commit, in a folder that is monitored."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.files = folder, LocalStore(folder), BackgroundFiles()
        word, fence = one_store.identify(self.store), StoreFence(self.store)
        self.term = fence.claim()
        (folder / "config.yaml").write_text("epochs: 1\n")
        self.history = History(self.files, folder, self.term, 0)
        self.history.form(world=1, cause="start", joined_at=None, sealed_at=None, started_at=0.0)
        keys = {one_store.KEY: word.encode(), term_key(self.term): fence.claimed}
        texts = {folder / "config.yaml": "epochs: 1\n"}
        self.keeper = StoreKeeper(self.store, keys, location_of(str(folder)), self.files, texts)
        self.commits = CommitWriter(self.store, fence, self.term, None, self.keeper.look)
        self.save(1)

    def save(self, step: int) -> list[str]:
        """Commit a step as a world does; return the reported changes."""
        self.commits.save(small_state(), facts(step))
        self.keeper.keep_files()
        self.files.flush(PATIENCE_S)
        return self.keeper.take_said()

    def is_whole(self, step: int) -> bool:
        """Return True if a joiner, a new start and the judge find what they need."""
        head = discover(LocalStore(self.folder)).head
        histories = [path.read_text() for path in (self.folder / FOLDER).glob("*.jsonl")]
        return (
            head is not None
            and head.step == step
            and one_store.identity_of(self.store) == one_store.identify(LocalStore(self.folder))
            and StoreFence(self.store).claim() == self.term + 1
            and (self.folder / "config.yaml").read_text() == "epochs: 1\n"
            and any('"form"' in text for text in histories)
        )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (".", ["store-id and terms/00000001.json were removed", "step 1 is lost"]),
        ("commits", ["step 1 is lost (commits/00000001-000000000001.json is missing)"]),
        ("data", ["step 1 is lost", "is missing"]),
        ("terms", ["terms/00000001.json were removed"]),
        ("store-id", ["store-id were removed"]),
        ("config.yaml", []),
        (FOLDER, []),
    ],
)
@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_removed_is_said_and_the_next_commit_is_complete(
    tmp_path: Path, lost: str, said: list[str], is_moved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder, or any part of it; the log reports parts that are not the store's. Each loss is reported once."""
    job = KeptJob(tmp_path / "run")
    assert job.save(2) == []
    target = job.folder / lost
    if is_moved:
        target.rename(tmp_path / "moved")
    else:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    noticed = job.save(3)
    assert len(noticed) == bool(said)
    for part in said:
        assert part.replace("step 1", "step 2").replace("000000000001.json is", "000000000002.json is") in noticed[0]
    if not said:
        assert "was removed while this" in caplog.text
    assert job.save(4) == []
    assert job.is_whole(4)


def _unmount(job: KeptJob, patch: pytest.MonkeyPatch) -> None:
    """Expose the empty folder under a mount point."""
    job.folder.rename(job.folder.with_name("away"))
    patch.setattr(store_health, "location_of", lambda url: (0, "/", url))


def _mount_another(job: KeptJob, patch: pytest.MonkeyPatch) -> None:
    """Mount another job's folder over this one's."""
    job.folder.rename(job.folder.with_name("away"))
    one_store.identify(LocalStore(job.folder))


def _mount_a_copy(job: KeptJob, patch: pytest.MonkeyPatch) -> None:
    """Mount a snapshot, which lacks the newest claim."""
    shutil.copytree(job.folder, job.folder.with_name("away"))
    (job.folder / term_key(job.term)).unlink()
    patch.setattr(store_health, "location_of", lambda url: (0, "/", url))


def _link_elsewhere(job: KeptJob, patch: pytest.MonkeyPatch) -> None:
    """Make the folder's name a link to an empty folder of the same disk."""
    job.folder.rename(job.folder.with_name("away"))
    job.folder.with_name("empty").mkdir()
    job.folder.symlink_to("empty")


@pytest.mark.parametrize("act", [_unmount, _mount_another, _mount_a_copy, _link_elsewhere])
def test_nothing_is_written_where_another_folder_is_mounted(
    tmp_path: Path, act: Callable[[KeptJob, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails and says so; once the job's folder is mounted again, commits continue there."""
    job = KeptJob(tmp_path / "run")
    act(job, monkeypatch)
    with pytest.raises(
        StorageError, match=r"run (is|leads to .*/empty, and led to) .*no commit is written there. Mount the"
    ):
        job.save(2)
    assert not list(job.folder.glob("commits/*2.json"))
    monkeypatch.undo()
    shutil.rmtree(job.folder.resolve(), ignore_errors=True)
    job.folder.unlink(missing_ok=True)  # a dangling link by now
    job.folder.with_name("away").rename(job.folder)
    assert job.save(2) == [] and job.is_whole(2)


def test_a_world_that_begins_in_a_folder_that_was_deleted_keeps_its_store(tmp_path: Path) -> None:
    """The process must have trained there before; a folder with another store id is left alone."""
    store = LocalStore(tmp_path)
    assert one_store.mend(store, "word") and one_store.identity_of(store) == "word"
    assert not one_store.mend(store, "another")
