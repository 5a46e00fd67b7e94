"""A real etcd for all tests of this room, and the two stores that must behave alike."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from rendezvous_sides import Side

from rendezvous import EtcdServer, EtcdStore, MemoryStore, etcd_options


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """One etcd for the session; tests use prefixes and run ids of their own."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def etcd_store(etcd: EtcdServer) -> Iterator[EtcdStore]:
    store = EtcdStore(etcd_options(etcd.endpoint))
    yield store
    store.close()


@pytest.fixture(params=["memory", "etcd"])
def side(request: pytest.FixtureRequest) -> Side:
    """The twin in memory with its virtual time, then etcd with real time that a watch waits for."""
    prefix = f"/test/{uuid.uuid4().hex}/"
    if request.param == "memory":
        memory = MemoryStore()
        return Side(memory, memory.advance, prefix)
    return Side(request.getfixturevalue("etcd_store"), lambda seconds: None, prefix)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex
