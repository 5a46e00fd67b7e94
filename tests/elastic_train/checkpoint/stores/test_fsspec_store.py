"""A store across a network: a fault on the way neither creates nor removes a commit."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator

import pytest
import torch
from s3fs import S3FileSystem

from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.stores.fsspec_store import FsspecStore
from elastic_train.checkpoint.stores.store import Store, Uncertain
from elastic_train.errors import StorageError
from tests.elastic_train.checkpoint.commit_samples import facts, small_state, writer
from tests.elastic_train.checkpoint.faulty_network import FaultyNetwork

pytestmark = pytest.mark.slow


@pytest.fixture
def network(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyNetwork]:
    """A network to the S3 server, with few retries by the client."""
    monkeypatch.setattr(S3FileSystem, "retries", 2)
    with FaultyNetwork(os.environ["AWS_ENDPOINT_URL"]).serving() as network:
        yield network


@pytest.fixture
def remote(network: FaultyNetwork, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    """A store across that network; only its options have the address and the credentials."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {"endpoint_url": network.url, "key": "test", "secret": "test"}
    return FsspecStore(
        f"{s3_bucket}/{uuid.uuid4().hex}/run", {**options, "config_kwargs": {"retries": {"max_attempts": 1}}}
    )


def test_a_connection_that_breaks_in_the_middle_of_a_file_publishes_nothing(
    network: FaultyNetwork, remote: FsspecStore
) -> None:
    """No torn object at a final key, no silent success; the old head stays, and the next save works."""
    commits = writer(remote)
    first = commits.save(small_state(1), facts(1))
    network.cut_after = 1 << 20
    with pytest.raises(StorageError, match=r"__0_0\.distcp: cannot write"):
        commits.save({"w": torch.zeros(1_000_000)}, facts(2))
    network.cut_after = None
    assert {entry.key.split("/")[1] for entry in remote.list("data/")} == {"step-000000000001"}
    assert discover(remote).head == first
    second = commits.save(small_state(2), facts(2))
    assert discover(remote).head == second


def test_a_record_whose_answers_are_lost_is_recognised(network: FaultyNetwork, remote: FsspecStore) -> None:
    """The store refuses the retry of a create that arrived (412), and the content proves its author."""
    commits = writer(remote)
    network.matching, network.num_unanswered = re.compile(rb"PUT \S*/run/commits/0"), 1
    record = commits.save(small_state(1), facts(1))
    assert network.num_unanswered == 0
    found = discover(remote)
    assert (found.head, found.skipped) == (record, ())
    assert read_state(remote, record)["scheduler"] == {"last_epoch": 1}


def test_a_conflict_is_retried(network: FaultyNetwork, remote: FsspecStore) -> None:
    """A 409 decides nothing: the create is repeated, and is unknown after some tries."""
    commits = writer(remote)
    network.matching, network.num_conflicts = re.compile(rb"PUT \S*/run/commits/0"), 3
    first = commits.save(small_state(1), facts(1))
    assert network.num_conflicts == 0
    network.num_conflicts = 1000
    with pytest.raises(Uncertain, match="conflict"):
        commits.save(small_state(2), facts(2))
    network.num_conflicts = 0
    assert discover(remote).head == first


def test_a_save_does_not_sync_the_whole_host(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the written files are synced: `os.sync` would stall everything else on the machine."""

    def refuse() -> None:
        raise AssertionError("os.sync was called")

    monkeypatch.setattr(os, "sync", refuse)
    record = writer(store).save(small_state(1), facts(1))
    assert discover(store).head == record
