"""A real etcd for all tests of this folder, and the stores that must behave identically."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from chaos.services.etcd_cluster import EtcdCluster
from chaos.sim.machine.etcd import Etcd, EtcdClient
from chaos.sim.machine.kernel import Kernel, Process
from rendezvous import EtcdServer, EtcdStore, MemoryStore
from rendezvous.membership.participant import Participant
from tests.conftest import assert_slow, eventually
from tests.rendezvous.rendezvous_sides import Side, beside, patient


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After a test none of its leases may be renewed and none of its keys watched; its members end within a second.

    Later tests in this process would meet such a thread: the simulator, for example, replaces modules that it uses.
    Threads of an earlier test that failed are not waited for again.
    """
    before, members, begin = _followers(), list[Participant](), Participant.__init__

    def note(member: Participant, *arguments: Any, **named: Any) -> None:
        begin(member, *arguments, **named)
        members.append(member)

    with mock.patch.object(Participant, "__init__", note):
        yield
    for member in members:
        member._left.set()
    eventually(lambda: _followers() <= before, "the end of leases and watches")


def _followers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith(("lease-", "watch "))}


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """One etcd for the session, in memory if there is room; tests use their own prefixes and run ids."""
    assert_slow("etcd")
    with EtcdCluster(num_members=1) as cluster:
        yield cluster.members[0]


@pytest.fixture
def etcd_store(etcd: EtcdServer) -> Iterator[EtcdStore]:
    store = patient(etcd.endpoint)
    yield store
    store.close()


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.slow), "simulated"])
def side(request: pytest.FixtureRequest) -> Side:
    """The in-memory store with virtual time, etcd with real time (waiting by watches), and the simulator's store."""
    prefix = f"/test/{uuid.uuid4().hex}/"
    if request.param == "memory":
        memory = MemoryStore()
        return Side(memory, memory.advance, prefix, beside)
    if request.param == "simulated":
        kernel = Kernel()
        process = Process(1, 0, "test")
        client = EtcdClient(Etcd(kernel, random.Random(0), delay_s=0.003), process)

        def later(act: Callable[[], object]) -> None:
            kernel.spawn(process, lambda: act() and None)

        return Side(client, kernel.sleep, prefix, later)
    return Side(request.getfixturevalue("etcd_store"), lambda seconds: None, prefix, beside)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex
