"""Uploads: none of the data is on the local disk, few pieces are in memory, and a failure leaves none behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import fsspec
import pytest
import torch
from s3fs import S3FileSystem

from chaos.services.s3_server import BUCKET, S3
from elastic_train.checkpoint.commits.pruning import drop_unfinished
from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.stores import fsspec_store
from elastic_train.checkpoint.stores.fsspec_store import FsspecStore, S3Upload
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, read
from elastic_train.errors import StorageError
from elastic_train.world import world
from tests.conftest import run_source
from tests.elastic_train.checkpoint.commit_samples import facts
from tests.elastic_train.checkpoint.faulty_network import FaultyNetwork
from tests.elastic_train.checkpoint.save_samples import open_saves, quick_retries
from tests.elastic_train.conftest import PlainFileSystem

__all__ = ["quick_retries"]
pytestmark = pytest.mark.slow
PIECE = 5 << 20  # S3's minimum


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(fsspec_store, "MOST_UNANSWERED", 2)


@pytest.fixture
def full_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of a file system with room for some kilobytes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "elastic-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def state_of(num_bytes: int, value: float = 1.0) -> dict[str, object]:
    return {"model": {"w": torch.full((num_bytes // 4,), value)}}


SAVE = """
import json, os, sys, tempfile, torch
os.environ.update(json.loads(sys.argv[3]))
tempfile.tempdir = None
from elastic_train.checkpoint.stores.open import open_store
from tests.elastic_train.checkpoint.commit_samples import facts
from tests.elastic_train.checkpoint.save_samples import open_saves
assert tempfile.gettempdir() == sys.argv[2]
saves = open_saves(open_store(sys.argv[1]))
saves.begin({"model": {"w": torch.ones(10_000_000)}}, facts(1))
ended = saves.wait()
sys.exit(None if ended.error is None else str(ended.error))
"""


def test_a_save_to_s3_needs_no_room_on_the_local_disk(full_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full TMPDIR fails no save, since parts are not staged there."""
    with S3() as s3:
        environ = json.dumps({**s3.environ, "TMPDIR": str(full_folder)})
        done = run_source(SAVE, s3.url("run"), str(full_folder), environ)
        assert (done.returncode, done.stderr) == (0, "")
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        head = discover(open_store(s3.url("run"))).head
    assert head is not None and head.step == 1


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 4 * PIECE + 7])
@pytest.mark.parametrize("kind", ["s3", "memory", "plain"])
def test_what_was_written_is_there_whatever_its_size(kind: str, num_bytes: int, request: pytest.FixtureRequest) -> None:
    """An upload takes one request, or as many pieces as needed, with a last piece of any size."""
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)
    root = request.getfixturevalue("s3_bucket") if kind == "s3" else f"{kind}://files"
    store = FsspecStore(f"{root}/{uuid.uuid4().hex}")
    content = os.urandom(num_bytes)
    with store.write("data/x") as sink:
        for at in range(0, num_bytes, 3 << 20):
            assert sink.write(memoryview(content)[at : at + (3 << 20)]) == min(3 << 20, num_bytes - at)
    assert read(store, "data/x") == content


@pytest.mark.parametrize("kind", ["s3", "memory", "plain"])
def test_an_upload_that_is_given_up_leaves_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    """It leaves neither an object nor pieces of one, for which S3 charges until they are removed."""
    fsspec.register_implementation("plain", PlainFileSystem, clobber=True)
    root = request.getfixturevalue("s3_bucket") if kind == "s3" else f"{kind}://files"
    store = FsspecStore(f"{root}/{uuid.uuid4().hex}")
    with pytest.raises(ZeroDivisionError), store.write("data/x") as sink:
        sink.write(bytes(3 * PIECE))
        1 / 0  # noqa: B018
    assert store.list("data/") == []
    if kind == "s3":
        assert not boto3.client("s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_a_stream_that_breaks_begins_again_with_the_tensors(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection costs a try, not the save: the data is still in memory."""
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    root = f"{s3_bucket}/{uuid.uuid4().hex}/run"
    with FaultyNetwork(os.environ["AWS_ENDPOINT_URL"]).serving() as network:
        options = {"endpoint_url": network.url, "config_kwargs": {"retries": {"max_attempts": 1}}}
        network.matching, network.num_unanswered = re.compile(rb"PUT \S*partNumber=2"), 1
        saves = open_saves(FsspecStore(root, options))
        saves.begin(state_of(4 * PIECE, 3.0), facts(1))
        ended = saves.wait()
    assert network.num_unanswered == 0
    assert ended is not None and ended.error is None and ended.commit is not None
    store = open_store(root)
    model: Any = read_state(store, ended.commit)["model"]
    assert torch.equal(model["w"], torch.full((PIECE,), 3.0))
    assert not boto3.client("s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_few_pieces_are_in_memory_while_the_storage_is_slow(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is faster than the storage waits."""
    most, real = 0, S3Upload._begin

    def counting(upload: S3Upload, method: str, **arguments: object) -> Any:
        nonlocal most
        begun = real(upload, method, **arguments)
        most = max(most, len(upload._unanswered) + (method == "upload_part"))
        return begun

    monkeypatch.setattr(S3Upload, "_begin", counting)
    store = FsspecStore(f"{s3_bucket}/{uuid.uuid4().hex}")
    with store.write("data/x") as sink:
        for _ in range(8):
            sink.write(bytes(PIECE))
    assert most == 2
    assert [entry.size for entry in store.list("data/")] == [8 * PIECE]


def test_an_object_whose_size_differs_is_not_kept(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that the storage reports decides, not that it accepted every request."""
    store = FsspecStore(f"{s3_bucket}/{uuid.uuid4().hex}")
    monkeypatch.setattr(S3Upload, "finish", lambda upload: upload._begin("put_object", Body=b"torn").result())
    with pytest.raises(StorageError, match="4 bytes of 9 arrived"), store.write("data/x") as sink:
        sink.write(b"all of it")
    assert store.list("data/") == []


def begun(store: FsspecStore, key: str) -> Any:
    """Begin an upload as a process killed after its first pieces does; dropping it aborts nothing."""
    upload = S3Upload(store._fs, store._path(key))
    upload.write(bytes(2 * PIECE + 1))
    while upload._unanswered:
        upload._take_answer()
    return upload


def keys_left() -> list[str]:
    listed = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return sorted(upload["Key"].partition("/")[2] for upload in listed)


def test_uploads_that_a_killed_process_left_are_aborted(s3_bucket: str) -> None:
    """Uploads of this run that are older than the sweep's limit, but no other run's and no younger ones."""
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    ours, other = FsspecStore(f"{root}/run"), FsspecStore(f"{root}/run-2")
    key = "data/step-000000000007/1-abc/rank-00000.distcp"
    begun(ours, key), begun(other, key)
    listed = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    at = max(upload["Initiated"].timestamp() for upload in listed)
    store = DeadlineStore(ours, lambda: None)
    assert drop_unfinished(store, now=at + 5 * 3600) == []
    assert drop_unfinished(store, now=at + 7 * 3600, is_rehearsal=True) == [key]
    assert keys_left() == [f"run-2/{key}", f"run/{key}"]
    assert drop_unfinished(store, now=at + 7 * 3600) == [key]
    assert drop_unfinished(store, now=at + 7 * 3600) == [] and keys_left() == [f"run-2/{key}"]
    assert drop_unfinished(other, now=at + 7 * 3600) == [key] and keys_left() == []


def test_a_page_of_uploads_is_followed_by_the_next(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 lists a thousand at a time, and says where the next thousand begin."""
    store = FsspecStore(f"{s3_bucket}/{uuid.uuid4().hex}/run")
    old, asked = datetime(2020, 1, 1, tzinfo=UTC), []
    pages = [{"IsTruncated": True, "NextKeyMarker": "k", "NextUploadIdMarker": "u"}, {"IsTruncated": False}]

    async def answer(method: str, **arguments: Any) -> dict[str, object]:
        asked.append((method, arguments.get("KeyMarker"), arguments.get("UploadIdMarker")))
        if method == "abort_multipart_upload":
            raise FileNotFoundError(arguments["UploadId"])
        page = pages[len(asked) > 1]
        return {**page, "Uploads": [{"Key": arguments["Prefix"] + "x", "UploadId": "1", "Initiated": old}]}

    monkeypatch.setattr(store._fs, "_call_s3", answer)
    assert drop_unfinished(store) == ["data/x", "data/x"], "one that was finished meanwhile is no error"
    assert asked == [
        ("list_multipart_uploads", None, None),
        ("abort_multipart_upload", None, None),
        ("list_multipart_uploads", "k", "u"),
        ("abort_multipart_upload", None, None),
    ]


def test_a_world_that_forms_aborts_what_was_left(s3_bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    """A bucket that refuses to list its uploads does not fail the world."""
    store = FsspecStore(f"{s3_bucket}/{uuid.uuid4().hex}/run")
    begun(store, "data/step-000000000007/1-abc/rank-00000.distcp")
    world._forget_old_terms(DeadlineStore(store, lambda: None), 3)
    assert keys_left() == []
    store._fs._call_s3 = Mock(side_effect=PermissionError("AccessDenied"))
    with caplog.at_level("INFO"):
        world._forget_old_terms(DeadlineStore(store, lambda: None), 3)
    assert "are not aborted" in caplog.text


def test_nothing_unfinished_is_kept_by_other_stores(tmp_path: Path) -> None:
    """A local folder has no uploads, nor has a file system that is not known to have any."""
    assert drop_unfinished(open_store(str(tmp_path))) == []
    assert drop_unfinished(DeadlineStore(open_store(str(tmp_path)), lambda: None)) == []
    assert drop_unfinished(FsspecStore(f"memory://{uuid.uuid4().hex}")) == []
