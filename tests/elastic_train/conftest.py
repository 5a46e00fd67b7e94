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
    """Run an S3 server for the session; its address is in the environment, as users would set it."""
    assert_slow("an S3 server")
    from botocore.loaders import JSONFileLoader  # here: only tests of S3 need these two, not all that are collected

    from chaos.services.s3_server import BUCKET, S3

    with S3() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environ.items():
            patch.setenv(name, value)
        load = functools.partial(JSONFileLoader._load_file, JSONFileLoader())
        patch.setattr(JSONFileLoader, "_load_file", _load_once(load))
        yield f"s3://{BUCKET}"


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
