"""Files are replaced as a whole, and file systems are told apart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elastic_train.system.file_systems import hazards, location_of, mount_of
from elastic_train.system.files import publish, write_atomically
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


def test_the_working_folder_is_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report --html .` is told so, as where another folder is named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(Path(), "page")
    assert caught.value.filename == "."


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


TABLE = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:27 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw
40 22 0:40 / /nfs rw,relatime shared:9 - nfs4 server:/x rw,vers=4.2,hard,proto=tcp,timeo=600
41 22 0:41 / /late rw,relatime shared:9 - nfs server:/y rw,vers=3,nocto,soft
42 22 0:42 / /lustre rw shared:9 - lustre 10.0.0.1@tcp:/fs rw,flock
43 22 0:43 / /bucket\\040one rw - fuse.gcsfuse gcsfuse rw,user_id=0
44 22 0:44 / /win rw - cifs //server/share rw,vers=3.1.1
45 22 0:45 / /box rw - overlay overlay rw,lowerdir=/a
46 22 0:46 / /twice rw - ext4 /dev/sdb rw
47 22 0:47 / /twice rw - nfs4 server:/z rw,hard
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    (tmp_path / "mountinfo").write_text(TABLE)
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("path", "kind", "is_local"),
    [
        ("/home/runs/1", "ext4", True),
        ("/dev/shm/run", "tmpfs", True),
        ("/nfs/a/b", "nfs4", False),
        ("/nfs2/a", "ext4", True),
        ("/bucket one/run", "fuse.gcsfuse", False),
        ("/twice/run", "nfs4", False),
    ],
)
def test_the_deepest_and_newest_mount_counts(path: str, kind: str, is_local: bool, mounts: Path) -> None:
    """Names that merely begin alike are other folders, and what is mounted over another hides it."""
    found = mount_of(path, mounts)
    assert found is not None and (found.kind, found.is_local) == (kind, is_local)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/home/run", []),
        ("/nfs/run", []),
        ("/lustre/run", []),
        ("s3://bucket/run", []),
        ("/late/run", ["'nocto'", "'soft'"]),
        ("/dev/shm/run", ["when this machine restarts"]),
        ("/box/run", ["with the container"]),
        ("/win/run", ["SMB"]),
        ("/bucket one/run", ["hard links"]),
    ],
)
def test_what_is_dangerous_is_named(url: str, words: list[str], mounts: Path) -> None:
    """One sentence each, with the folder and its mount."""
    found = list(hazards(url, mounts))
    assert len(found) == len(words)
    assert all(word in line and url in line for word, line in zip(words, found, strict=True))


def test_a_kernel_that_does_not_say_is_no_hazard(tmp_path: Path) -> None:
    """Without /proc nothing is known, and nothing is said."""
    assert list(hazards("/any", tmp_path / "missing")) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EACCES])
def test_a_folder_whose_server_is_away_has_no_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whoever enters a world trains on without it; this ended the process, each time."""
    assert location_of(str(tmp_path)) is not None

    def away(path: Path) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "exists", away)
    assert location_of(str(tmp_path)) is None
