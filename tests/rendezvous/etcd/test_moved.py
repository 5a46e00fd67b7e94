"""An etcd that moves: a file has its endpoints, and is read again when etcd does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from rendezvous import EtcdServer, EtcdStore, etcd_options
from rendezvous.errors import OptionError, StoreRefusedError, StoreUnavailableError
from rendezvous.etcd import connection
from rendezvous.membership.store import Put, Snapshot
from rendezvous.torchelastic.addresses import own_address
from tests.conftest import PATIENCE_S, eventually


def test_a_file_of_endpoints_is_read_whenever_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOST:PORT, separated by commas or blanks; a missing or empty file is named in the error."""
    monkeypatch.chdir(tmp_path)
    options = etcd_options("@etcd.endpoints")
    path = tmp_path / "etcd.endpoints"
    assert options.where == f"@{path}", "another working directory does not change it"
    with pytest.raises(OptionError, match=rf"{path}, which is to say where etcd is, cannot be read"):
        options.addresses()
    path.write_text("n1:2379,n2\n")
    assert options.addresses() == ("n1:2379", "n2:2379")
    path.write_text("n3:2379 n4:1\nn5:2\n")
    assert options.addresses() == ("n3:2379", "n4:1", "n5:2")
    assert etcd_options(options.endpoints).addresses() == options.addresses(), "what a worker is told"
    for wrong, why in (("", "and does not"), ("@other", "and does not"), ("n1:port", "is not HOST:PORT")):
        path.write_text(wrong)
        with pytest.raises(OptionError, match=why):
            options.addresses()
    with pytest.raises(OptionError, match="is given alone"):
        etcd_options("@etcd.endpoints,n1:2379")


def test_every_thread_hears_that_the_files_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that waited for hanging storage one heard it, and the others took None for what had been read."""
    hold, connected = threading.Event(), connection.Connection(etcd_options(f"@{tmp_path}/endpoints"))

    def read(options: object) -> NoReturn:
        hold.wait(PATIENCE_S)
        raise OSError(errno.EIO, os.strerror(errno.EIO), "endpoints")

    monkeypatch.setattr(connection, "_read_from_disk", read)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(connected._read_from_disk)]
        eventually(lambda: connected._reading is not None, "the first one waits")
        waiting.append(pool.submit(connected._read_from_disk))
        threading.Event().wait(0.2)  # until the second one waits as well
        hold.set()
        assert [isinstance(one.exception(PATIENCE_S), OSError) for one in waiting] == [True, True]


def test_a_node_has_an_address_before_anybody_knows_where_etcd_is(tmp_path: Path) -> None:
    """It may start before etcd."""
    assert own_address(None, etcd_options(f"@{tmp_path}/none"), 1) == "127.0.0.1"


@pytest.mark.slow
def test_a_store_finds_an_etcd_that_has_moved(tmp_path: Path) -> None:
    """It is another etcd without the first one's data: leases have ended there, and a watch shows the new contents."""
    path = tmp_path / "endpoints"
    options = etcd_options(f"@{path}")
    store, hasty = EtcdStore(options, give_up_after_s=PATIENCE_S), EtcdStore(options, give_up_after_s=0.3)
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        hasty.get("/a")
    with EtcdServer() as first:
        path.write_text(first.endpoint)
        lease = store.lease(15)  # its loss is noticed after a third of this at the earliest
        for number in range(5):
            written = store.swap({"/a": Put(f"{number}", lease)}, {})
        assert written is not None
        watch = store.watch("/a")
        assert watch.wait(Snapshot(written - 1, {}), PATIENCE_S) is not None
    with EtcdServer() as second:
        with pytest.raises(StoreUnavailableError):
            hasty.get("/a")
        path.write_text(second.endpoint)
        found = store.get("/a")
        assert found.entries == {} and found.life == 1
        with pytest.raises(StoreRefusedError):
            store.swap({"/a": Put("of an old lease", lease)}, {})
        eventually(lambda: lease.is_lost, "the end of a lease that nobody knows any more")
        lasting = store.lease(PATIENCE_S)
        store.swap({"/a": Put("new", lasting)}, {})
        eventually(lambda: [e.value for e in watch.snapshot.entries.values()] == ["new"], "what the watch shows")
        lasting.abandon()
        for each in (watch, store, hasty):
            each.close()


@pytest.mark.slow
def test_storage_that_hangs_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with the endpoints is on shared storage: calls fail as if etcd were down, and work again afterwards."""
    monkeypatch.setattr(connection, "DISK_S", 0.1)
    path = tmp_path / "endpoints"
    os.mkfifo(path)  # a reader waits for a writer
    options = etcd_options(f"@{path}")
    store, hasty = EtcdStore(options, give_up_after_s=PATIENCE_S), EtcdStore(options, give_up_after_s=0.3)
    with pytest.raises(StoreUnavailableError, match=f"{path} cannot be read: its storage does not answer"):
        hasty.get("/a")
    with EtcdServer() as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "/a")
        path.rename(tmp_path / "hanging")
        path.write_text(server.endpoint)

        def has_ended() -> bool:
            with contextlib.suppress(OSError):  # no reader
                os.close(os.open(tmp_path / "hanging", os.O_WRONLY | os.O_NONBLOCK))
            return waiting.done()

        eventually(has_ended, "an answer after the storage's")
        assert waiting.result().entries == {}
        for each in (store, hasty):
            each.close()
