"""The leader compacts etcd's history if nobody else uses the etcd."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from rendezvous import EtcdServer, EtcdStore, etcd_options
from rendezvous.etcd.compaction import Compaction
from rendezvous.membership.store import Put, Snapshot
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.rendezvous_sides import client_of, patient

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    """An etcd without automatic compaction, which is the default."""
    with EtcdServer(flags={"auto-compaction-retention": "0"}) as started:
        yield started


@pytest.fixture
def store(server: EtcdServer) -> Iterator[EtcdStore]:
    made = patient(server.endpoint)
    yield made
    made.close()


def is_compacted(store: EtcdStore, revision: int) -> bool:
    try:
        client_of(store).get_response("/elastic/a", revision=revision)
    except grpc.RpcError as error:
        assert "compacted" in error.details()
        return True
    return False


def compaction(server: EtcdServer, *, leads: bool = True, keep_s: float = 0.3) -> Compaction:
    return Compaction(etcd_options(server.endpoint), lambda: leads, keep_s=keep_s, look_every_s=0.05)


def write(store: EtcdStore) -> int:
    revision = store.swap({"/elastic/a": Put("1")}, {})
    assert revision is not None
    return revision


def test_the_leader_compacts_what_is_old(server: EtcdServer, store: EtcdStore) -> None:
    """Repeatedly; our watch continues, and history younger than the retention time stays."""
    first, watch = write(store), store.watch("/elastic/")
    compacting = compaction(server)
    second = write(store)
    eventually(lambda: is_compacted(store, first), "the compaction")
    write(store)
    eventually(lambda: is_compacted(store, second), "the next one")
    written = write(store)
    assert not is_compacted(store, written) and watch.wait(Snapshot(written - 1, {}), PATIENCE_S) is not None
    compacting.close()
    watch.close()


def test_an_etcd_that_others_use_is_left_alone(server: EtcdServer, store: EtcdStore) -> None:
    """One foreign key is enough: its watchers may have to resume. Members that do not lead never compact."""
    first = write(store)
    others = [compaction(server, leads=False), compaction(server, keep_s=3600.0)]
    write(store)
    threading.Event().wait(1.0)
    assert not is_compacted(store, first)
    store.swap({"/registry/pods/a": Put("1")}, {})
    others.append(compaction(server))
    threading.Event().wait(1.0)
    assert not is_compacted(store, first)
    store.swap({"/registry/pods/a": None}, {})
    eventually(lambda: is_compacted(store, first), "the compaction, once there is none")
    for each in others:
        each.close()


def test_the_etcd_of_demos_compacts_by_itself(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It has no operator."""
    flags = EtcdServer(data_dir=tmp_path_factory.mktemp("etcd"))._flags()
    assert "--auto-compaction-mode=periodic" in flags and "--auto-compaction-retention=10m" in flags
