"""An etcd that moves: a file says where it is, and is read again when etcd does not answer where it was."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rendezvous import EtcdServer, EtcdStore, etcd_options
from rendezvous.errors import OptionError, StoreRefusedError, StoreUnavailableError
from rendezvous.membership.store import Put
from rendezvous.torchelastic.addresses import own_address
from tests.conftest import PATIENCE_S
from tests.rendezvous.rendezvous_sides import eventually


def test_a_file_of_endpoints_is_read_whenever_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HOST:PORT with commas or blanks between; one that is not there, or says nothing, is named."""
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


def test_a_node_has_an_address_before_anybody_knows_where_etcd_is(tmp_path: Path) -> None:
    """It may start first."""
    assert own_address(None, etcd_options(f"@{tmp_path}/none"), 1) == "127.0.0.1"


@pytest.mark.slow
def test_a_store_finds_an_etcd_that_has_moved(tmp_path: Path) -> None:
    """Which is another one, without the data of the first: leases have ended there, and a watch shows what it has."""
    path = tmp_path / "endpoints"
    store = EtcdStore(etcd_options(f"@{path}"), give_up_after_s=0.3)
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        store.get("/a")
    with EtcdServer() as first:
        path.write_text(first.endpoint)
        lease = store.lease(3)
        for number in range(5):
            written = store.swap({"/a": Put(f"{number}", lease)}, {})
        assert written is not None
        watch = store.watch("/a")
        assert watch.wait(written - 1, PATIENCE_S) is not None
    with EtcdServer() as second:
        with pytest.raises(StoreUnavailableError):
            store.get("/a")
        path.write_text(second.endpoint)
        found = None

        def answers() -> bool:
            nonlocal found
            with contextlib.suppress(StoreUnavailableError):
                found = store.get("/a")
            return found is not None

        eventually(answers, "the etcd that is there now")
        assert found is not None and found.entries == {} and found.life == 1
        with pytest.raises(StoreRefusedError):
            store.swap({"/a": Put("of an old lease", lease)}, {})
        eventually(lambda: lease.is_lost, "the end of a lease that nobody knows any more")
        store.swap({"/a": Put("new", store.lease(60))}, {})
        eventually(lambda: [e.value for e in watch.snapshot.entries.values()] == ["new"], "what the watch shows")
        watch.close()
        store.close()
