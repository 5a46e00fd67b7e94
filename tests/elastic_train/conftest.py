"""Stores of every kind, and an S3 of our own."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, Store
from tests.conftest import assert_slow


class PlainFileSystem(MemoryFileSystem):
    """A file system of which nobody knows whether it creates conditionally."""

    protocol = ("plain",)
    root_marker = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("plain://").strip("/")


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """Run moto's threaded S3 server for the session; its address is in the environment, as users would set it."""
    assert_slow("an S3 server")
    import boto3  # these three here: only tests of S3 need them, not all that are collected
    from botocore.loaders import JSONFileLoader
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        load = functools.partial(JSONFileLoader._load_file, JSONFileLoader())
        patch.setattr(JSONFileLoader, "_load_file", _load_once(load))
        boto3.client("s3").create_bucket(Bucket="commits")
        yield "s3://commits"
    server.stop()


def _load_once(load: Callable[..., object]) -> Callable[..., object]:
    """Parse each of botocore's descriptions of S3 once, not for every store that a test opens."""
    loaded = functools.cache(load)
    return lambda _, path, open_method: loaded(path, open_method)


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow), "plain"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of every kind."""
    unique = uuid.uuid4().hex
    if request.param == "local":
        return DeadlineStore(open_store(str(tmp_path / "run")), lambda: None)  # as worlds open it
    if request.param == "memory":
        return open_store(f"memory://{unique}/run")
    if request.param == "plain":
        fsspec.register_implementation("plain", PlainFileSystem, clobber=True)
        return open_store(f"plain://{unique}/run")
    return open_store(f"{request.getfixturevalue('s3_bucket')}/{unique}/run")


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    """An empty store in a local folder."""
    return open_store(str(tmp_path / "run"))
